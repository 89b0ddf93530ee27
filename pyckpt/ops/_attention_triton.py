"""Attention on backend ``triton``: from the ops' tensors and numbers to what triton_kernels/attention.py takes.

Nothing here waits for the device: the bounds of packed sequences become, there, the limits of each query and key.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ._attention_checks import check_arguments, check_backward
from ._attention_definition import Given, Options, output_like, split, wide_dtype
from ._native import columns_adjacent, resolved, strided
from ._registry import refused

WIDEST = 512  # head width that a program's registers hold
_NOBODY = 2**30  # the beginning of an empty interval


def _limits(
    index: Tensor, own: Tensor, other: Tensor, before: int, after: int, bottom_right: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Of indices along packed sequences with bounds `own`: the interval of indices along `other` from `before` places ahead to
    `after` places behind their own place there, cut to their sequence; and that place."""
    sequence = torch.bucketize(index, own, right=True) - 1
    inside = sequence < own.numel() - 1  # not behind the last sequence
    sequence = sequence.clamp(0, max(own.numel() - 2, 0))
    first, last = other[sequence], other[(sequence + 1).clamp(max=other.numel() - 1)]
    place = index - own[sequence] + first
    if bottom_right:
        place = place + (last - first) - (own[(sequence + 1).clamp(max=own.numel() - 1)] - own[sequence])
    begin, end = torch.maximum(place - before, first), torch.minimum(place + after + 1, last)
    inside = inside & (begin < end)
    return torch.where(inside, begin, _NOBODY), torch.where(inside, end, 0), place


def _packed(
    q: Tensor, k: Tensor, given: Given, options: Options, left: int, right: int
) -> tuple[Tensor | None, Tensor | None]:
    """(begin, end, place) of the keys that each query sees, and (begin, end) of the queries that see each key."""
    if given.cu_seqlens_q is None or given.cu_seqlens_k is None:
        return None, None
    bounds_q, bounds_k = given.cu_seqlens_q.long(), given.cu_seqlens_k.long()
    i, j = (torch.arange(x.shape[2], device=q.device) for x in (q, k))
    by_query = _limits(i, bounds_q, bounds_k, left, right, options.bottom_right)
    by_key = _limits(j, bounds_k, bounds_q, right, left, options.bottom_right)
    return torch.stack(by_query).int(), torch.stack(by_key[:2]).int()


def _call(module: ModuleType, q: Tensor, k: Tensor, v: Tensor, given: Given, options: Options) -> Any:
    """The Call of triton_kernels.attention."""
    batch, heads, queries, width = q.shape
    keys = k.shape[2]
    if max(width, v.shape[3]) > WIDEST:
        raise refused(
            f"attention's Triton kernels take heads of width {WIDEST} at most, got {max(width, v.shape[3])}; use "
            "pyckpt.backends.use('reference')"
        )
    mask, slopes = given.mask, given.slopes
    if mask is not None:
        mask = resolved(mask).expand(batch, heads, queries, keys)
        mask = mask.view(torch.uint8) if mask.dtype == torch.bool else mask
    unlimited = queries + keys
    left, right = (None if side is None else min(side, unlimited) for side in (options.left, options.right))
    by_query, by_key = _packed(
        q, k, given, options, *(unlimited if side is None else side for side in (left, right))
    )
    return module.Call(
        resolved(q), resolved(k), resolved(v), mask, None if slopes is None else slopes.expand(batch, heads), by_query,
        by_key, given.seed, options.scale, left, right, keys - queries if options.bottom_right else 0, options.softcap,
        options.dropout_p if given.seed is not None else 0.0,
    )  # fmt: skip


def forward(module: ModuleType, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    given, options = split(rest)
    out = output_like(q, v)
    logsumexp = q.new_empty(q.shape[:3], dtype=wide_dtype(q))
    if not out.numel() or not k.shape[2]:
        logsumexp.fill_(-float("inf"))
        return out.zero_(), logsumexp
    module.forward(_call(module, q, k, v, given, options), out, logsumexp)
    return out, logsumexp


def backward(
    module: ModuleType, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`module`: attention_backward."""
    *arguments, out, logsumexp, wanted = rest
    given, options = split(arguments)
    grad = resolved(strided(grad))
    check_arguments(q, k, v, given, options)
    check_backward(grad, q, v, out, logsumexp)
    mask = given.mask
    if not out.numel() or not k.shape[2]:
        like = (q, k, v, mask)
        zeros = [
            torch.zeros_like(x) if w and x is not None else None for x, w in zip(like, wanted, strict=True)
        ]
        return tuple(q.new_empty(0) if x is None else x for x in zeros)  # type: ignore[return-value]
    out, logsumexp = columns_adjacent(resolved(out)), logsumexp.contiguous()
    call = _call(module, q, k, v, given, options)
    rows_summed = keys_summed = False
    if mask is not None and wanted[3]:
        rows_summed, keys_summed = mask.shape[2] == 1 < q.shape[2], mask.shape[3] == 1 < k.shape[2]
    delta, shift, total = torch.empty_like(logsumexp), logsumexp, None
    # Sums along keys are 0 but for roundings, and would show those of the output in 16 bits too.
    if q.dtype.itemsize > 2 or keys_summed:
        shift, total = torch.empty_like(logsumexp), torch.empty_like(logsumexp)
        module.statistics(call, grad, shift, delta, total)
    else:
        module.row_products(grad, out, delta)
    dq, dk, dv = (torch.empty_like(x) if w else None for x, w in zip((q, k, v), wanted, strict=False))
    if dk is not None or dv is not None:
        module.key_gradients(call, grad, shift, delta, total, dk, dv)
    dbias = None
    if mask is not None and wanted[3]:
        # Every head's part, in blocks of queries where the bias broadcasts over these; then torch sums them in its fixed order.
        whole = mask.shape == (*q.shape[:3], k.shape[2])
        dtype = mask.dtype if whole else wide_dtype(q)
        parts = module.bias_partials(call, rows_summed, keys_summed)
        dbias = q.new_zeros((*q.shape[:2], *parts), dtype=dtype)
    if dq is not None or dbias is not None:
        module.query_gradients(call, grad, shift, delta, total, dq, dbias, rows_summed, keys_summed)
    dmask = None if dbias is None or mask is None else dbias.sum_to_size(mask.shape).to(mask.dtype)
    return tuple(q.new_empty(0) if x is None else x for x in (dq, dk, dv, dmask))  # type: ignore[return-value]
