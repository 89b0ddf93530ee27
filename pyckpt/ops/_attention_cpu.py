"""Attention on the CPU, block by block: matrix products by torch, everything between them by csrc/cpu/attention.cpp.

A block is some rows of queries of some heads against all keys that they see, 2**20 scores or so, in a buffer used again for
every block; with the gradients of the scores there are two of them in backward. Keys outside a causal limit, a window or a packed
sequence are left out of the products by blocks of rows.

Per score, forward does 2 (width + v width) operations in two products and one exponential; backward 6 width + 4 v width in five
products, and the exponential again: 256 and 640 for width 64. A pass in C++ moves 2 scores per
score forward and 4 backward, in the cache; memory sees q, k, v, the output and their gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._attention_checks import check_arguments, check_backward
from ._attention_definition import Given, Options, output_like, split, wide_dtype
from ._native import address, code, native, resolved, strided

SCORES = 2**20  # of a block
SHORT = 256  # rows of a block where rows do not see all keys: the shorter, the less is computed in vain


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


class _Chunk:
    """Kv heads [u0, u1) of all batch entries together, one sequence of theirs, and its blocks."""

    def __init__(self, attention: _Attention, u0: int, u1: int, sequence: Sequence) -> None:
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
                c0, c1 = max(s.k0, r0 + s.offset - a.left), min(s.k1, r1 + s.offset + a.right)
                if c0 < c1:
                    yield Block(h0, h1, r0, r1, c0, c1)

    def within(self, b: Block) -> tuple[slice, slice]:
        """A block's heads and keys among the chunk's."""
        first = self.u0 * self.attention.group
        k0 = self.sequence.k0
        return slice(b.h0 - first, b.h1 - first), slice(b.c0 - k0, b.c1 - k0)


class _Attention:
    """One call: its sizes, its buffers, and how it is cut into blocks."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, given: Given, options: Options) -> None:
        self.batch, self.heads, self.queries, self.width = q.shape
        self.kv_heads, self.keys = k.shape[1], k.shape[2]
        self.group = self.heads // self.kv_heads if self.kv_heads else 1
        self.options, self.given = options, given
        self.dtype = product_dtype(q.dtype)
        unlimited = self.queries + self.keys
        self.left = unlimited if options.left is None else min(options.left, unlimited)
        self.right = unlimited if options.right is None else min(options.right, unlimited)
        self.sequences = sequences(q, k, given, options)
        self.mask = None if given.mask is None else resolved(given.mask)
        self.mask_kind = 0 if self.mask is None else 1 if self.mask.dtype == torch.bool else 2
        self.strides: tuple[int, ...] = (0, 0, 0, 0)
        if self.mask is not None:
            self.strides = self.mask.expand(self.batch, self.heads, self.queries, self.keys).stride()
        self.slope_strides: tuple[int, ...] = (0, 0)
        if given.slopes is not None:
            self.slope_strides = given.slopes.expand(self.batch, self.heads).stride()
        self.addresses = [address(self.mask), address(given.slopes), address(given.seed)]
        self.numbers = [options.scale, options.softcap, options.dropout_p]
        self.threads = torch.get_num_threads()
        # Whether some rows may see nothing, or some keys be seen by nobody.
        dense = given.cu_seqlens_q is None and options.left is None and options.right is None
        self.complete = dense and self.mask is None and min(self.queries, self.keys) > 0
        self.like = q
        self.pool: dict[str, Tensor] = {}

    def rows_at_once(self, s: Sequence) -> int:
        limited = min(self.left, self.right) < self.keys
        rows = max(1, SCORES // max(1, s.k1 - s.k0))
        rows = max(rows - rows % 64, min(rows, 64))
        return max(1, min(s.q1 - s.q0, rows, SHORT if limited else rows))

    def heads_at_once(self, s: Sequence) -> int:
        heads = max(1, SCORES // max(1, self.rows_at_once(s) * (s.k1 - s.k0)))
        return heads - heads % self.group if heads >= self.group else heads

    def chunks(self) -> Iterator[_Chunk]:
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
                yield _Chunk(self, u0, u1, s)
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

    def keys_of(self, x: Tensor, chunk: _Chunk) -> Tensor:
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
            offset - self.left, offset + self.right, offset, *self.strides, *self.slope_strides,
        ]  # fmt: skip
        mask_code = 0 if self.mask_kind != 2 or self.mask is None else code(self.mask)
        return _CODES[self.dtype], mask_code, self.mask_kind, geometry, self.addresses, self.numbers

    def clean(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """k and v without NaN or infinity in keys that the mask hides from every query: 0 times these would reach the output."""
        if self.mask is None or all(bool(x.sum().isfinite()) for x in (k, v)):
            return k, v
        keep = self.mask if self.mask_kind == 1 else self.mask != -float("inf")
        keep = keep.any(2, keepdim=True)
        if keep.shape[1] != 1:
            keep = keep.view(keep.shape[0], self.kv_heads, self.group, 1, keep.shape[3]).any(2)
        hidden = ~keep.transpose(2, 3)
        return k.masked_fill(hidden, 0.0), v.masked_fill(hidden, 0.0)


_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}


def cpu_fwd(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    given, options = split(rest)
    out = output_like(q, v)
    logsumexp = q.new_empty(q.shape[:3], dtype=wide_dtype(q))
    q, k, v = resolved(q), resolved(k), resolved(v)
    a = _Attention(q, k, v, given, options)
    if not a.complete:  # rows that see nothing are in no block
        out.zero_()
        logsumexp.fill_(-float("inf"))
    if not out.numel() or not a.keys:
        return out, logsumexp
    k, v = a.clean(k, v)
    for chunk in a.chunks():
        s = chunk.sequence
        keys, values = a.keys_of(k, chunk), a.keys_of(v, chunk)
        for b in chunk.blocks():
            heads, columns = chunk.within(b)
            query = a.rows(q, b.h0, b.h1, b.r0, b.r1)
            scores = a.buffer("scores", (b.h1 - b.h0, b.r1 - b.r0, b.c1 - b.c0))
            torch.bmm(query, keys[heads, columns].transpose(1, 2), out=scores)
            native.attention_forward(
                *a.score_arguments(b, s.offset), scores.data_ptr(), logsumexp.data_ptr(), a.threads
            )
            a.multiply(scores, values[heads, columns], a.part(out, b.h0, b.h1, b.r0, b.r1))
    return out, logsumexp


class _Sum:
    """Of a chunk's products left^T right, in float32 or wider where there are several: then the last rounding is the only one.

    Held transposed: libraries are a quarter slower where the first factor, the scores, is to be read by columns.
    """

    def __init__(self, a: _Attention, name: str, x: Tensor, chunk: _Chunk) -> None:
        s = chunk.sequence
        self.first = chunk.u0
        self.a, self.name, self.whole = a, name, (chunk.u1 - chunk.u0, x.shape[3], s.k1 - s.k0)
        self.total: Tensor | None = None

    def add(self, left: Tensor, right: Tensor, b: Block, columns: slice, only: bool) -> None:
        """Of (heads, rows, n) and (heads, rows, width). Heads that share a kv head are summed last: shorter sums, less error."""
        heads, _, n = left.shape
        right = right.transpose(1, 2)
        units = slice(b.h0 // self.a.group - self.first, (b.h1 - 1) // self.a.group + 1 - self.first)
        count = units.stop - units.start
        shape = (count, right.shape[1], n)
        first, group = self.total is None, heads // count
        if self.total is None:
            narrow = only and group == 1 and shape == self.whole
            dtype = self.a.dtype if narrow else wide_dtype(self.a.like)
            self.total = self.a.buffer(f"{self.name} {dtype}", self.whole, dtype)
            if shape != self.whole:
                self.total.zero_()
        target = self.total[units, :, columns]
        if group > 1 or target.dtype is not left.dtype:
            partial = torch.bmm(right, left, out=self.a.buffer("partial", (heads, *shape[1:])))
            if group > 1:
                partial = partial.view(count, group, *shape[1:]).sum(1, dtype=target.dtype)
            target.copy_(partial) if first else target.add_(partial)
        elif first and shape == self.whole:
            torch.bmm(right, left, out=target)
        else:
            torch.baddbmm(target, right, left, out=target)

    def store(self, target: Tensor) -> None:
        """Into (entries, heads, keys, width)."""
        if self.total is None:
            target.zero_()
            return
        # Two-dimensional transposes go by tiles.
        for unit, (entry, head) in enumerate(
            (entry, head) for entry in range(target.shape[0]) for head in range(target.shape[1])
        ):
            target[entry, head].copy_(self.total[unit].t())


class _BiasGradient:
    """Sums in the wide dtype of the scores' gradients over the dimensions along which the mask is broadcast."""

    def __init__(self, a: _Attention, mask: Tensor) -> None:
        self.a = a
        self.total = mask.new_zeros(mask.shape, dtype=wide_dtype(a.like))

    def buffer(self, b: Block) -> Tensor:
        return self.a.buffer("bias", (b.h1 - b.h0, b.r1 - b.r0, b.c1 - b.c0), self.total.dtype)

    def add(self, b: Block, gradient: Tensor) -> None:
        heads = self.a.heads
        (b0, first), (b1, last) = divmod(b.h0, heads), divmod(b.h1 - 1, heads)
        gradient = gradient.view(b1 - b0 + 1, last - first + 1, b.r1 - b.r0, b.c1 - b.c0)
        ranges = ((b0, b1 + 1), (first, last + 1), (b.r0, b.r1), (b.c0, b.c1))
        whole = (slice(None) if n == 1 else slice(*r) for n, r in zip(self.total.shape, ranges, strict=True))
        target = self.total[tuple(whole)]
        target.add_(gradient.sum_to_size(target.shape))


def cpu_bwd(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *arguments, out, logsumexp, wanted = rest
    given, options = split(arguments)
    grad = resolved(strided(grad))
    check_arguments(q, k, v, given, options)
    check_backward(grad, q, v, out, logsumexp)
    like = (q, k, v)
    q, k, v = resolved(q), resolved(k), resolved(v)
    a = _Attention(q, k, v, given, options)
    new = torch.empty_like if a.complete and out.numel() else torch.zeros_like
    gradients = [new(x) if w else q.new_empty(0) for x, w in zip(like, wanted, strict=False)]
    bias = _BiasGradient(a, given.mask) if given.mask is not None and wanted[3] else None
    if out.numel() and a.keys:
        k, v = a.clean(k, v)
        if not a.complete and not all(bool(x.sum().isfinite()) for x in (q, grad)):
            # 0 times NaN: neither the query of a row that keeps nothing nor its gradient may reach a product.
            empty = (logsumexp == -float("inf")).unsqueeze(-1)
            q, grad = q.masked_fill(empty, 0.0), grad.masked_fill(empty, 0.0)
        for chunk in a.chunks():
            _backward_chunk(a, chunk, (grad, q, k, v), gradients, wanted, bias)
    dmask = q.new_empty(0) if bias is None else bias.total.to(q.dtype)
    return gradients[0], gradients[1], gradients[2], dmask


def _backward_chunk(
    a: _Attention,
    chunk: _Chunk,
    tensors: tuple[Tensor, ...],
    gradients: list[Tensor],
    wanted: list[bool],
    bias: _BiasGradient | None,
) -> None:
    grad, q, k, v = tensors
    s = chunk.sequence
    keys, values = a.keys_of(k, chunk), a.keys_of(v, chunk)
    dk = _Sum(a, "dk", k, chunk) if wanted[1] else None
    dv = _Sum(a, "dv", v, chunk) if wanted[2] else None
    blocks = list(chunk.blocks())
    for b in blocks:
        heads, columns = chunk.within(b)
        key, value = keys[heads, columns], values[heads, columns]
        query, upstream = (a.rows(x, b.h0, b.h1, b.r0, b.r1) for x in (q, grad))
        shape = (b.h1 - b.h0, b.r1 - b.r0, b.c1 - b.c0)
        scores, dscores = a.buffer("scores", shape), a.buffer("gradients", shape)
        torch.bmm(query, key.transpose(1, 2), out=scores)
        torch.bmm(upstream, value.transpose(1, 2), out=dscores)
        dbias = None if bias is None else bias.buffer(b)
        native.attention_backward(
            *a.score_arguments(b, s.offset), scores.data_ptr(), dscores.data_ptr(), address(dbias), a.threads
        )  # fmt: skip
        if bias is not None and dbias is not None:
            bias.add(b, dbias)
        for total, left, right in ((dk, dscores, query), (dv, scores, upstream)):
            if total is not None:
                total.add(left, right, b, columns, len(blocks) == 1)
        if wanted[0]:
            a.multiply(dscores, key, a.part(gradients[0], b.h0, b.h1, b.r0, b.r1))
    for number, total in ((1, dk), (2, dv)):
        if total is not None:
            total.store(a.part(gradients[number], chunk.u0, chunk.u1, s.k0, s.k1))
