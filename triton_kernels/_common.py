"""What the families share: arithmetic that is the same in every kernel, the shapes of tiles, and the launch.

Kernels compute in float32, in float64 for float64. Multiply-adds are written as ``fma`` where they are meant, and the compiler
is told to contract no others (``enable_fp_fusion=False``): a recompute kernel then gives the forward's bits, whatever stands
around the expression that both share.

Numbers that a kernel needs in float64 (eps, scale) are passed as their bits: Triton passes a Python float as float32.
"""

from __future__ import annotations

import os
import struct
from typing import Any

import torch
import triton
import triton.language as tl

INTERPRETED = triton.knobs.runtime.interpret
TILE = 2048  # elements of a tile of several short rows
NARROWEST = 64  # columns of a tile at least
WIDEST = 16384  # columns of a row that one program holds in registers; longer rows are gone through in pieces
PIECE = 4096  # columns of such a piece
MAX_GRID = 2**31 - 1  # programs of one launch


def bits(value: float) -> int:
    """The bits of a double, for :func:`double` to read."""
    return struct.unpack("<q", struct.pack("<d", value))[0]


def divide_up(a: int, b: int) -> int:
    return -(-a // b)


def tile(columns: int) -> tuple[int, int, int]:
    """(rows, columns, warps) of the tile that a program holds of rows of `columns` elements."""
    width = min(max(NARROWEST, triton.next_power_of_2(columns)), WIDEST)
    rows = max(1, TILE // width)
    # 16 elements a thread, which keeps enough loads in flight; more only where a block has no more threads.
    return rows, width, min(16, max(1, rows * width // 512))


def launch(kernel: Any, programs: int | tuple[int, int], x: torch.Tensor, *arguments: Any, **options: Any) -> None:
    """Runs `kernel` on the device and current stream of `x`."""
    grid = (programs,) if isinstance(programs, int) else programs
    if x.is_cuda and x.get_device() != torch.cuda.current_device():
        with torch.cuda.device(x.device):
            kernel[grid](*arguments, enable_fp_fusion=False, **options)
    else:
        kernel[grid](*arguments, enable_fp_fusion=False, **options)


@triton.jit
def arithmetic(pointer):
    """The type to compute in for elements of `pointer`."""
    return tl.float64 if pointer.dtype.element_ty == tl.float64 else tl.float32


@triton.jit
def double(value, F: tl.constexpr):
    """The double whose bits are given, as F."""
    return value.to(tl.int64).to(tl.float64, bitcast=True).to(F)


@triton.jit
def divide(a, b):
    """a / b, rounded once; `/` of float32 would be an approximation."""
    if a.dtype == tl.float32:
        return tl.div_rn(a, b)
    else:
        return a / b


@triton.jit
def square_root(a):
    if a.dtype == tl.float32:
        return tl.sqrt_rn(a)
    else:
        return tl.sqrt(a)


@triton.jit
def reciprocal(a):
    """1 / a for a in [1, 2^60], within an ulp: an approximation and one step of Newton's, at a fraction of a division's price."""
    r = 1.0 / a
    return tl.fma(tl.fma(-r, a, tl.full(a.shape, 1.0, a.dtype)), r, r)
