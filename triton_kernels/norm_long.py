"""The norms for rows that do not fit into the registers of one program, in pieces of PIECE columns. See norm.py.

Each pass over a row but the first finds it in the cache. Parameter gradients are a kernel of their own, over columns by blocks of
rows, since no program holds a row's gradients.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ._common import (
    PIECE,
    arithmetic,
    column_sum,
    divide,
    divide_up,
    double,
    is_half,
    launch,
    launch_rows,
    piece_warps,
    row_sum,
    square_root,
)
from ._norm_tiles import (
    affine,
    input_gradient,
    load_rows,
    load_weight,
    normalised,
    read_statistics,
    row_offsets,
)

# Of the kernel for parameter gradients: blocks of rows at most; the tile of one step.
BLOCKS, ROWS, COLUMNS = 64, 8, 256


@triton.jit(do_not_specialize=["rows", "eps", "first"], do_not_specialize_on_alignment=["inner"])
def _forward(
    x, y, statistics, weight, bias, rows, n, inner, outer_stride, inner_stride, eps, first,
    LAYER: tl.constexpr, RECOMPUTE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    F: tl.constexpr = arithmetic(x.dtype.element_ty)
    HALF: tl.constexpr = is_half(x.dtype.element_ty)
    row = (tl.program_id(0).to(tl.int64) + first) + tl.zeros((1,), tl.int64)
    exists = row < rows
    source = x + row_offsets(row, inner, outer_stride, inner_stride)[:, None]
    if RECOMPUTE:
        mean, rstd, shift = read_statistics(statistics, row, rows, exists, LAYER)
    else:
        count = (n + tl.zeros((1,), tl.int32)).to(F)
        if LAYER:
            total = tl.zeros((1, COLUMNS), F)
            for start in range(0, n, COLUMNS):
                column = start + tl.arange(0, COLUMNS)[None, :]
                total += tl.load(source + column, mask=column < n, other=0.0).to(F)
            mean = divide(row_sum(total, HALF), count)
        else:
            mean = tl.zeros((1,), F)
        deviation = tl.zeros((1, COLUMNS), F)
        squares = tl.zeros((1, COLUMNS), F)
        for start in range(0, n, COLUMNS):
            column = start + tl.arange(0, COLUMNS)[None, :]
            value = tl.load(source + column, mask=column < n, other=0.0).to(F)
            if LAYER:
                value = tl.where(column < n, value - mean[:, None], 0.0)
                deviation += value
            squares = tl.fma(value, value, squares)
        variance = divide(row_sum(squares, HALF), count)
        if LAYER:
            residual = divide(row_sum(deviation, HALF), count)
            variance = variance - residual * residual
            variance = tl.where(variance < 0.0, 0.0, variance)
            tl.store(statistics + row, mean)
            tl.store(statistics + row + rows, residual)
        rstd = divide(tl.full((1,), 1.0, F), square_root(variance + double(eps, F)))
        if LAYER:
            shift = -(residual * rstd)
            tl.store(statistics + row + rows + rows, rstd)
        else:
            shift = tl.zeros_like(rstd)
            tl.store(statistics + row, rstd)
    for start in range(0, n, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = column < n
        value = tl.load(source + column[None, :], mask=inside[None, :], other=0.0).to(F)
        h = normalised(value, mean, rstd, shift, LAYER)
        out = affine(h, weight, bias, column, inside, F)
        tl.store(y + row[:, None] * n + column[None, :], out.to(y.dtype.element_ty), mask=inside[None, :])


def forward(rows: int, y: Tensor, arguments: tuple[Any, ...], options: dict[str, bool]) -> None:
    launch_rows(_forward, rows, y, *arguments, **options, COLUMNS=PIECE, num_warps=piece_warps())


@triton.jit(do_not_specialize=["rows", "first"], do_not_specialize_on_alignment=["inner", "grad_inner"])
def _backward(
    grad, x, weight, statistics, dx, rows, n, inner, outer_stride, inner_stride, grad_inner, grad_outer_stride,
    grad_inner_stride, first, LAYER: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    F: tl.constexpr = arithmetic(x.dtype.element_ty)
    HALF: tl.constexpr = is_half(x.dtype.element_ty)
    row = (tl.program_id(0).to(tl.int64) + first) + tl.zeros((1,), tl.int64)
    x += row_offsets(row, inner, outer_stride, inner_stride)[:, None]
    grad += row_offsets(row, grad_inner, grad_outer_stride, grad_inner_stride)[:, None]
    mean, rstd, shift = read_statistics(statistics, row, rows, row < rows, LAYER)
    along = tl.zeros((1, COLUMNS), F)
    level = tl.zeros((1, COLUMNS), F)
    for start in range(0, n, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = column < n
        h = normalised(
            tl.load(x + column[None, :], mask=inside[None, :], other=0.0).to(F), mean, rstd, shift, LAYER
        )
        v = tl.load(grad + column[None, :], mask=inside[None, :], other=0.0).to(F)
        v *= load_weight(weight, column, inside, F)
        along = tl.fma(v, h, along)
        if LAYER:
            level += v
    count = (n + tl.zeros((1,), tl.int32)).to(F)
    along = divide(row_sum(along, HALF), count)
    level = divide(row_sum(level, HALF), count) if LAYER else tl.zeros_like(along)
    for start in range(0, n, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = column < n
        h = normalised(
            tl.load(x + column[None, :], mask=inside[None, :], other=0.0).to(F), mean, rstd, shift, LAYER
        )
        g = tl.load(grad + column[None, :], mask=inside[None, :], other=0.0).to(F)
        out = input_gradient(g, h, load_weight(weight, column, inside, F), along, level, rstd)
        tl.store(dx + row[:, None] * n + column[None, :], out.to(dx.dtype.element_ty), mask=inside[None, :])


@triton.jit(do_not_specialize=["rows", "steps"], do_not_specialize_on_alignment=["inner", "grad_inner"])
def _parameter_gradients(
    grad, x, statistics, partial, rows, n, inner, outer_stride, inner_stride, grad_inner, grad_outer_stride,
    grad_inner_stride, steps, LAYER: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    F: tl.constexpr = arithmetic(x.dtype.element_ty)
    HALF: tl.constexpr = is_half(x.dtype.element_ty)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    block = tl.program_id(1).to(tl.int64)
    dweight = tl.zeros((ROWS, COLUMNS), F)
    dbias = tl.zeros((ROWS, COLUMNS), F)
    for step in range(steps):
        row = (block * steps + step) * ROWS + tl.arange(0, ROWS)
        exists = row < rows
        value = load_rows(x, row, rows, inner, outer_stride, inner_stride, column, n).to(F)
        g = load_rows(grad, row, rows, grad_inner, grad_outer_stride, grad_inner_stride, column, n).to(F)
        mean, rstd, shift = read_statistics(statistics, row, rows, exists, LAYER)
        dweight = tl.fma(g, normalised(value, mean, rstd, shift, LAYER), dweight)
        dbias += g
    tl.store(partial + block * n + column, column_sum(dweight, HALF), mask=column < n)
    if LAYER:
        block += tl.num_programs(1)
        tl.store(partial + block * n + column, column_sum(dbias, HALF), mask=column < n)


def backward(blocks: int, x: Tensor, operands: tuple[Any, ...], layer: bool) -> None:
    """`operands` as of norm._backward."""
    grad, x, weight, statistics, dx, partial, rows, n, *views, _ = operands
    if dx is not None:
        arguments = grad, x, weight, statistics, dx, rows, n, *views
        launch_rows(_backward, rows, x, *arguments, LAYER=layer, COLUMNS=PIECE, num_warps=piece_warps())
    if partial is not None:
        steps = divide_up(divide_up(rows, ROWS), blocks)
        launch(
            _parameter_gradients, (divide_up(n, COLUMNS), blocks), x, grad, x, statistics, partial, rows, n, *views,
            steps, LAYER=layer, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=4,
        )  # fmt: skip
