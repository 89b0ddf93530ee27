"""Softmax over the last dimension of scale * x + mask, with causal limit and dropout, in one pass over memory.

Without dropout, backward reads the output (which a following matrix product keeps anyway). With dropout it reads x and two
numbers a row, the maximum and the sum: the probabilities, the mask and their product are never stored. Forward moves 2 elements
per element (and the mask), backward 3. A program holds a tile of whole rows in registers; longer rows are gone through twice, the
maximum and the sum being found together (softmax_long.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from . import softmax_long
from ._common import (
    WIDEST,
    arithmetic,
    bits,
    divide_up,
    double,
    exp_nonpositive,
    is_half,
    launch_rows,
    row_sum,
    tile,
)
from ._philox import rule
from ._softmax_tiles import (
    inverse_of,
    lead,
    load_scores,
    quotient,
    readable,
    row_dot,
    row_offsets,
    tile_factors,
    visible_columns,
    weighted,
)


@triton.jit(
    do_not_specialize=["rows", "scale", "causal", "threshold", "keep_scale", "first"],
    do_not_specialize_on_alignment=["n1", "n2", "step"],
)
def _forward(
    x, mask, y, statistics, seed, rows, n, n1, n2, x0, x1, x2, m0, m1, m2, step, scale, causal, threshold,
    keep_scale, first, BOOLEAN: tl.constexpr, FOURS: tl.constexpr, RECOMPUTE: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    F: tl.constexpr = arithmetic(x.dtype.element_ty)
    HALF: tl.constexpr = is_half(x.dtype.element_ty)
    row = (tl.program_id(0).to(tl.int64) + first) * ROWS + tl.arange(0, ROWS)
    skipped = lead(row, n, seed is not None, FOURS)
    column = tl.arange(0, COLUMNS)[None, :] - skipped[:, None]
    visible = visible_columns(row, rows, n, n2, causal)
    CAUSAL: tl.constexpr = causal is not None
    x += row_offsets(row, n1, n2, x0, x1, x2)[:, None]
    if mask is not None:
        mask += row_offsets(row, n1, n2, m0, m1, m2)[:, None]
    score, keep = load_scores(
        x, mask, column, step, visible[:, None], n, double(scale, F), F, BOOLEAN, CAUSAL
    )
    if RECOMPUTE:
        top = tl.load(statistics + row, mask=row < rows, other=0.0)
        total = tl.load(statistics + row + rows, mask=row < rows, other=0.0)
        e = exp_nonpositive(score - top[:, None], HALF)
    else:
        kept = visible > 0 if mask is None else tl.max(keep.to(tl.int32), axis=1) > 0
        top = tl.where(kept, tl.max(score, axis=1), 0.0)
        e = exp_nonpositive(score - top[:, None], HALF)
        total = row_sum(e, HALF)
        tl.store(statistics + row, top, mask=row < rows)
        tl.store(statistics + row + rows, total, mask=row < rows)
    out = quotient(e, total, inverse_of(total), HALF)
    if seed is not None:
        out *= tile_factors(seed, row, n, skipped, 0, threshold, keep_scale, F, ROWS, COLUMNS)
    if CAUSAL:  # zero also in a row of NaN
        out = tl.where(column < visible[:, None], out, 0.0)
    exists = (row < rows)[:, None] & (column >= 0) & (column < n)
    tl.store(y + row[:, None] * n + column, out.to(y.dtype.element_ty), mask=exists)


WIDEST_DROPOUT_BACKWARD = 8192  # as WIDEST, where probabilities, gradient and random words are held


class Scores(NamedTuple):
    """How the kernels find scores: x with its columns adjacent, in rows whose leading dimensions were merged to three."""

    x: Tensor
    sizes: tuple[int, int]  # n1, n2
    strides: tuple[int, int, int]
    mask: Tensor | None = None  # uint8 (0: masked) or x's dtype, with strides and column step
    mask_strides: tuple[int, int, int] = (0, 0, 0)
    step: int = 0
    scale: float = 1.0
    causal: int | None = None
    dropout_p: float = 0.0
    seed: Tensor | None = None


def _options(scores: Scores, n: int) -> dict[str, bool]:
    return {"BOOLEAN": scores.mask is not None and scores.mask.dtype != scores.x.dtype, "FOURS": n % 4 == 0}


def _geometry(scores: Scores, n: int, widest: int) -> tuple[int, int, int] | None:
    """The tile of a program; None: rows too long for one."""
    width = n + (3 if scores.seed is not None and n % 4 else 0)
    return None if width > widest else tile(width, scores.x.dtype.itemsize)


def forward(scores: Scores, y: Tensor, statistics: Tensor, recompute: bool) -> None:
    """y (contiguous), and the statistics [2, rows] unless `recompute`."""
    rows, n = statistics.shape[-1], y.shape[-1]
    if not y.numel():
        if not recompute:
            statistics.zero_()
        return
    arguments = (
        scores.x, scores.mask, y, statistics, scores.seed, rows, n, *scores.sizes, *scores.strides,
        *scores.mask_strides, scores.step, bits(scores.scale), scores.causal, *rule(scores.dropout_p),
    )  # fmt: skip
    options = _options(scores, n) | {"RECOMPUTE": recompute}
    geometry = _geometry(scores, n, WIDEST)
    if geometry is None:
        return softmax_long.forward(rows, y, arguments, options)
    height, width, warps = geometry
    programs = divide_up(rows, height)
    launch_rows(
        _forward, programs, y, *arguments,
        **options, ROWS=height, COLUMNS=width, num_warps=warps,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "scale", "first"], do_not_specialize_on_alignment=["n1", "n2"])
def _backward(
    grad, y, dx, rows, n, n1, n2, g0, g1, g2, scale, first, MASKED: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """dx = scale p (g - sum(g p)) from the output."""
    F: tl.constexpr = arithmetic(y.dtype.element_ty)
    HALF: tl.constexpr = is_half(y.dtype.element_ty)
    row = (tl.program_id(0).to(tl.int64) + first) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows)[:, None] & (column < n)
    own = row[:, None] * n + column
    p = tl.load(y + own, mask=inside, other=0.0).to(F)
    grad += row_offsets(row, n1, n2, g0, g1, g2)[:, None]
    g = tl.load(grad + column, mask=inside, other=0.0).to(F)
    dot = row_dot(p, g, MASKED, HALF)
    out = weighted(p, g - dot[:, None], MASKED) * double(scale, F)
    tl.store(dx + own, out.to(dx.dtype.element_ty), mask=inside)


@triton.jit(
    do_not_specialize=["rows", "scale", "causal", "threshold", "keep_scale", "first", "grad_scale"],
    do_not_specialize_on_alignment=["n1", "n2", "step"],
)
def _dropout_backward(
    grad, x, mask, dx, statistics, seed, rows, n, n1, n2, x0, x1, x2, m0, m1, m2, step, scale, causal, threshold,
    keep_scale, g0, g1, g2, grad_scale, first, BOOLEAN: tl.constexpr, FOURS: tl.constexpr, MASKED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The same with g times the dropout factors and p formed again, from x and the statistics."""
    F: tl.constexpr = arithmetic(x.dtype.element_ty)
    HALF: tl.constexpr = is_half(x.dtype.element_ty)
    row = (tl.program_id(0).to(tl.int64) + first) * ROWS + tl.arange(0, ROWS)
    skipped = lead(row, n, True, FOURS)
    column = tl.arange(0, COLUMNS)[None, :] - skipped[:, None]
    visible = visible_columns(row, rows, n, n2, causal)
    CAUSAL: tl.constexpr = causal is not None
    x += row_offsets(row, n1, n2, x0, x1, x2)[:, None]
    if mask is not None:
        mask += row_offsets(row, n1, n2, m0, m1, m2)[:, None]
    score, _ = load_scores(x, mask, column, step, visible[:, None], n, double(scale, F), F, BOOLEAN, CAUSAL)
    top = tl.load(statistics + row, mask=row < rows, other=0.0)
    total = tl.load(statistics + row + rows, mask=row < rows, other=0.0)
    p = quotient(exp_nonpositive(score - top[:, None], HALF), total, inverse_of(total), HALF)
    grad += row_offsets(row, n1, n2, g0, g1, g2)[:, None]
    g = tl.load(grad + column, mask=readable(column, visible[:, None], n), other=0.0).to(F)
    if CAUSAL:
        p = tl.where(column < visible[:, None], p, 0.0)
    g *= tile_factors(seed, row, n, skipped, 0, threshold, keep_scale, F, ROWS, COLUMNS)
    dot = row_dot(p, g, MASKED, HALF)
    out = weighted(p, g - dot[:, None], MASKED) * double(grad_scale, F)
    exists = (row < rows)[:, None] & (column >= 0) & (column < n)
    tl.store(dx + row[:, None] * n + column, out.to(dx.dtype.element_ty), mask=exists)


def backward(scores: Scores, grad: Tensor, y: Tensor, dx: Tensor, masked: bool, scale: float) -> None:
    """dx (contiguous) from the output y (contiguous). Of `scores`, sizes and strides are those of `grad`."""
    rows, n = dx.numel() // max(1, dx.shape[-1]), dx.shape[-1]
    if not dx.numel():
        return
    arguments = grad, y, dx, rows, n, *scores.sizes, *scores.strides, bits(scale)
    if n > WIDEST:
        return softmax_long.backward(rows, y, arguments, masked)
    height, width, warps = tile(n, y.dtype.itemsize)
    programs = divide_up(rows, height)
    launch_rows(
        _backward, programs, y, *arguments,
        MASKED=masked, ROWS=height, COLUMNS=width, num_warps=warps,
    )  # fmt: skip


def dropout_backward(
    scores: Scores,
    grad: Tensor,
    grad_strides: tuple[int, int, int],
    dx: Tensor,
    statistics: Tensor,
    grad_scale: float,
) -> None:
    """dx (contiguous) from x and the statistics."""
    rows, n = statistics.shape[-1], dx.shape[-1]
    if not dx.numel():
        return
    arguments: tuple[Any, ...] = (
        grad, scores.x, scores.mask, dx, statistics, scores.seed, rows, n, *scores.sizes, *scores.strides,
        *scores.mask_strides, scores.step, bits(scores.scale), scores.causal, *rule(scores.dropout_p),
        *grad_strides, bits(grad_scale),
    )  # fmt: skip
    masked = scores.mask is not None or scores.causal is not None
    options = _options(scores, n) | {"MASKED": masked}
    geometry = _geometry(scores, n, WIDEST_DROPOUT_BACKWARD)
    if geometry is None:
        return softmax_long.dropout_backward(rows, dx, arguments, options)
    height, width, warps = geometry
    programs = divide_up(rows, height)
    launch_rows(
        _dropout_backward, programs, dx, *arguments,
        **options, ROWS=height, COLUMNS=width, num_warps=warps,
    )  # fmt: skip
