"""Attention without its probabilities in memory (Dao et al., FlashAttention-2, 2023): the forward, and how calls are laid out.

A program holds a block of queries of one head, and goes through the blocks of keys that any of them sees, with the maximum and
the sum of each row so far: first those that all its queries see whole, then the others, which are looked at one by one. It
reads q and writes the output once; k and v are read once for each block of queries, from the cache mostly. Operations:
2 (width + v width) a score.

The backward kernels are in attention_backward.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._attention_tiles import (
    LOG2,
    exponential,
    hidden,
    key_scores,
    keys_seen,
    load_rows,
    loop_of,
    query_block,
    spans,
    store_rows,
    tile_factors,
)
from ._common import arithmetic, bits, divide, divide_up, double, is_half, launch_rows, row_sum
from ._philox import rule
from ._softmax_tiles import inverse_of, quotient

# Numbers that differ from call to call, and would only be reasons to compile again.
UNSPECIALISED = [
    "heads", "group", "queries", "n", "scale", "softcap", "left", "right", "offset", "threshold", "keep_scale", "first",
]  # fmt: skip


@triton.jit
def _go_through(
    state, q, k, v, mask, seed, row, begin, end, place, head, queries, n, k2, k3, v2, v3, m2, m3, slope, scale,
    softcap, threshold, keep_scale, seen_from, seen_to, start, whole, rest, stop, width: tl.constexpr, v_width: tl.constexpr,
    BOOLEAN: tl.constexpr, FOURS: tl.constexpr, EDGE: tl.constexpr, CLEAN: tl.constexpr, QUERIES: tl.constexpr,
    KEYS: tl.constexpr, WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
):  # fmt: skip
    """The keys from `whole` to `rest`, which all queries see, or (EDGE) those before and after, as :func:`spans` has them. CLEAN:
    some that lie between others may be seen by no query, and hold anything."""
    F: tl.constexpr = state[0].dtype
    HALF: tl.constexpr = is_half(q.dtype)
    MASKED: tl.constexpr = EDGE or mask is not None
    acc, top, total = state
    first_row = tl.min(row, axis=0)
    begin_loop, end_loop = loop_of(start, whole, rest, stop, EDGE)
    for at in range(begin_loop, end_loop, KEYS):
        first, column, exists, _, score, keep, _ = key_scores(
            q, k, mask, row, begin, end, place, at, whole, rest, seen_from, seen_to, queries, n, k2, k3, m2, m3, slope, scale,
            softcap, width, BOOLEAN, EDGE, KEYS, WIDTH,
        )  # fmt: skip
        score = hidden(score, keep, float("-inf"), MASKED)
        higher = tl.maximum(top, tl.max(score, axis=1))
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        p = exponential(score - shift[:, None], HALF)
        fade = exponential(top - shift, HALF)
        total = tl.fma(total, fade, row_sum(p, HALF))
        top = higher
        if seed is not None:
            p *= tile_factors(
                seed, head, first_row, first, queries, n, threshold, keep_scale, F, FOURS, QUERIES, KEYS
            )
        if CLEAN:
            exists = exists & (tl.max(keep.to(tl.int32), axis=0) > 0)
        value = load_rows(v, column, exists, v2, v3, v_width, V_WIDTH)
        acc = tl.dot(
            p.to(v.dtype.element_ty), value, acc * fade[:, None], input_precision="ieee", out_dtype=F
        )
    return acc, top, total


@triton.jit(do_not_specialize=UNSPECIALISED)
def _forward(
    q, k, v, out, logsumexp, mask, slopes, bounds, seed, heads, group, queries, n, q0, q1, q2, q3, k0, k1, k2, k3,
    v0, v1, v2, v3, o0, o1, o2, m0, m1, m2, m3, l0, l1, scale, softcap, left, right, offset, threshold, keep_scale,
    first, width: tl.constexpr, v_width: tl.constexpr, BOOLEAN: tl.constexpr, FOURS: tl.constexpr,
    EMPTY: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
):  # fmt: skip
    F: tl.constexpr = arithmetic(q.dtype.element_ty)
    HALF: tl.constexpr = is_half(q.dtype.element_ty)
    head, row = query_block(first, queries, QUERIES)
    b, h = head // heads, head % heads
    query = load_rows(q + b * q0 + h * q1, row, row < queries, q2, q3, width, WIDTH)
    k += b * k0 + h // group * k1
    v += b * v0 + h // group * v1
    slope = None
    if slopes is not None:
        slope = tl.load(slopes + b * l0 + h * l1)
    if mask is not None:
        mask += b * m0 + h * m1
    scale = double(scale, F)
    if softcap is not None:
        softcap = double(softcap, F)
    begin, end, place = keys_seen(row, queries, n, left, right, offset, bounds)
    seen_from, seen_to = tl.min(begin, axis=0), tl.max(end, axis=0)
    start, whole, rest, stop = spans(begin, end, KEYS)
    state = (
        tl.zeros((QUERIES, V_WIDTH), F),
        tl.full((QUERIES,), float("-inf"), F),
        tl.zeros((QUERIES,), F),
    )
    for edge in tl.static_range(0, 2):
        state = _go_through(
            state, query, k, v, mask, seed, row, begin, end, place, head, queries, n, k2, k3, v2, v3, m2, m3, slope,
            scale, softcap, threshold, keep_scale, seen_from, seen_to, start, whole, rest, stop, width, v_width,
            BOOLEAN, FOURS, edge == 1, mask is not None or (edge == 1 and bounds is not None), QUERIES, KEYS, WIDTH,
            V_WIDTH,
        )  # fmt: skip
    acc, top, total = state
    # A sum of 0 is that of a row that sees nothing; where there are none of these, of scores that are all -inf: NaN, as in torch.
    inverse = inverse_of(total) if EMPTY else divide(tl.full(total.shape, 1.0, F), total)
    value = quotient(acc, total, inverse, HALF)
    store_rows(out + b * o0 + h * o1, value, row, row < queries, o2, 1, v_width, V_WIDTH)
    if not HALF:
        top, total = top.to(tl.float64), total.to(tl.float64)
    log = (top + tl.log2(total)) * LOG2 if HALF else (top + tl.log(total)).to(F)
    tl.store(logsumexp + head * queries + row, log, mask=row < queries)


class Call(NamedTuple):
    """What a call of attention is given: q (batch, heads, queries, width), k and v (batch, kv heads, keys, ...), of
    any strides. Query i stands at key i + offset, and sees `left` keys before and `right` after that place."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None  # four dimensions: uint8 (0: masked) or a floating dtype, expanded to the scores
    slopes: Tensor | None  # (batch, heads)
    bounds: Tensor | None  # of packed sequences, see _attention_tiles.keys_seen; int32
    key_bounds: Tensor | None  # for backward, see queries_seen
    seed: Tensor | None
    scale: float
    left: int | None
    right: int | None
    offset: int
    softcap: float
    dropout_p: float

    @property
    def empty(self) -> bool:
        """Whether some queries may see nothing."""
        queries, keys = self.q.shape[2], self.k.shape[2]
        return (
            self.mask is not None
            or self.bounds is not None
            or (self.right is not None and self.offset + self.right < 0)
            or (self.left is not None and queries - 1 + self.offset - self.left >= keys)
        )

    def inputs(self) -> tuple[Any, ...]:
        return self.mask, self.slopes

    def sizes(self) -> tuple[int, ...]:
        heads, queries = self.q.shape[1:3]
        return heads, heads // self.k.shape[1], queries, self.k.shape[2]

    def strides(self) -> tuple[int, ...]:
        """Of mask and slopes."""
        mask = (0, 0, 0, 0) if self.mask is None else self.mask.stride()
        return (*mask, *((0, 0) if self.slopes is None else self.slopes.stride()))

    def numbers(self) -> tuple[int | None, ...]:
        return (
            bits(self.scale), bits(self.softcap) if self.softcap else None, self.left, self.right, self.offset,
            *rule(self.dropout_p),
        )  # fmt: skip

    def options(self) -> dict[str, Any]:
        width, v_width = self.q.shape[3], self.v.shape[3]
        return {
            "width": width, "v_width": v_width, "FOURS": self.k.shape[2] % 4 == 0, "EMPTY": self.empty,
            "BOOLEAN": self.mask is not None and self.mask.dtype == torch.uint8, "WIDTH": padded(width),
            "V_WIDTH": padded(v_width),
        }  # fmt: skip


def padded(width: int) -> int:
    """The width of a tile of rows of `width`."""
    return max(16, triton.next_power_of_2(width))


# Queries, keys, warps and stages of loads of a program's block, by the width of a head's tile: as large as registers hold without
# spills, and 99 KiB of shared memory, which every GPU since compute capability 8.0 has. Not measured on hardware.
Blocks = dict[int, tuple[int, int, int, int]]
HALF_BLOCKS: Blocks = {64: (128, 64, 8, 3), 128: (128, 32, 8, 2), 256: (64, 32, 8, 2), 512: (16, 16, 4, 1)}
WIDE_BLOCKS: Blocks = {128: (16, 32, 4, 1), 512: (16, 16, 4, 1)}


def geometry(call: Call, half: Blocks, wide: Blocks) -> dict[str, int]:
    """Of a kernel with these blocks for 16-bit dtypes and for others."""
    width = max(padded(call.q.shape[3]), padded(call.v.shape[3]))
    options = (call.mask, call.slopes, call.bounds, call.seed, call.softcap or None)
    if any(option is not None for option in options):  # which need registers: the blocks of wider heads
        width = min(2 * width, 512)
    blocks = half if call.q.dtype.itemsize == 2 else wide
    queries, keys, warps, stages = next(block for widest, block in blocks.items() if width <= widest)
    if torch.version.hip:  # with twice the threads in a warp, and half the shared memory
        warps, stages = max(1, warps // 2), min(stages, 2)
    return {"QUERIES": queries, "KEYS": keys, "num_warps": warps, "num_stages": stages}


def forward(call: Call, out: Tensor, logsumexp: Tensor) -> None:
    """The output, its columns adjacent, and logsumexp (contiguous)."""
    shape = geometry(call, HALF_BLOCKS, WIDE_BLOCKS)
    programs = call.q.shape[0] * call.q.shape[1] * divide_up(call.q.shape[2], shape["QUERIES"])
    launch_rows(
        _forward, programs, call.q, call.q, call.k, call.v, out, logsumexp, *call.inputs(), call.bounds, call.seed,
        *call.sizes(), *call.q.stride(), *call.k.stride(), *call.v.stride(), *out.stride()[:3], *call.strides(),
        *call.numbers(), **call.options(), **shape,
    )  # fmt: skip
