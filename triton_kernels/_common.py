"""What the families share: arithmetic that is the same in every kernel, the shapes of tiles, and the launch.

Kernels compute in float32, in float64 for float64. Multiply-adds are written as ``fma`` where they are meant, and the compiler
is told to contract no others (``enable_fp_fusion=False``): a recompute kernel then gives the forward's bits, whatever stands
around the expression that both share.

Numbers that a kernel needs in float64 (eps, scale) are passed as their bits: Triton passes a Python float as float32.
"""

from __future__ import annotations

import functools
import struct
from typing import Any

import torch
import triton
import triton.language as tl

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


def tile(columns: int, itemsize: int) -> tuple[int, int, int]:
    """(rows, columns, warps) of the tile that a program holds of rows of `columns` elements."""
    width = min(max(NARROWEST, triton.next_power_of_2(columns)), WIDEST)
    rows = max(1, TILE // width)
    # 16 elements a thread, which keeps enough loads in flight, and half as many of float64, but of 4096 (8 warps: with 16 ptxas
    # spills); more only where a block has no more threads.
    warps = min(16, max(1, rows * width * max(4, itemsize) // 2048))
    return rows, width, min(warps, 8) if itemsize == 8 and width == 4096 else warps


def piece_warps() -> int:
    """Of a piece, 8 elements a thread: in bfloat16 one access of 16 bytes."""
    return 8 if torch.version.hip else 16


autotune = False  # whether launches try several numbers of warps instead of taking the rule's; set by who loads the kernels


@functools.cache
def _tuned(kernel: Any, constants: tuple[str, ...]) -> Any:
    """`kernel` with the number of warps found by timing, once for each shape; what is found is kept on disk."""
    configs = [triton.Config({}, num_warps=warps) for warps in (2, 4, 8, 16)]
    return triton.autotune(configs, key=["n", *constants], cache_results=True)(kernel)


def launch(
    kernel: Any, programs: int | tuple[int, int], x: torch.Tensor, *arguments: Any, **options: Any
) -> None:
    """Runs `kernel` on the device and current stream of `x`."""
    grid = (programs,) if isinstance(programs, int) else programs
    if autotune:
        del options["num_warps"]
        kernel = _tuned(kernel, tuple(options))
    if x.is_cuda and x.get_device() != torch.cuda.current_device():
        with torch.cuda.device(x.device):
            kernel[grid](*arguments, enable_fp_fusion=False, **options)
    else:
        kernel[grid](*arguments, enable_fp_fusion=False, **options)


def launch_rows(kernel: Any, programs: int, x: torch.Tensor, *arguments: Any, **options: Any) -> None:
    """The same of any number of programs. The kernel's last argument that is no option is the number of the first one."""
    for first in range(0, programs, MAX_GRID):
        launch(kernel, min(MAX_GRID, programs - first), x, *arguments, first, **options)


@triton.constexpr_function
def arithmetic(element):
    """The type to compute in."""
    return tl.float64 if element == tl.float64 else tl.float32


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
def row_sum(x, HALF: tl.constexpr):
    """Sums of the rows of a tile. Of float32 by fours, which lie in one thread's registers, and these in float64: the roundings
    of a tree in float32 would be most of the error of what is made of the sum. Not seen where results are 16 bits. Of float64 by
    eights, for fewer roundings one after the other."""
    if HALF:
        return tl.sum(x, axis=1)
    elif x.dtype == tl.float64:
        return tl.sum(tl.sum(x.reshape(x.shape[0], x.shape[1] // 8, 8), axis=2), axis=1)
    else:
        fours = tl.sum(x.reshape(x.shape[0], x.shape[1] // 4, 4), axis=2)
        return tl.sum(fours.to(tl.float64), axis=1).to(tl.float32)


@triton.jit
def column_sum(x, HALF: tl.constexpr):
    """Sums of the columns of a tile, for parameter gradients: float32 where they are summed in that, else float64."""
    if HALF:
        return tl.sum(x, axis=0)
    elif x.shape[0] >= 16:
        fours = tl.sum(x.to(tl.float64).reshape(x.shape[0] // 4, 4, x.shape[1]), axis=1)
        return tl.sum(fours, axis=0)
    else:
        return tl.sum(x.to(tl.float64), axis=0)


@triton.constexpr_function
def is_half(element):
    """Whether results are rounded to 16 bits: the hardware's approximations of exp2 and division (2 ulp of float32) then do."""
    return element.primitive_bitwidth == 16


@triton.jit
def ratio(a, b, HALF: tl.constexpr):
    return a / b if HALF else divide(a, b)


@triton.jit
def multiply_add(x, factor: tl.constexpr, term: tl.constexpr):
    """factor x + term, rounded once."""
    return tl.fma(x, tl.full(x.shape, factor, x.dtype), tl.full(x.shape, term, x.dtype))


@triton.jit
def _power_of_two(shifted):
    """2^n of a float32 that holds n + 127 in its low bits, where a number of 1.5 2^23 was added; 0 for n = -127."""
    return (shifted.to(tl.int32, bitcast=True) << 23).to(tl.float32, bitcast=True)


@triton.jit
def exp_nonpositive(x, HALF: tl.constexpr):
    """exp(x) for x <= 0; in float32 0 where it is no normal number. NaN stays NaN. The polynomial is that of csrc/math.h."""
    if HALF or x.dtype == tl.float64:
        return tl.exp(x)
    else:
        x = tl.where(x < -88.0296919, -88.0296919, x)
        round = tl.full(x.shape, 12583039.0, tl.float32)  # 1.5 2^23 + 127
        shifted = tl.fma(x, tl.full(x.shape, 1.44269504, tl.float32), round)
        r = tl.fma(shifted - round, tl.full(x.shape, -0.693147181, tl.float32), x)
        r2 = r * r
        low = multiply_add(r, 1.666652064e-01, 4.999999345e-01)
        middle = multiply_add(r, 8.368715486e-03, 4.166838789e-02)
        p = tl.fma(
            tl.fma(tl.fma(r2, tl.full(x.shape, 1.381460308e-03, tl.float32), middle), r2, low), r2, r + 1.0
        )
        return p * _power_of_two(shifted)


@triton.jit
def exp_square(a, HALF: tl.constexpr):
    """exp(-a^2 / 2) in float32 for a in [0, 13.2687], at the end of which it is 0. The polynomial is that of csrc/math.h."""
    if HALF:
        return tl.where(a < 13.2687, tl.exp2(a * a * -0.72134752), 0.0)
    else:
        round = tl.full(a.shape, 12583039.0, tl.float32)
        factor = tl.full(a.shape, -0.72134752, tl.float32)
        square = a * a
        shifted = tl.fma(square, factor, round)
        f = tl.fma(square, factor, round - shifted)
        f2 = f * f
        high = multiply_add(f, 1.326472725e-03, 9.671512786e-03)
        middle = multiply_add(f, 5.550733744e-02, 2.402224208e-01)
        low = multiply_add(f, 6.931469776e-01, 1.0)
        return tl.fma(tl.fma(high, f2, middle), f2, low) * _power_of_two(shifted)
