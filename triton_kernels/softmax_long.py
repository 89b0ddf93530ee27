"""The softmax for rows that do not fit into the registers of one program, in pieces of PIECE columns. See softmax.py.

The first pass keeps in every lane a maximum and the sum of exponentials relative to it (Milakov & Gimelshein, 2018,
https://arxiv.org/abs/1805.02867); the second writes, from the statistics, what the recompute writes too.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ._common import PIECE, arithmetic, double, exp_nonpositive, is_half, launch_rows, piece_warps, row_sum
from ._softmax_tiles import (
    inverse_of,
    lead,
    load_scores,
    quotient,
    readable,
    row_offsets,
    tile_factors,
    visible_columns,
    weighted,
)


@triton.jit
def _relative(score, top, HALF: tl.constexpr):
    """exp(score - top), 1 where they are equal: they may both be infinite."""
    return tl.where(score == top, 1.0, exp_nonpositive(score - top, HALF))


@triton.jit(
    do_not_specialize=["rows", "scale", "causal", "threshold", "keep_scale", "first"],
    do_not_specialize_on_alignment=["n1", "n2", "step"],
)
def _forward(
    x, mask, y, statistics, seed, rows, n, n1, n2, x0, x1, x2, m0, m1, m2, step, scale, causal, threshold,
    keep_scale, first, BOOLEAN: tl.constexpr, FOURS: tl.constexpr, RECOMPUTE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    F: tl.constexpr = arithmetic(x.dtype.element_ty)
    HALF: tl.constexpr = is_half(x.dtype.element_ty)
    row = tl.program_id(0).to(tl.int64) + first + tl.zeros((1,), tl.int64)
    skipped = lead(row, n, seed is not None, FOURS)
    lanes = tl.arange(0, COLUMNS)[None, :] - skipped[:, None]
    visible = visible_columns(row, rows, n, n2, causal)[:, None]
    CAUSAL: tl.constexpr = causal is not None
    factor = double(scale, F)
    end = n if FOURS or seed is None else n + 3
    x += row_offsets(row, n1, n2, x0, x1, x2)[:, None]
    if mask is not None:
        mask += row_offsets(row, n1, n2, m0, m1, m2)[:, None]
    if RECOMPUTE:
        top = tl.load(statistics + row)
        total = tl.load(statistics + row + rows)
    else:
        high = tl.full((1, COLUMNS), float("-inf"), F)
        sums = tl.zeros((1, COLUMNS), F)
        kept = tl.zeros((1, COLUMNS), tl.int32)
        for start in range(0, end, COLUMNS):
            column = lanes + start
            score, keep = load_scores(x, mask, column, step, visible, n, factor, F, BOOLEAN, CAUSAL)
            higher = tl.where(score > high, score, high)  # NaN is left out
            # What is hidden adds nothing; a score of -inf that is kept, 0 or (infinity by infinity) what comes of it at the end.
            add = tl.where(keep & (score != float("-inf")), exp_nonpositive(score - higher, HALF), 0.0)
            sums = tl.fma(sums, _relative(high, higher, HALF), add)
            high = higher
            kept |= keep.to(tl.int32)
        top = tl.max(high, axis=1)
        total = row_sum(sums * _relative(high, top[:, None], HALF), HALF)
        top = tl.where(tl.max(kept, axis=1) > 0, top, 0.0)
        tl.store(statistics + row, top)
        tl.store(statistics + row + rows, total)
    inverse = inverse_of(total)
    for start in range(0, end, COLUMNS):
        column = lanes + start
        score, _ = load_scores(x, mask, column, step, visible, n, factor, F, BOOLEAN, CAUSAL)
        out = quotient(exp_nonpositive(score - top[:, None], HALF), total, inverse, HALF)
        if seed is not None:
            out *= tile_factors(seed, row, n, skipped, start, threshold, keep_scale, F, 1, COLUMNS)
        if CAUSAL:  # zero also in a row of NaN
            out = tl.where(column < visible, out, 0.0)
        tl.store(y + row[:, None] * n + column, out.to(y.dtype.element_ty), mask=(column >= 0) & (column < n))


def forward(rows: int, y: Tensor, arguments: tuple[Any, ...], options: dict[str, bool]) -> None:
    launch_rows(_forward, rows, y, *arguments, **options, COLUMNS=PIECE, num_warps=piece_warps())


@triton.jit(do_not_specialize=["rows", "scale", "first"], do_not_specialize_on_alignment=["n1", "n2"])
def _backward(
    grad, y, dx, rows, n, n1, n2, g0, g1, g2, scale, first, MASKED: tl.constexpr, COLUMNS: tl.constexpr
):
    F: tl.constexpr = arithmetic(y.dtype.element_ty)
    HALF: tl.constexpr = is_half(y.dtype.element_ty)
    row = tl.program_id(0).to(tl.int64) + first + tl.zeros((1,), tl.int64)
    grad += row_offsets(row, n1, n2, g0, g1, g2)[:, None]
    y += row[:, None] * n
    dx += row[:, None] * n
    SUM: tl.constexpr = F if HALF else tl.float64
    sums = tl.zeros((1, COLUMNS), SUM)
    for start in range(0, n, COLUMNS):
        column = start + tl.arange(0, COLUMNS)[None, :]
        p = tl.load(y + column, mask=column < n, other=0.0).to(F)
        g = tl.load(grad + column, mask=column < n, other=0.0).to(F)
        sums += weighted(p.to(SUM), g.to(SUM), MASKED)
    dot = tl.sum(sums, axis=1).to(F)
    for start in range(0, n, COLUMNS):
        column = start + tl.arange(0, COLUMNS)[None, :]
        p = tl.load(y + column, mask=column < n, other=0.0).to(F)
        g = tl.load(grad + column, mask=column < n, other=0.0).to(F)
        out = weighted(p, g - dot[:, None], MASKED) * double(scale, F)
        tl.store(dx + column, out.to(dx.dtype.element_ty), mask=column < n)


def backward(rows: int, y: Tensor, arguments: tuple[Any, ...], masked: bool) -> None:
    launch_rows(_backward, rows, y, *arguments, MASKED=masked, COLUMNS=PIECE, num_warps=piece_warps())


@triton.jit
def _piece(
    grad, x, mask, seed, row, n, skipped, lanes, start, visible, step, factor, top, total, inverse, threshold, keep_scale,
    F: tl.constexpr, HALF: tl.constexpr, BOOLEAN: tl.constexpr, CAUSAL: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The columns of a piece, its probabilities, and the gradient times dropout's factors."""
    column = lanes + start
    score, _ = load_scores(x, mask, column, step, visible, n, factor, F, BOOLEAN, CAUSAL)
    p = quotient(exp_nonpositive(score - top[:, None], HALF), total, inverse, HALF)
    if CAUSAL:
        p = tl.where(column < visible, p, 0.0)
    g = tl.load(grad + column, mask=readable(column, visible, n), other=0.0).to(F)
    g *= tile_factors(seed, row, n, skipped, start, threshold, keep_scale, F, 1, COLUMNS)
    return column, p, g


@triton.jit(
    do_not_specialize=["rows", "scale", "causal", "threshold", "keep_scale", "first", "grad_scale"],
    do_not_specialize_on_alignment=["n1", "n2", "step"],
)
def _dropout_backward(
    grad, x, mask, dx, statistics, seed, rows, n, n1, n2, x0, x1, x2, m0, m1, m2, step, scale, causal, threshold,
    keep_scale, g0, g1, g2, grad_scale, first, BOOLEAN: tl.constexpr, FOURS: tl.constexpr, MASKED: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    F: tl.constexpr = arithmetic(x.dtype.element_ty)
    HALF: tl.constexpr = is_half(x.dtype.element_ty)
    row = tl.program_id(0).to(tl.int64) + first + tl.zeros((1,), tl.int64)
    skipped = lead(row, n, True, FOURS)
    lanes = tl.arange(0, COLUMNS)[None, :] - skipped[:, None]
    visible = visible_columns(row, rows, n, n2, causal)[:, None]
    CAUSAL: tl.constexpr = causal is not None
    factor = double(scale, F)
    end = n if FOURS or seed is None else n + 3
    x += row_offsets(row, n1, n2, x0, x1, x2)[:, None]
    if mask is not None:
        mask += row_offsets(row, n1, n2, m0, m1, m2)[:, None]
    grad += row_offsets(row, n1, n2, g0, g1, g2)[:, None]
    top = tl.load(statistics + row)
    total = tl.load(statistics + row + rows)
    inverse = inverse_of(total)
    SUM: tl.constexpr = F if HALF else tl.float64
    sums = tl.zeros((1, COLUMNS), SUM)
    for start in range(0, end, COLUMNS):
        column, p, g = _piece(
            grad, x, mask, seed, row, n, skipped, lanes, start, visible, step, factor, top, total, inverse, threshold,
            keep_scale, F, HALF, BOOLEAN, CAUSAL, COLUMNS,
        )  # fmt: skip
        sums += weighted(p.to(SUM), g.to(SUM), MASKED)
    dot = tl.sum(sums, axis=1).to(F)
    for start in range(0, end, COLUMNS):
        column, p, g = _piece(
            grad, x, mask, seed, row, n, skipped, lanes, start, visible, step, factor, top, total, inverse, threshold,
            keep_scale, F, HALF, BOOLEAN, CAUSAL, COLUMNS,
        )  # fmt: skip
        out = weighted(p, g - dot[:, None], MASKED) * double(grad_scale, F)
        tl.store(
            dx + row[:, None] * n + column, out.to(dx.dtype.element_ty), mask=(column >= 0) & (column < n)
        )


def dropout_backward(rows: int, dx: Tensor, arguments: tuple[Any, ...], options: dict[str, bool]) -> None:
    launch_rows(_dropout_backward, rows, dx, *arguments, **options, COLUMNS=PIECE, num_warps=piece_warps())
