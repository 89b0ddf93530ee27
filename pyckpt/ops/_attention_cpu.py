"""Attention on the CPU, block by block: matrix products by torch, everything between them by csrc/cpu/attention.cpp.

A block is some rows of queries of some heads against all keys that they see, in a buffer used again for every block; with the
gradients of the scores there are two of them in backward. Keys outside a causal limit, a window or a packed sequence are left out
of the products by blocks of rows.

Per score, forward does 2 (width + v width) operations in two products and one exponential; backward 6 width + 4 v width in five
products, and the exponential again: 256 and 640 operations for width 64. A pass in C++ reads and writes each score once forward,
and each score and its gradient once backward, in the cache; memory sees q, k, v, the output and their gradients.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ..backends import native
from ._attention_blocks import Attention, Block, Chunk
from ._attention_checks import check_arguments, check_backward
from ._attention_definition import output_like, split, wide_dtype
from ._native import resolved, strided


def cpu_fwd(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    given, options = split(rest)
    out = output_like(q, v)
    logsumexp = q.new_empty(q.shape[:3], dtype=wide_dtype(q))
    q, k, v = resolved(q), resolved(k), resolved(v)
    a = Attention(q, k, v, given, options)
    if not a.covered:
        out.zero_()
        logsumexp.fill_(-float("inf"))
    if not out.numel() or not a.keys:
        return out, logsumexp
    k, v = a.clean(k, v)
    a.run(a.jobs(), functools.partial(_forward_chunk, (q, k, v), out, logsumexp))
    return out, logsumexp


def _forward_chunk(
    tensors: tuple[Tensor, ...], out: Tensor, logsumexp: Tensor, a: Attention, chunk: Chunk
) -> None:
    q, k, v = tensors
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


class _Sum:
    """Of a chunk's products left^T right, in float32 or wider where there are several: then the last rounding is the only one.

    Held transposed: libraries are a quarter slower where the first factor, the scores, is to be read by columns.
    """

    def __init__(self, a: Attention, name: str, x: Tensor, chunk: Chunk) -> None:
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
        if target.is_contiguous() or target.numel() <= 2**18:
            target.copy_(self.total.view(*target.shape[:2], *self.total.shape[1:]).transpose(2, 3))
            return
        # Far apart in memory, they are best copied head by head: two-dimensional transposes go by tiles.
        for unit, (entry, head) in enumerate(
            (entry, head) for entry in range(target.shape[0]) for head in range(target.shape[1])
        ):
            target[entry, head].copy_(self.total[unit].t())


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
    a = Attention(q, k, v, given, options)
    new = torch.empty_like if a.covered and out.numel() else torch.zeros_like
    gradients = [new(x) if w else q.new_empty(0) for x, w in zip(like, wanted, strict=False)]
    total = None  # of the gradient of the mask
    if given.mask is not None and wanted[3]:
        total = given.mask.new_zeros(given.mask.shape, dtype=wide_dtype(q))
        a.sum_mask_gradient(total)
    if out.numel() and a.keys:
        k, v = a.clean(k, v)
        empty = None if a.complete else (logsumexp == -float("inf")).unsqueeze(-1)
        if empty is not None and bool(empty.any()):
            # 0 times NaN: neither the query of a row that keeps nothing nor its gradient may reach a product.
            q, grad = q.masked_fill(empty, 0.0), grad.masked_fill(empty, 0.0)
        body = functools.partial(_backward_chunk, (grad, q, k, v), gradients, wanted)
        a.run(a.jobs(total), body)
    dmask = q.new_empty(0) if total is None or given.mask is None else total.to(given.mask.dtype)
    return gradients[0], gradients[1], gradients[2], dmask


def _backward_chunk(
    tensors: tuple[Tensor, ...],
    gradients: list[Tensor],
    wanted: list[bool],
    a: Attention,
    chunk: Chunk,
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
        native.attention_backward(
            *a.score_arguments(b, s.offset), scores.data_ptr(), dscores.data_ptr(), a.threads
        )
        for total, left, right in ((dk, dscores, query), (dv, scores, upstream)):
            if total is not None:
                total.add(left, right, b, columns, len(blocks) == 1)
        if wanted[0]:
            a.multiply(dscores, key, a.part(gradients[0], b.h0, b.h1, b.r0, b.r1))
    for number, total in ((1, dk), (2, dv)):
        if total is not None:
            total.store(a.part(gradients[number], chunk.u0, chunk.u1, s.k0, s.k1))
