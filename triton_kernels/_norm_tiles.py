"""One tile of rows of the norms: what norm.py and norm_long.py compute alike, and recompute bit for bit."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def row_offsets(row, inner, outer_stride, inner_stride):
    return (row // inner) * outer_stride + (row % inner) * inner_stride


@triton.jit
def read_statistics(statistics, row, rows, inside, LAYER: tl.constexpr):
    """(mean, rstd, shift) with shift = -residual rstd; mean and shift 0 for RMSNorm."""
    if LAYER:
        mean = tl.load(statistics + row, mask=inside, other=0.0)
        residual = tl.load(statistics + row + rows, mask=inside, other=0.0)
        rstd = tl.load(statistics + row + rows + rows, mask=inside, other=0.0)
        shift = -(residual * rstd)
    else:
        rstd = tl.load(statistics + row, mask=inside, other=0.0)
        mean = tl.zeros_like(rstd)
        shift = mean
    return mean, rstd, shift


@triton.jit
def normalised(x, mean, rstd, shift, LAYER: tl.constexpr):
    """(x - mean - residual) rstd: x - mean is exact where the mean is large, and the rest is one multiply-add."""
    if LAYER:
        return tl.fma(x - mean[:, None], rstd[:, None], shift[:, None])
    else:
        return x * rstd[:, None]


@triton.jit
def affine(h, weight, bias, column, inside, F: tl.constexpr):
    """h weight + bias, of which either may be None."""
    if bias is not None:
        term = tl.load(bias + column, mask=inside, other=0.0).to(F)[None, :]
    if weight is not None:
        factor = tl.load(weight + column, mask=inside, other=0.0).to(F)[None, :]
        out = h * factor if bias is None else tl.fma(h, factor, term)
    else:
        out = h if bias is None else h + term
    return out


@triton.jit
def load_weight(weight, column, inside, F: tl.constexpr):
    """A row [1, columns] of the weight; ones where it is None."""
    if weight is None:
        return tl.full((1, column.shape[0]), 1.0, F)
    else:
        return tl.load(weight + column, mask=inside, other=0.0).to(F)[None, :]


@triton.jit
def load_rows(x, row, rows, inner, outer_stride, inner_stride, column, n):
    source = row_offsets(row, inner, outer_stride, inner_stride)[:, None] + column[None, :]
    return tl.load(x + source, mask=(row < rows)[:, None] & (column < n)[None, :], other=0.0)


@triton.jit
def input_gradient(g, h, w, along, level, rstd):
    """rstd (g w - level - h along)."""
    return rstd[:, None] * tl.fma(-h, along[:, None], tl.fma(g, w, -level[:, None]))
