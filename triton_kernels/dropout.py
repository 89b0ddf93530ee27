"""Dropout: y = x factor, factor = 1 / (1 - p) or 0 by Philox. Forward, recompute and backward are this one kernel, applied to x
or to the gradient: 2 elements moved per element, and no mask. A dropped NaN or infinity gives NaN, as in torch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._common import arithmetic, launch
from ._elementwise import BLOCK, element_indices, element_offsets, few_dims, padded, programs, warps
from ._philox import factors, rule


@triton.jit(do_not_specialize=["threshold", "keep_scale"])
def _forward(x, y, n, seed, threshold, keep_scale, BLOCK: tl.constexpr):
    F: tl.constexpr = arithmetic(x.dtype.element_ty)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    i = tl.arange(0, BLOCK)
    inside = i < n - start
    factor = factors(seed, start + tl.zeros((1,), tl.int64), threshold, keep_scale, F, 1, BLOCK).reshape(
        BLOCK
    )
    value = tl.load(x + start + i, mask=inside, other=0.0).to(F) * factor
    tl.store(y + start + i, value.to(y.dtype.element_ty), mask=inside)


@triton.jit(
    do_not_specialize=["threshold", "keep_scale"],
    do_not_specialize_on_alignment=["n", "n1", "n2", "x0", "x1", "x2", "y0", "y1", "y2"],
)
def _forward_strided(
    x,
    y,
    n,
    seed,
    threshold,
    keep_scale,
    n1,
    n2,
    x0,
    x1,
    x2,
    y0,
    y1,
    y2,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):
    F: tl.constexpr = arithmetic(x.dtype.element_ty)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    i = element_indices(n, BLOCK, WIDE)
    factor = factors(seed, start + tl.zeros((1,), tl.int64), threshold, keep_scale, F, 1, BLOCK).reshape(
        BLOCK
    )
    value = tl.load(x + element_offsets(i, n1, n2, x0, x1, x2), mask=i < n, other=0.0).to(F) * factor
    tl.store(y + element_offsets(i, n1, n2, y0, y1, y2), value.to(y.dtype.element_ty), mask=i < n)


def forward(x: Tensor, y: Tensor, seed: Tensor, p: float, view: Sequence[int]) -> None:
    """y = x times the dropout factors. `view`: sizes and strides of x and y in logical order, unless both are contiguous."""
    n, numbers = y.numel(), rule(p)
    if n and view and few_dims(view, 2):
        options = {"BLOCK": BLOCK, "WIDE": n >= 2**31, "num_warps": warps()}
        launch(_forward_strided, programs(n), y, x, y, n, seed, *numbers, *padded(view, 2), **options)
    elif n and view:
        dense = torch.empty(y.shape, dtype=y.dtype, device=y.device)
        forward(x.contiguous(), dense, seed, p, [])
        y.copy_(dense)
    elif n:
        launch(_forward, programs(n), y, x, y, n, seed, *numbers, BLOCK=BLOCK, num_warps=warps())
