"""One tile of rows of the norms: what norm.py and norm_long.py compute alike, and recompute bit for bit."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def row_offsets(row, inner, outer_stride, inner_stride):
    return (row // inner) * outer_stride + (row % inner) * inner_stride


@triton.jit
def read_statistics(statistics, row, rows, inside, LAYER: tl.constexpr):
    """(mean, rstd, shift) with shift = -residual rstd; mean and shift None for RMSNorm."""
    if LAYER:
        mean = tl.load(statistics + row, mask=inside, other=0.0)
        residual = tl.load(statistics + row + rows, mask=inside, other=0.0)
        rstd = tl.load(statistics + row + rows + rows, mask=inside, other=0.0)
        return mean, rstd, -(residual * rstd)
    else:
        return None, tl.load(statistics + row, mask=inside, other=0.0), None


@triton.jit
def normalised(x, mean, rstd, shift):
    """(x - mean - residual) rstd: x - mean is exact where the mean is large, and the rest is one multiply-add."""
    if mean is None:
        return x * rstd[:, None]
    else:
        return tl.fma(x - mean[:, None], rstd[:, None], shift[:, None])


@triton.jit
def affine(h, weight, bias):
    if weight is None:
        return h if bias is None else h + bias
    else:
        return h * weight if bias is None else tl.fma(h, weight, bias)


@triton.jit
def parameter(pointer, columns, inside, F: tl.constexpr):
    """A row [1, columns] of weight or bias; None stays None."""
    if pointer is None:
        return None
    else:
        return tl.load(pointer + columns, mask=inside, other=0.0).to(F)[None, :]


@triton.jit
def input_gradient(g, h, w, along, level, rstd):
    """rstd (g w - level - h along); w and level may be None."""
    minus = tl.zeros_like(along)[:, None] if level is None else -level[:, None]
    v = g + minus if w is None else tl.fma(g, w, minus)
    return rstd[:, None] * tl.fma(-h, along[:, None], v)
