"""LayerNorm (Ba et al., 2016) and RMSNorm (Zhang & Sennrich, 2019) over the last `columns` elements of each row.

Statistics, per row, in float32 (float64 for float64): LayerNorm keeps mean, what the mean lost to rounding, and
rstd = 1 / sqrt(variance + eps); RMSNorm keeps rstd. Subtracting both parts of the mean keeps x - mean exact to one rounding
however large the mean is.

Forward reads x and writes y, recompute does the same from the saved statistics, backward reads grad and x and writes dx: 2, 2 and
3 elements moved per element. A program holds a tile of whole rows in registers; rows longer than that are gone through in
pieces, which come from the cache from the second time on (norm_long.py). Parameter gradients: each block of rows writes its sums,
and a second kernel adds the blocks in order. Blocks depend on the shape alone.

Rows: row i of x starts at (i // inner) * outer stride + (i % inner) * inner stride; rows of outputs are adjacent.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import norm_long
from ._common import (
    WIDEST,
    arithmetic,
    bits,
    column_sum,
    divide,
    divide_up,
    double,
    is_half,
    launch,
    launch_rows,
    row_sum,
    square_root,
    tile,
)
from ._norm_tiles import (
    affine,
    input_gradient,
    load_rows,
    load_weight,
    normalised,
    read_statistics,
)

LAYER, RMS = 0, 1
# Of rows, whose parameter gradients one program sums: two for each multiprocessor of an H100 or H200.
BLOCKS = 264
WIDEST_BACKWARD = 8192  # as WIDEST, where x, grad and the sums for two gradients are held
WIDEST_AHEAD = 4096  # where the next tile is held too; not in float64
RowView = tuple[int, int, int]  # inner, outer stride, inner stride


@triton.jit(do_not_specialize=["rows", "eps", "first"], do_not_specialize_on_alignment=["inner"])
def _forward(
    x, y, statistics, weight, bias, rows, n, inner, outer_stride, inner_stride, eps, first,
    LAYER: tl.constexpr, RECOMPUTE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    F: tl.constexpr = arithmetic(x.dtype.element_ty)
    HALF: tl.constexpr = is_half(x.dtype.element_ty)
    row = (tl.program_id(0).to(tl.int64) + first) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    exists = row < rows
    inside = exists[:, None] & (column < n)[None, :]
    value = load_rows(x, row, rows, inner, outer_stride, inner_stride, column, n).to(F)
    if RECOMPUTE:
        mean, rstd, shift = read_statistics(statistics, row, rows, exists, LAYER)
    else:
        count = (n + tl.zeros((ROWS,), tl.int32)).to(F)
        if LAYER:
            mean = divide(row_sum(value, HALF), count)
            d = tl.where(inside, value - mean[:, None], 0.0)
            residual = divide(row_sum(d, HALF), count)
            variance = divide(row_sum(d * d, HALF), count) - residual * residual
            variance = tl.where(variance < 0.0, 0.0, variance)
            tl.store(statistics + row, mean, mask=exists)
            tl.store(statistics + row + rows, residual, mask=exists)
        else:
            variance = divide(row_sum(value * value, HALF), count)
        rstd = divide(tl.full((ROWS,), 1.0, F), square_root(variance + double(eps, F)))
        if LAYER:
            shift = -(residual * rstd)
            tl.store(statistics + row + rows + rows, rstd, mask=exists)
        else:
            mean = tl.zeros_like(rstd)
            shift = mean
            tl.store(statistics + row, rstd, mask=exists)
    h = normalised(value, mean, rstd, shift, LAYER)
    out = affine(h, weight, bias, column, column < n, F)
    tl.store(y + row[:, None] * n + column[None, :], out.to(y.dtype.element_ty), mask=inside)


def forward(
    kind: int, x: Tensor, view: RowView, weight: Tensor | None, bias: Tensor | None, eps: float, y: Tensor,
    statistics: Tensor, recompute: bool,
) -> None:  # fmt: skip
    """y, and the statistics unless `recompute`, of the rows of y's last dimension. `x`'s columns are adjacent."""
    rows = statistics.shape[-1]
    n = y.numel() // rows if rows else 0
    if not y.numel():
        if not recompute:
            statistics.fill_(float("nan"))
        return
    arguments = x, y, statistics, weight, bias, rows, n, *view, bits(eps)
    options = {"LAYER": kind == LAYER, "RECOMPUTE": recompute}
    if n > WIDEST:
        return norm_long.forward(rows, y, arguments, options)
    height, width, warps = tile(n, x.dtype.itemsize)
    programs = divide_up(rows, height)
    launch_rows(
        _forward, programs, y, *arguments,
        **options, ROWS=height, COLUMNS=width, num_warps=warps,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["rows", "eps", "tiles", "first"],
    do_not_specialize_on_alignment=["inner", "grad_inner"],
)
def _backward(
    grad, x, weight, statistics, dx, partial, rows, n, inner, outer_stride, inner_stride, grad_inner,
    grad_outer_stride, grad_inner_stride, eps, tiles, first, LAYER: tl.constexpr, ONE: tl.constexpr, AHEAD: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """dx = rstd (v - mean(v) - h mean(v h)) with v = grad weight, without mean(v) for RMSNorm; partial[0, block] = sum of
    grad h over the block's rows, partial[1, block] that of grad. None where not wanted. AHEAD: each tile
    is asked for while the one before it is worked on.
    """
    F: tl.constexpr = arithmetic(x.dtype.element_ty)
    HALF: tl.constexpr = is_half(x.dtype.element_ty)
    block = tl.program_id(0).to(tl.int64) + first
    column = tl.arange(0, COLUMNS)
    w = load_weight(weight, column, column < n, F)
    count = (n + tl.zeros((ROWS,), tl.int32)).to(F)
    dweight = tl.zeros((ROWS, COLUMNS), F)
    dbias = tl.zeros((ROWS, COLUMNS), F)
    row = block * tiles * ROWS + tl.arange(0, ROWS)
    if AHEAD:
        next_x = load_rows(x, row, rows, inner, outer_stride, inner_stride, column, n)
        next_grad = load_rows(grad, row, rows, grad_inner, grad_outer_stride, grad_inner_stride, column, n)
    for step in range(tiles):
        row = (block * tiles + step) * ROWS + tl.arange(0, ROWS)
        exists = row < rows
        if AHEAD:
            value, g = next_x.to(F), next_grad.to(F)
            ahead = tl.where(step + 1 < tiles, row + ROWS, rows)
            next_x = load_rows(x, ahead, rows, inner, outer_stride, inner_stride, column, n)
            next_grad = load_rows(
                grad, ahead, rows, grad_inner, grad_outer_stride, grad_inner_stride, column, n
            )
        else:
            value = load_rows(x, row, rows, inner, outer_stride, inner_stride, column, n).to(F)
            g = load_rows(grad, row, rows, grad_inner, grad_outer_stride, grad_inner_stride, column, n).to(F)
        mean, rstd, shift = read_statistics(statistics, row, rows, exists, LAYER)
        h = normalised(value, mean, rstd, shift, LAYER)
        if dx is not None:
            v = g * w
            if ONE:
                # LayerNorm: constant, gradient 0 (NaN where x is). RMSNorm: v (1 - h^2), without cancellation.
                r = rstd[:, None]
                out = 0.0 * r + tl.zeros_like(v) if LAYER else v * double(eps, F) * r * r * r
            else:
                along = divide(row_sum(v * h, HALF), count)  # v is 0 where a row has ended
                level = divide(row_sum(v, HALF), count) if LAYER else tl.zeros_like(along)
                out = input_gradient(g, h, w, along, level, rstd)
            inside = exists[:, None] & (column < n)[None, :]
            tl.store(dx + row[:, None] * n + column[None, :], out.to(dx.dtype.element_ty), mask=inside)
        if partial is not None:
            dweight = tl.fma(g, h, dweight)
            if LAYER:
                dbias += g
    if partial is not None:
        tl.store(partial + block * n + column, column_sum(dweight, HALF), mask=column < n)
        if LAYER:
            block += tl.num_programs(0)
            tl.store(partial + block * n + column, column_sum(dbias, HALF), mask=column < n)


@triton.jit(do_not_specialize=["blocks"])
def _add_blocks(partial, dweight, dbias, blocks, n, COLUMNS: tl.constexpr, STEP: tl.constexpr):
    """dweight and dbias (None: not wanted) from their blocks' sums, STEP blocks at a time, in order."""
    column = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    which = tl.program_id(1).to(tl.int64)
    total = tl.zeros((STEP, COLUMNS), partial.dtype.element_ty)
    for start in range(0, blocks, STEP):
        block = start + tl.arange(0, STEP)
        inside = (block < blocks)[:, None] & (column < n)[None, :]
        total += tl.load(
            partial + (which * blocks + block)[:, None] * n + column[None, :], mask=inside, other=0.0
        )
    gradient = tl.sum(total, axis=0)
    if which == 0:
        if dweight is not None:
            tl.store(dweight + column, gradient.to(dweight.dtype.element_ty), mask=column < n)
    else:
        if dbias is not None:
            tl.store(dbias + column, gradient.to(dbias.dtype.element_ty), mask=column < n)


ADD_COLUMNS, ADD_STEP, ADD_WARPS = 64, 32, 4


def backward(
    kind: int, grad: Tensor, grad_view: RowView, x: Tensor, view: RowView, weight: Tensor | None, eps: float,
    statistics: Tensor, dx: Tensor | None, dweight: Tensor | None, dbias: Tensor | None,
) -> None:  # fmt: skip
    """Fills those of dx, dweight and dbias that are wanted. The columns of `x` and `grad` are adjacent."""
    rows, n = statistics.shape[-1], x.numel() // statistics.shape[-1] if statistics.shape[-1] else 0
    wants_parameters = dweight is not None or dbias is not None
    if not x.numel():
        for gradient in (dweight, dbias):
            if gradient is not None:
                gradient.zero_()
        return
    height, width, warps = tile(n, x.dtype.itemsize)
    blocks = min(BLOCKS, divide_up(rows, height)) if wants_parameters else 0
    # Rows that start anywhere are loaded by the element, which takes registers: sums of two gradients would spill.
    scarce = kind == LAYER and wants_parameters and width > WIDEST_AHEAD and n % 16 != 0
    in_pieces = n > WIDEST_BACKWARD or scarce
    if in_pieces:
        blocks = min(norm_long.BLOCKS, divide_up(rows, norm_long.ROWS)) if wants_parameters else 0
    planes = 2 if kind == LAYER else 1
    # What is rounded to 16 bits in the end is summed in float32.
    sums = torch.float32 if x.dtype.itemsize == 2 else torch.float64
    partial = statistics.new_empty((planes, blocks, n), dtype=sums) if wants_parameters else None
    operands = grad, x, weight, statistics, dx, partial, rows, n, *view, *grad_view, bits(eps)
    if in_pieces:
        norm_long.backward(blocks, x, operands, kind == LAYER)
    else:
        tiles = divide_up(divide_up(rows, height), blocks) if wants_parameters else 1
        programs = blocks if wants_parameters else divide_up(rows, height)
        launch_rows(
            _backward, programs, x, *operands, tiles,
            LAYER=kind == LAYER, ONE=n == 1, AHEAD=wants_parameters and width <= WIDEST_AHEAD and x.dtype.itemsize < 8,
            ROWS=height, COLUMNS=width, num_warps=warps,
        )  # fmt: skip
    if wants_parameters:
        launch(
            _add_blocks, (divide_up(n, ADD_COLUMNS), planes), x, partial, dweight, dbias, blocks, n,
            COLUMNS=ADD_COLUMNS, STEP=ADD_STEP, num_warps=ADD_WARPS,
        )  # fmt: skip
