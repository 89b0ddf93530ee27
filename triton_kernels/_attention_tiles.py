"""What the kernels of attention.py and attention_backward.py do alike with a tile of scores.

A tile lies with queries along its rows or along its columns: `row` and `column` are indices of queries and keys that broadcast to
it, whichever is which. 16-bit dtypes have their scores in units of log 2, for which the hardware has an exponential.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ._common import arithmetic, divide, exp_nonpositive, is_half, multiply_add
from ._philox import element_factors, factors

LOG2E = tl.constexpr(1.4426950408889634)
LOG2 = tl.constexpr(0.6931471805599453)


@triton.jit
def row_tile(x, row, exists, row_stride, step, width: tl.constexpr, WIDTH: tl.constexpr):
    """(addresses, which of them there are) of rows [rows, WIDTH]; `x` points to the first."""
    column = tl.arange(0, WIDTH)[None, :]
    there = exists[:, None] if width == WIDTH else exists[:, None] & (column < width)
    return x + (row.to(tl.int64) * row_stride)[:, None] + column * step, there


@triton.jit
def load_rows(x, row, exists, row_stride, step, width: tl.constexpr, WIDTH: tl.constexpr):
    """The rows that exist, and zeros."""
    source, there = row_tile(x, row, exists, row_stride, step, width, WIDTH)
    return tl.load(source, mask=there, other=0.0)


@triton.jit
def store_rows(x, value, row, exists, row_stride, step, width: tl.constexpr, WIDTH: tl.constexpr):
    target, there = row_tile(x, row, exists, row_stride, step, width, WIDTH)
    tl.store(target, value.to(x.dtype.element_ty), mask=there)


@triton.jit
def keys_seen(row, queries, keys, left, right, offset, bounds):
    """Of each query: the first key that it sees, the one behind the last, and the key at which it stands.

    `bounds`: these numbers as a tensor [3, queries], for packed sequences.
    """
    row = tl.minimum(row, queries - 1)  # those behind the last are to add nothing to what a block reads
    if bounds is None:
        place = row + offset
        begin, end = tl.zeros_like(row), tl.zeros_like(row) + keys
        if left is not None:
            begin = tl.maximum(place - left, begin)
        if right is not None:
            end = tl.minimum(place + right + 1, end)
    else:
        at = bounds + row
        begin, end, place = tl.load(at), tl.load(at + queries), tl.load(at + 2 * queries)
    return begin, end, place


@triton.jit
def queries_seen(column, queries, keys, left, right, offset, bounds):
    """Of each key: the first query that sees it, and the one behind the last. `bounds`: [2, keys]."""
    column = tl.minimum(column, keys - 1)
    if bounds is None:
        begin, end = tl.zeros_like(column), tl.zeros_like(column) + queries
        if right is not None:
            begin = tl.maximum(column - offset - right, begin)
        if left is not None:
            end = tl.minimum(column - offset + left + 1, end)
    else:
        begin, end = tl.load(bounds + column), tl.load(bounds + keys + column)
    return begin, end


@triton.jit
def spans(begin, end, BLOCK: tl.constexpr):
    """Of the intervals of all lines of a tile: where the blocks begin that any needs, where those that all need whole begin and
    end, and where the last ends. Bounds of blocks are multiples of BLOCK, but the last."""
    last = tl.max(end, axis=0)
    first = tl.min(begin, axis=0) // BLOCK * BLOCK
    whole = tl.minimum((tl.max(begin, axis=0) + BLOCK - 1) // BLOCK * BLOCK, tl.maximum(last, first))
    return first, whole, tl.maximum(tl.min(end, axis=0) // BLOCK * BLOCK, whole), last


@triton.jit
def loop_of(start, whole, rest, stop, EDGE: tl.constexpr):
    """Bounds of a loop over the blocks that all lines need whole or (EDGE) over the others, before and after these."""
    if EDGE:
        return start, stop - (rest - whole)
    else:
        return whole, rest


@triton.jit
def block_of(at, whole, rest, EDGE: tl.constexpr):
    """Where the block begins that such a loop has come to."""
    return tl.where(at < whole, at, at + (rest - whole)) if EDGE else at


@triton.jit
def tanh(x):
    """Near 0 a polynomial (a rational function) that keeps relative accuracy, elsewhere from exp(-2 |x|). As in csrc/math.h."""
    a = tl.abs(x)
    e = exp_nonpositive(-2.0 * a, False)
    far = divide(1.0 - e, 1.0 + e)
    z = x * x
    if x.dtype == tl.float64:
        p = multiply_add(z, -9.64399179425052238628e-01, -9.92877231001918586564e01)
        p = tl.fma(p, z, tl.full(z.shape, -1.61468768441708447952e03, z.dtype))
        q = tl.fma(z + 1.12811678491632931402e02, z, tl.full(z.shape, 2.23548839060100448583e03, z.dtype))
        r = p / tl.fma(q, z, tl.full(z.shape, 4.84406305325125486048e03, z.dtype))
    else:
        r = multiply_add(z, -5.70498872745e-03, 2.06390887954e-02)
        r = tl.fma(r, z, tl.full(z.shape, -5.37397155531e-02, z.dtype))
        r = tl.fma(r, z, tl.full(z.shape, 1.33314422036e-01, z.dtype))
        r = tl.fma(r, z, tl.full(z.shape, -3.33332819422e-01, z.dtype))
    near = tl.fma(x * z, r, x)
    return tl.where(a < 0.625, near, tl.where(x < 0.0, -far, far))


@triton.jit
def exponential(x, HALF: tl.constexpr):
    """Of x <= 0 in the units of scores."""
    return tl.exp2(x) if HALF else exp_nonpositive(x, False)


@triton.jit
def inside(x, begin, end, tile, EDGE: tl.constexpr):
    """Which elements of a tile count by the limits of its lines. EDGE: not all."""
    keep = tl.full(tile.shape, True, tl.int1)
    return keep & (x >= begin) & (x < end) if EDGE else keep


@triton.jit
def form_scores(
    product, keep, row, column, place, queries, keys, mask, m2, m3, slope, scale, softcap, HALF: tl.constexpr,
    BOOLEAN: tl.constexpr,
):  # fmt: skip
    """(scores, which of them count, tanh of the softcap) from q k^T and what counts by the limits."""
    F: tl.constexpr = product.dtype
    capped = product
    if softcap is None and slope is None and mask is None:
        return product * (scale * LOG2E if HALF else scale), keep, capped
    score = product * scale
    if softcap is not None:
        capped = tanh(divide(score, tl.full(score.shape, softcap, F)))
        score = capped * softcap
    if slope is not None:
        score -= slope * tl.abs((column - place).to(F))
    if mask is not None:
        source = mask + row.to(tl.int64) * m2 + column.to(tl.int64) * m3
        exists = (row < queries) & (column < keys)
        if BOOLEAN:
            keep = keep & (tl.load(source, mask=exists, other=0) != 0)
        else:
            add = tl.load(source, mask=exists, other=float("-inf")).to(F)
            keep = keep & (add != float("-inf"))
            score += add
    return score * LOG2E if HALF else score, keep, capped


@triton.jit
def key_scores(
    q, k, mask, row, begin, end, place, at, whole, rest, seen_from, seen_to, queries, keys, k2, k3, m2, m3, slope, scale,
    softcap, width: tl.constexpr, BOOLEAN: tl.constexpr, EDGE: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Of the block of keys that a loop has come to: (the first, all of them, which of them exist and are seen, their rows, and
    what :func:`form_scores` gives for the queries `row` with rows `q`)."""
    first = tl.multiple_of(block_of(at, whole, rest, EDGE), KEYS)
    column = first + tl.arange(0, KEYS)
    exists = (column >= seen_from) & (column < seen_to)
    key = load_rows(k, column, exists, k2, k3, width, WIDTH)
    product = tl.dot(q, tl.trans(key), input_precision="ieee", out_dtype=arithmetic(q.dtype))
    keep = inside(column[None, :], begin[:, None], end[:, None], product, EDGE)
    score, keep, capped = form_scores(
        product, keep, row[:, None], column[None, :], place[:, None], queries, keys, mask, m2, m3, slope, scale, softcap,
        is_half(q.dtype), BOOLEAN,
    )  # fmt: skip
    return first, column, exists, key, score, keep, capped


@triton.jit
def query_block(first, queries, QUERIES: tl.constexpr):
    """(head, queries) of a program that holds QUERIES queries of a head, counted through the batch. The last queries come first:
    under a causal limit they see the most keys."""
    program = tl.program_id(0).to(tl.int64) + first
    blocks = (queries + QUERIES - 1) // QUERIES
    return program // blocks, ((blocks - 1 - program % blocks) * QUERIES).to(tl.int32) + tl.arange(0, QUERIES)


@triton.jit
def hidden(value, keep, other, MASKED: tl.constexpr):
    """`other` where nothing is kept: what lies there, even NaN, is not looked at."""
    return tl.where(keep, value, other) if MASKED else value


@triton.jit
def tile_factors(
    seed, head, first_row, start, queries, keys, threshold, keep_scale, F: tl.constexpr, FOURS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Dropout's factors of a tile of queries by keys of a head, counted through the batch. FOURS: `keys` is a multiple of 4, as
    `start` is."""
    row = head * queries + first_row + tl.arange(0, ROWS)
    if FOURS:
        return factors(seed, row * keys + start, threshold, keep_scale, F, ROWS, COLUMNS)
    else:
        index = (row * keys + start)[:, None] + tl.arange(0, COLUMNS)[None, :]
        return element_factors(seed, index, threshold, keep_scale, F)
