"""Attention in plain differentiable PyTorch: what the ops of attention.py mean, and their reference backend.

Shapes, used throughout: q (batch, heads, queries, width), k (batch, kv heads, keys, width), v (batch, kv heads, keys, v width).
Query head h reads kv head h // (heads / kv heads).

Rounding: matrix products are rounded to the dtype of q; all between them is float32 (float64 for float64).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._native import strided
from ._registry import DTYPES, transformed
from ._softmax_definition import MINUS_INFINITY, gradient
from .dropout import dropout_factors


class Given(NamedTuple):
    """The tensors that the ops take after q, k and v, in the order of their schemas."""

    # Boolean (True = keep) or additive, in the dtype of q or the wide one; broadcast to (batch, heads, queries, keys).
    mask: Tensor | None = None
    slopes: Tensor | None = None  # ALiBi, float32 (float64), broadcast to (batch, heads)
    cu_seqlens_q: Tensor | None = None  # bounds of packed sequences, int32 or int64, (sequences + 1,)
    cu_seqlens_k: Tensor | None = None
    seed: Tensor | None = None  # None: no dropout


class Options(NamedTuple):
    """The numbers that follow them.

    Query i stands at key ``i + offset`` of its sequence; offset is 0, or ``keys - queries`` with `bottom_right`. It sees
    `left` keys before that place and `right` after it (None: all).
    """

    scale: float
    left: int | None = None
    right: int | None = None
    bottom_right: bool = False
    softcap: float = 0.0
    dropout_p: float = 0.0


SCHEMA = (
    "Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? slopes, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seed, "
    "float scale, SymInt? left, SymInt? right, bool bottom_right, float softcap, float dropout_p"
)


def split(arguments: Sequence[Any]) -> tuple[Given, Options]:
    """The tensors and the numbers among an op's arguments after q, k and v."""
    return Given(*arguments[:5]), Options(*arguments[5:11])


def wide_dtype(x: Tensor) -> torch.dtype:
    return DTYPES[x.dtype][1]


def under_autocast(x: Tensor) -> bool:
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)  # which raises for the meta device


def _product(a: Tensor, b: Tensor) -> Tensor:
    wide = wide_dtype(a)
    if under_autocast(a):
        with torch.autocast(a.device.type, enabled=False):
            return (a.to(wide) @ b.to(wide)).to(a.dtype)
    return (a.to(wide) @ b.to(wide)).to(a.dtype)


def _positions(q: Tensor, k: Tensor, given: Given, options: Options) -> tuple[Tensor, Tensor | None]:
    """Key minus the key at which the query stands, (queries, keys), and which pairs belong to one sequence (None: all)."""
    queries, keys = q.shape[-2], k.shape[-2]
    i = torch.arange(queries, device=q.device)
    j = torch.arange(keys, device=q.device)
    if given.cu_seqlens_q is None or given.cu_seqlens_k is None:
        offset: Any = keys - queries if options.bottom_right else 0
        return j - (i + offset)[:, None], None
    cu_q, cu_k = given.cu_seqlens_q.long(), given.cu_seqlens_k.long()
    sequence_q, sequence_k = (torch.bucketize(index, cu, right=True) for index, cu in ((i, cu_q), (j, cu_k)))
    inside = (sequence_q > 0) & (sequence_q < cu_q.numel())
    offsets = cu_k[:-1] - cu_q[:-1]
    if options.bottom_right:
        offsets = offsets + cu_k.diff() - cu_q.diff()
    offset = offsets[(sequence_q - 1).clamp(0, max(offsets.numel() - 1, 0))] if offsets.numel() else 0
    return j - (i + offset)[:, None], (sequence_q[:, None] == sequence_k) & inside[:, None]


def _keep(q: Tensor, k: Tensor, given: Given, options: Options, position: Tensor) -> Tensor | None:
    """Which scores count, to be broadcast to (batch, heads, queries, keys); None: all."""
    keep = []
    if given.mask is not None:
        keep.append(given.mask if given.mask.dtype == torch.bool else given.mask != MINUS_INFINITY)
    if options.left is not None:
        keep.append(position >= -options.left)
    if options.right is not None:
        keep.append(position <= options.right)
    if not keep:
        return None
    result = keep[0]
    for other in keep[1:]:
        result = result & other
    return result.expand(*q.shape[:-1], k.shape[-2])


def _repeated(x: Tensor, heads: int) -> Tensor:
    """A kv head for every head."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def _by_kv_head(x: Tensor, kv_heads: int) -> Tensor:
    """(batch, heads, n, m) as (batch, kv heads, heads / kv heads, n, m)."""
    batch, heads, n, m = x.shape
    return x.reshape(batch, kv_heads, heads // max(kv_heads, 1), n, m)


def _summed(left: Tensor, right: Tensor, kv_heads: int) -> Tensor:
    """left^T @ right, summed over the heads that read one kv head: as torch does, head by head, but rounded once."""
    wide = wide_dtype(left)
    product = _product(left.to(wide).transpose(-1, -2), right.to(wide))
    return _by_kv_head(product, kv_heads).sum(2).to(left.dtype)


class _Forward(NamedTuple):
    q: Tensor  # q, k, v without what no score depends on
    k: Tensor
    v: Tensor
    p: Tensor  # probabilities before dropout, (batch, heads, queries, keys)
    logsumexp: Tensor
    kept: Tensor | None  # rows that keep anything; None: all
    factors: Tensor | None  # of dropout
    slope: Tensor | None  # of the softcap


def _forward(q: Tensor, k: Tensor, v: Tensor, given: Given, options: Options) -> _Forward:
    position, together = _positions(q, k, given, options)
    keep = _keep(q, k, given, options, position)
    if together is not None:
        keep = together.expand(*q.shape[:-1], k.shape[-2]) if keep is None else keep & together
    kept = None
    if keep is not None:
        # 0 times NaN is NaN in a matrix product: junk in keys that nobody sees and in queries that see nothing goes first.
        kept = keep.any(-1, keepdim=True)
        seen = _by_kv_head(keep, k.shape[1]).any(2).any(-2).unsqueeze(-1)
        q, k, v = q.masked_fill(~kept, 0.0), k.masked_fill(~seen, 0.0), v.masked_fill(~seen, 0.0)
    scores = _product(q, _repeated(k, q.shape[1]).transpose(-1, -2)).to(wide_dtype(q)) * options.scale
    slope = None
    if options.softcap:
        capped = torch.tanh(scores / options.softcap)
        slope = 1 - capped * capped
        scores = options.softcap * capped
    if given.slopes is not None:
        scores = scores - given.slopes.to(scores.dtype)[..., None, None] * position.abs()
    if given.mask is not None and given.mask.dtype != torch.bool:
        scores = scores + given.mask.to(scores.dtype).masked_fill(given.mask == MINUS_INFINITY, 0.0)
    if keep is not None and kept is not None:
        scores = scores.masked_fill(~keep, MINUS_INFINITY).masked_fill(~kept, 0.0)
    if not k.shape[-2]:
        return _Forward(q, k, v, scores, scores.new_full(q.shape[:-1], MINUS_INFINITY), kept, None, slope)
    p, logsumexp = torch.softmax(scores, -1), torch.logsumexp(scores, -1)
    if keep is not None and kept is not None:
        p = p.masked_fill(~keep, 0.0)
        logsumexp = logsumexp.masked_fill(~kept.squeeze(-1), MINUS_INFINITY)
    factors = None if given.seed is None else dropout_factors(p, given.seed, options.dropout_p)
    return _Forward(q, k, v, p, logsumexp, kept, factors, slope)


def _output(f: _Forward, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The output, and the probabilities that it is made with."""
    dropped = (f.p if f.factors is None else f.p * f.factors).to(dtype)
    out = _product(dropped, _repeated(f.v, f.q.shape[1]))
    return (out if f.kept is None else out.masked_fill(~f.kept, 0.0)), dropped


def expression(q: Tensor, k: Tensor, v: Tensor, given: Given, options: Options) -> Tensor:
    return _output(_forward(q, k, v, given, options), q.dtype)[0]


def output_like(q: Tensor, v: Tensor) -> Tensor:
    """An uninitialised output: heads beside each other in memory, so that (batch, queries, heads * width) is a view."""
    batch, heads, queries, width = *q.shape[:-1], v.shape[-1]
    return q.new_empty_strided(
        (batch, heads, queries, width), (queries * heads * width, width, heads * width, 1)
    )


def reference_fwd(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    f = _forward(q, k, v, *split(rest))
    return output_like(q, v).copy_(_output(f, q.dtype)[0]), f.logsumexp.detach().contiguous()


def reference_weights(q: Tensor, k: Tensor, given: Given, options: Options) -> Tensor:
    """The probabilities times dropout's factors, (batch, heads, queries, keys)."""
    f = _forward(q, k, k, given, options)
    return _output(f, q.dtype)[1]


def reference_bwd(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Differentiable: probabilities are formed anew from q and k."""
    *arguments, _, _, wanted = rest
    given, options = split(arguments)
    kv_heads, like, grad = k.shape[1], (q, k, v), strided(grad)
    f = _forward(q, k, v, given, options)
    q, k, v = f.q, f.k, f.v
    dropped = _output(f, q.dtype)[1]
    if f.kept is not None:
        grad = grad.masked_fill(~f.kept, 0.0)
    dv = _summed(dropped, grad, kv_heads)
    dp = _product(grad, _repeated(v, q.shape[1]).transpose(-1, -2)).to(f.p.dtype)
    ds = gradient(f.p, dp if f.factors is None else dp * f.factors, True, 1.0)
    dmask = None
    if given.mask is not None and wanted[3]:
        dmask = ds.sum_to_size(given.mask.shape).to(given.mask.dtype)
    if f.slope is not None:
        ds = (ds * f.slope).masked_fill(f.p == 0, 0.0)
    ds = (ds * options.scale).to(q.dtype)
    dq = _product(ds, _repeated(k, q.shape[1]))
    dk = _summed(ds, q, kv_heads)
    gradients = [dq, dk, dv]
    if not transformed() and not torch._C._functorch.is_legacy_batchedtensor(grad):
        gradients = [torch.empty_like(x).copy_(d) for x, d in zip(like, gradients, strict=True)]
    gradients.append(q.new_empty(0) if dmask is None else dmask.contiguous())
    return tuple(g if w else q.new_empty(0) for g, w in zip(gradients, wanted, strict=True))  # type: ignore[return-value]
