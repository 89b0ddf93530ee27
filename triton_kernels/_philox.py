"""Dropout masks: Philox4x32-10 (Salmon et al., SC'11). Element i of a tensor in row-major order is kept where word i % 4 of the
block with counter i // 4 and the seed as key is at least p 2^32. The same on every backend; nothing is ever stored of a mask.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ._common import bits, double


def rule(p: float) -> tuple[int, int]:
    """(threshold, bits of the factor of kept elements), for :func:`factors`."""
    if p >= 1:
        return 0, bits(0.0)
    return int(p * 2.0**32), bits(1 / (1 - p))


@triton.jit
def factors(seed, first, threshold, keep_scale, F: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """[ROWS, COLUMNS] of 1 / (1 - p) or 0: row r is for the elements from first[r] on, a multiple of 4 each.

    The four words of a Philox block are those of four neighbours, so that each block is computed once.
    """
    counter = (first // 4)[:, None] + tl.arange(0, COLUMNS // 4)[None, :]
    low, high = counter.to(tl.uint32), (counter >> 32).to(tl.uint32)
    zero = tl.zeros_like(low)
    w0, w1, w2, w3 = tl.philox(tl.load(seed), low, high, zero, zero)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3)).reshape(ROWS, COLUMNS)
    return tl.where(words.to(tl.int64) >= threshold, double(keep_scale, F), tl.zeros((ROWS, COLUMNS), F))


@triton.jit
def element_factors(seed, index, threshold, keep_scale, F: tl.constexpr):
    """The same for any elements, at four times the price."""
    counter = index // 4
    low, high = counter.to(tl.uint32), (counter >> 32).to(tl.uint32)
    zero = tl.zeros_like(low)
    w0, w1, w2, w3 = tl.philox(tl.load(seed), low, high, zero, zero)
    odd, upper = index % 2 == 1, index % 4 > 1
    word = tl.where(upper, tl.where(odd, w3, w2), tl.where(odd, w1, w0))
    return tl.where(word.to(tl.int64) >= threshold, double(keep_scale, F), tl.zeros(index.shape, F))
