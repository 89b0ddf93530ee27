"""How an attention on the CPU is cut into blocks, and what a block's products read.

Kv heads whose gradients are summed together make a chunk; chunks are independent, and a thread takes one after the other. What a
chunk is depends on sizes alone, so that results do not depend on the number of threads.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..backends import native
from ._attention_definition import Given, Options
from ._native import address, code, resolved
from ._registry import DTYPES

SCORE_BYTES = 2**21  # of a block
SIDE_BY_SIDE = 2**16  # scores of a call from which threads are worth their start
# Of a block where rows do not see all keys, and of float32: the fewer, the fewer products in vain. Those of 16-bit dtypes cost
# less, and a block's own cost then more: twice as many.
LIMITED_ROWS = 256


class Sequence(NamedTuple):
    """Queries [q0, q1) attend keys [k0, k1); query i stands at key i + offset."""

    q0: int
    q1: int
    k0: int
    k1: int
    offset: int


class Block(NamedTuple):
    """Rows [r0, r1) of heads [h0, h1) against keys [c0, c1)."""

    h0: int
    h1: int
    r0: int
    r1: int
    c0: int
    c1: int


@functools.cache
def _fast_in(dtype: torch.dtype) -> bool:
    """Whether this processor multiplies matrices of the dtype at full speed."""
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return True


def product_dtype(dtype: torch.dtype) -> torch.dtype:
    """What products are computed in: the dtype itself, or float32 where 16-bit products are emulated."""
    return dtype if _fast_in(dtype) else torch.float32


def sequences(q: Tensor, k: Tensor, given: Given, options: Options) -> list[Sequence]:
    queries, keys = q.shape[2], k.shape[2]
    if given.cu_seqlens_q is None or given.cu_seqlens_k is None:
        return [Sequence(0, queries, 0, keys, keys - queries if options.bottom_right else 0)]
    bounds_q, bounds_k = given.cu_seqlens_q.tolist(), given.cu_seqlens_k.tolist()
    return [
        Sequence(q0, q1, k0, k1, k1 - q1 if options.bottom_right else k0 - q0)
        for q0, q1, k0, k1 in zip(bounds_q, bounds_q[1:], bounds_k, bounds_k[1:], strict=False)
    ]


class Chunk:
    """Kv heads [u0, u1) of all batch entries together, one sequence of theirs, and its blocks."""

    def __init__(self, attention: Attention, u0: int, u1: int, sequence: Sequence) -> None:
        self.attention, self.u0, self.u1, self.sequence = attention, u0, u1, sequence

    def blocks(self) -> Iterator[Block]:
        """Heads are counted through all batch entries; those that share a kv head are adjacent."""
        a, s = self.attention, self.sequence
        begin, end = self.u0 * a.group, self.u1 * a.group
        step = min(end - begin, a.heads_at_once(s))  # all of them, or part of the one group
        for h0 in range(begin, end, step):
            h1 = min(h0 + step, end)
            for r0 in range(s.q0, s.q1, a.rows_at_once(s)):
                r1 = min(r0 + a.rows_at_once(s), s.q1)
                c0, c1 = a.columns(s, r0, r1)
                if c0 < c1:
                    yield Block(h0, h1, r0, r1, c0, c1)

    def within(self, b: Block) -> tuple[slice, slice]:
        """A block's heads and keys among the chunk's."""
        first = self.u0 * self.attention.group
        k0 = self.sequence.k0
        return slice(b.h0 - first, b.h1 - first), slice(b.c0 - k0, b.c1 - k0)


class Attention:
    """One call: its sizes, its buffers, and how it is cut into blocks."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, given: Given, options: Options) -> None:
        self.batch, self.heads, self.queries, self.width = q.shape
        self.kv_heads, self.keys = k.shape[1], k.shape[2]
        self.group = self.heads // self.kv_heads if self.kv_heads else 1
        self.options, self.given = options, given
        self.dtype = product_dtype(q.dtype)
        self.scores_at_once = SCORE_BYTES // self.dtype.itemsize
        unlimited = self.queries + self.keys
        self.left = unlimited if options.left is None else min(options.left, unlimited)
        self.right = unlimited if options.right is None else min(options.right, unlimited)
        self.sequences = sequences(q, k, given, options)
        self.mask = None if given.mask is None else resolved(given.mask)
        self.mask_kind = 0 if self.mask is None else 1 if self.mask.dtype == torch.bool else 2
        self.strides: tuple[int, ...] = (0, 0, 0, 0)
        if self.mask is not None:
            self.strides = self.mask.expand(self.batch, self.heads, self.queries, self.keys).stride()
        self.dmask_strides: tuple[int, ...] = (0, 0, 0, 0)
        self.slope_strides: tuple[int, ...] = (0, 0)
        if given.slopes is not None:
            self.slope_strides = given.slopes.expand(self.batch, self.heads).stride()
        self.addresses = [address(self.mask), 0, address(given.slopes), address(given.seed)]
        self.numbers = [options.scale, options.softcap, options.dropout_p]
        self.threads = torch.get_num_threads()
        # Whether every row and key is in a block, and whether no row can see nothing.
        dense = given.cu_seqlens_q is None and options.left is None and options.right is None
        self.covered = dense and min(self.queries, self.keys) > 0
        self.complete = self.covered and self.mask is None
        self.like = q
        self.pool: dict[str, Tensor] = {}

    def sum_mask_gradient(self, total: Tensor) -> None:
        """Blocks' backward passes are to add to `total`, of the mask's shape, zeros, in the scores' wide dtype."""
        shape = (self.batch, self.heads, self.queries, self.keys)
        self.addresses[1], self.dmask_strides = address(total), total.expand(shape).stride()

    def worker(self) -> Attention:
        """The same call for one thread of several."""
        worker = copy.copy(self)
        worker.pool, worker.threads = {}, 1
        return worker

    def run(self, jobs: list[list[Chunk]], body: Callable[[Attention, Chunk], None]) -> None:
        """body(attention, chunk) for all chunks: those of a job one after the other, jobs side by side where there are enough for
        the threads. Inside such a region torch's products run on one thread each."""
        threads = min(self.threads, len(jobs))
        if threads < 2 or 2 * threads < self.threads or self.scores() < SIDE_BY_SIDE:
            for job in jobs:
                for chunk in job:
                    body(self, chunk)
            return
        todo, inference = iter(jobs), torch.is_inference_mode_enabled()

        def work() -> None:
            worker = self.worker()
            with torch.inference_mode(inference), torch.no_grad():
                for job in todo:
                    for chunk in job:
                        body(worker, chunk)

        native.in_parallel(work, threads)

    def scores(self) -> int:
        return self.batch * self.heads * sum((s.q1 - s.q0) * (s.k1 - s.k0) for s in self.sequences)

    def jobs(self, summed: Tensor | None = None) -> list[list[Chunk]]:
        """A job for each chunk; chunks that add to the same part of the gradient of the mask `summed` share one."""
        jobs: dict[Any, list[Chunk]] = {}
        for number, chunk in enumerate(self.chunks()):
            key: Any = number
            if summed is not None:
                entry, unit = divmod(chunk.u0, self.kv_heads)
                key = (entry if summed.shape[0] > 1 else 0, unit if summed.shape[1] > 1 else 0)
            jobs.setdefault(key, []).append(chunk)
        return list(jobs.values())

    def columns(self, s: Sequence, r0: int, r1: int) -> tuple[int, int]:
        """The keys [c0, c1) that the limits let any of rows [r0, r1) see."""
        return max(s.k0, r0 + s.offset - self.left), min(s.k1, r1 + s.offset + self.right)

    def rows_at_once(self, s: Sequence) -> int:
        limited = min(self.left, self.right) < self.keys
        rows = max(1, self.scores_at_once // max(1, s.k1 - s.k0))
        rows = max(rows - rows % 64, min(rows, 64))
        return max(1, min(s.q1 - s.q0, rows, 4 * LIMITED_ROWS // self.dtype.itemsize if limited else rows))

    def heads_at_once(self, s: Sequence) -> int:
        heads = max(1, self.scores_at_once // max(1, self.rows_at_once(s) * (s.k1 - s.k0)))
        return heads - heads % self.group if heads >= self.group else heads

    def chunks(self) -> Iterator[Chunk]:
        """Kv heads whose gradients are summed together."""
        for s in self.sequences:
            if s.q0 == s.q1 or s.k0 == s.k1:
                continue
            step = max(1, self.heads_at_once(s) // self.group)
            if step >= self.kv_heads:
                step -= step % self.kv_heads
            u0 = 0
            while u0 < self.batch * self.kv_heads:
                u1 = min(u0 + step, self.batch * self.kv_heads)
                if step < self.kv_heads:  # within one batch entry
                    u1 = min(u1, u0 - u0 % self.kv_heads + self.kv_heads)
                yield Chunk(self, u0, u1, s)
                u0 = u1

    def buffer(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """Memory that the next block uses again."""
        size = 1
        for n in shape:
            size *= n
        held = self.pool.get(name)
        if held is None or held.numel() < size:
            held = self.pool[name] = self.like.new_empty(size, dtype=dtype or self.dtype)
        return held[:size].view(shape)

    def part(self, x: Tensor, h0: int, h1: int, r0: int, r1: int) -> Tensor:
        """Rows [r0, r1) of heads [h0, h1) of x, counted through the batch: a view of (entries, heads, rows, width)."""
        heads = x.shape[1]
        b0, first = divmod(h0, heads)
        b1, last = divmod(h1 - 1, heads)
        return x[b0 : b1 + 1, first : last + 1, r0:r1]

    def rows(self, x: Tensor, h0: int, h1: int, r0: int, r1: int) -> Tensor:
        """The same as a product reads it: contiguous, (heads, rows, width)."""
        part = self.part(x, h0, h1, r0, r1).to(self.dtype)
        return part.reshape(h1 - h0, r1 - r0, x.shape[3]).contiguous()

    def keys_of(self, x: Tensor, chunk: Chunk) -> Tensor:
        """k or v as products read it: one for each head, (heads, keys, width)."""
        s = chunk.sequence
        rows = self.rows(x, chunk.u0, chunk.u1, s.k0, s.k1)
        return rows if self.group == 1 else rows.repeat_interleave(self.group, 0)

    def multiply(self, left: Tensor, right: Tensor, target: Tensor) -> None:
        """left @ right of (heads, rows, n) into a view of (entries, heads, rows, width)."""
        shape = (*left.shape[:2], right.shape[2])
        if target.dtype is left.dtype and target.is_contiguous():
            torch.bmm(left, right, out=target.view(shape))
        else:
            target.copy_(torch.bmm(left, right, out=self.buffer("product", shape)).view(target.shape))

    def score_arguments(self, b: Block, offset: int) -> tuple[Any, ...]:
        geometry = [
            b.h1 - b.h0, b.r1 - b.r0, b.c1 - b.c0, b.h0, b.r0, b.c0, self.heads, self.queries, self.keys,
            offset - self.left, offset + self.right, offset, *self.strides, *self.dmask_strides,
            *self.slope_strides,
        ]  # fmt: skip
        mask_code = 0 if self.mask_kind != 2 or self.mask is None else code(self.mask)
        return DTYPES[self.dtype][0], mask_code, self.mask_kind, geometry, self.addresses, self.numbers

    def clean(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """k and v without NaN or infinity in keys that the mask, alone or with the limits, hides from every query: 0 times these
        would reach the output. Keys that limits alone hide are in no block."""
        if self.mask is None or all(bool(x.sum().isfinite()) for x in (k, v)):
            return k, v
        seen = self.keys_seen()
        if seen.shape[1] != 1:
            seen = seen.view(seen.shape[0], self.kv_heads, self.group, self.keys).any(2)
        hidden = ~seen.unsqueeze(-1)
        return k.masked_fill(hidden, 0.0), v.masked_fill(hidden, 0.0)

    def keys_seen(self) -> Tensor:
        """Which keys any query sees, by the mask and the limits: (batch or 1, heads or 1, keys)."""
        assert self.mask is not None
        mask = self.mask.expand(-1, -1, self.queries, self.keys)
        seen = mask.new_zeros((*mask.shape[:2], self.keys), dtype=torch.bool)
        for s in self.sequences:
            for r0 in range(s.q0, s.q1, LIMITED_ROWS):
                r1 = min(r0 + LIMITED_ROWS, s.q1)
                c0, c1 = self.columns(s, r0, r1)
                if c0 >= c1:
                    continue
                part = mask[:, :, r0:r1, c0:c1]
                keep = part if self.mask_kind == 1 else part != -float("inf")
                rows, columns = (torch.arange(*ends, device=mask.device) for ends in ((r0, r1), (c0, c1)))
                distance = columns - rows[:, None] - s.offset
                within = (distance >= -self.left) & (distance <= self.right)
                seen[:, :, c0:c1] |= (keep & within).any(2)
        return seen
