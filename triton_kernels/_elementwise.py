"""Operands of one shape that are not dense in one common order: indices, and what the kernels take in place of one offset."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._common import divide_up

BLOCK = 1024  # elements of a program, 8 a thread: one 16-byte access in 16 bits, two in 32
DIMS = 3  # of a view, after merging; more are copied


@triton.jit
def element_indices(n, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """This program's elements, in 32 bits where they fit: divisions of 64-bit numbers are slow."""
    block = tl.program_id(0)
    if WIDE:
        block = block.to(tl.int64)
    return block * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def element_offsets(i, n1, n2, s0, s1, s2):
    """Offsets of the elements i, counted in row-major order over sizes (any, n1, n2)."""
    rest = i // n2
    inner = (i % n2).to(tl.int64) * s2 + (rest % n1).to(tl.int64) * s1
    return inner + (rest // n1).to(tl.int64) * s0


def few_dims(view: Sequence[int], operands: int) -> bool:
    return len(view) <= DIMS * (operands + 1)


def padded(view: Sequence[int], operands: int) -> list[int]:
    """The last two sizes and each operand's three strides, from a view of at most three dimensions: sizes, then strides."""
    dims = len(view) // (operands + 1)
    columns = [view[i * dims : (i + 1) * dims] for i in range(operands + 1)]
    sizes = [1] * (DIMS - dims) + list(columns[0])
    return [*sizes[1:], *(s for c in columns[1:] for s in [0] * (DIMS - dims) + list(c))]


def dense_like(y: Tensor, x: Tensor) -> Tensor:
    """`x` with the memory order of `y`."""
    return x if x.stride() == y.stride() else torch.empty_like(y).copy_(x)


def warps() -> int:
    return 2 if torch.version.hip else 4


def programs(n: int) -> int:
    return divide_up(n, BLOCK)
