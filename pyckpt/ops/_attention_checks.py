"""What attention asks of its arguments, and the errors that say so."""

from __future__ import annotations

import itertools
import numbers
from typing import Any

import torch
from torch import Tensor

from ._attention_definition import Given, Options, wide_dtype
from ._native import together
from ._registry import describe, is_plain, refused
from .dropout import check_random


def _is_number(value: Any) -> bool:
    """As torch has it for its float arguments: also numpy's scalars, and tensors of no dimension."""
    if isinstance(value, Tensor):
        return not value.dim() and not value.requires_grad and not value.is_complex()
    return type(value) is float or isinstance(value, numbers.Real)  # the latter takes half a microsecond


def check_options(
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    softcap: float,
    window: int | tuple[int | None, int | None] | None,
    causal_alignment: str,
) -> None:
    if torch.compiler.is_compiling():
        return
    for name, value in (("dropout_p", dropout_p), ("scale", scale), ("softcap", softcap)):
        if not _is_number(value) and not (name == "scale" and value is None):
            raise TypeError(f"attention: {name} must be a float, got {type(value).__name__}")
    for name, value in (("is_causal", is_causal), ("enable_gqa", enable_gqa)):
        if not isinstance(value, bool):
            raise TypeError(f"attention: {name} must be a bool, got {type(value).__name__}")
    if not 0.0 <= dropout_p <= 1.0:
        raise ValueError(f"attention: dropout_p has to be between 0 and 1, but got {dropout_p}")
    if not 0.0 <= softcap < float("inf"):
        raise ValueError(f"attention: softcap has to be positive, or 0 for none, but got {softcap}")
    if causal_alignment not in ("top_left", "bottom_right"):
        raise ValueError(
            f"attention: causal_alignment must be 'top_left' or 'bottom_right', got {causal_alignment!r}"
        )
    sides = window if isinstance(window, (tuple, list)) else (window, window)
    if len(sides) != 2 or any(not isinstance(side, (int, type(None))) for side in sides):
        raise TypeError(
            f"attention: window must be an int, a pair (left, right) of ints or None, got {window!r}"
        )
    if any(side is not None and side < 0 for side in sides):
        raise ValueError(f"attention: window sizes must not be negative (None: unlimited), got {window!r}")


def check_tensors(q: Tensor, k: Tensor, v: Tensor, grouped: bool) -> None:
    """Of the public function: dtypes, devices, and all sizes but the leading ones, which may broadcast."""
    for name, x in (("key", k), ("value", v)):
        if x.dtype != q.dtype:
            raise RuntimeError(
                f"attention: {describe(name, x)} must have the dtype of {describe('query', q)}; convert it with .to()"
            )
        if x.device != q.device:
            raise RuntimeError(
                f"attention: {describe(name, x)} must be on the device of {describe('query', q)}; move it with .to()"
            )
    for name, x in (("query", q), ("key", k), ("value", v)):
        if x.dim() < 2:
            raise RuntimeError(
                f"attention: {describe(name, x)} needs two dimensions or more: (..., heads, length, width)"
            )
    if k.shape[-1] != q.shape[-1]:
        raise RuntimeError(
            f"attention: {describe('key', k)} must have the width (last dimension) of {describe('query', q)}"
        )
    if v.shape[-2] != k.shape[-2]:
        raise RuntimeError(
            f"attention: {describe('value', v)} must have as many keys (dimension -2) as {describe('key', k)}"
        )
    if not grouped:
        return
    if min(q.dim(), k.dim(), v.dim()) < 3:
        raise IndexError("attention: enable_gqa needs query, key and value of three dimensions or more")
    if k.shape[-3] != v.shape[-3] or (q.shape[-3] % k.shape[-3] if k.shape[-3] else q.shape[-3]):
        raise RuntimeError(
            f"attention: with enable_gqa the heads (dimension -3) of {describe('query', q)} must be a multiple of those of "
            f"{describe('key', k)} and {describe('value', v)}"
        )


def check_mask(mask: Tensor, q: Tensor, scores: tuple[int, ...]) -> None:
    if not isinstance(mask, Tensor):
        raise TypeError(
            f"attention: attn_mask must be a tensor, got {type(mask).__name__}; use torch.tensor(attn_mask)"
        )
    if mask.dtype not in (torch.bool, q.dtype, wide_dtype(q)):
        raise RuntimeError(
            f"attention: {describe('attn_mask', mask)} must be boolean (True = keep) or additive, in float32 or in the dtype of "
            f"{describe('query', q)}; convert it, e.g. attn_mask.to(query.dtype)"
        )
    if mask.device != q.device:
        raise RuntimeError(
            f"attention: {describe('attn_mask', mask)} must be on the device of {describe('query', q)}; move it with .to()"
        )
    try:
        mask.expand(scores)
    except RuntimeError:
        raise RuntimeError(
            f"attention: {describe('attn_mask', mask)} cannot be broadcast to the scores of shape {tuple(scores)}: give every "
            "dimension the score's size or 1, e.g. with attn_mask.unsqueeze()"
        ) from None


def check_slopes(slopes: Tensor, q: Tensor) -> None:
    if not isinstance(slopes, Tensor) or not slopes.is_floating_point():
        raise TypeError(f"attention: {describe('alibi_slopes', slopes)} must be a floating-point tensor")
    if slopes.requires_grad:
        raise RuntimeError(
            "attention: alibi_slopes get no gradient; detach them, or pass the bias as attn_mask, which does"
        )
    batch, heads = q.shape[:2]
    if (
        slopes.device != q.device
        or slopes.dim() not in (1, 2)
        or slopes.shape[-1] not in (1, heads)
        or (slopes.dim() == 2 and slopes.shape[0] not in (1, batch))
    ):
        raise RuntimeError(
            f"attention: {describe('alibi_slopes', slopes)} must be of shape (heads,) or (batch, heads) for "
            f"{describe('query', q)}"
        )


def check_packed(cu_seqlens: Any, q: Tensor, k: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The bounds along queries and keys. Their values are read by the kernels, and looked at here only where that costs no
    synchronization."""
    pair = cu_seqlens if isinstance(cu_seqlens, (tuple, list)) else (cu_seqlens, cu_seqlens)
    if len(pair) != 2:
        raise TypeError(
            f"attention: cu_seqlens must be a tensor or a pair of tensors (of queries, of keys), got {len(pair)} of them"
        )
    bounds_q, bounds_k = pair
    if bounds_q is None and bounds_k is None:
        return None, None
    if bounds_q is None or bounds_k is None:
        raise RuntimeError(
            "attention: cu_seqlens of queries and of keys are given together or not at all; pass one tensor for both if they are "
            "the same"
        )
    for bounds, length in ((bounds_q, q.shape[2]), (bounds_k, k.shape[2])):
        _check_bounds(bounds, length, q)
    if bounds_q.shape != bounds_k.shape:
        raise RuntimeError(
            "attention: cu_seqlens of queries and of keys must count the same sequences, got bounds of shape "
            f"{tuple(bounds_q.shape)} and {tuple(bounds_k.shape)}"
        )
    return bounds_q, bounds_k


def _check_bounds(bounds: Tensor, length: int, q: Tensor) -> None:
    if not isinstance(bounds, Tensor) or bounds.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"attention: {describe('cu_seqlens', bounds)} must be a tensor of int32 or int64")
    if bounds.dim() != 1 or not bounds.numel() or bounds.device != q.device:
        raise RuntimeError(
            f"attention: {describe('cu_seqlens', bounds)} must be of shape (sequences + 1,), on the device of "
            f"{describe('query', q)}"
        )
    if torch.compiler.is_compiling() or not bounds.is_cpu or not is_plain(bounds):
        return
    ends = bounds.tolist()
    if ends[0] != 0 or ends[-1] > length or any(b < a for a, b in itertools.pairwise(ends)):
        raise RuntimeError(
            f"attention: cu_seqlens must begin with 0, never fall and end at {length} at most, got {ends[:8]}"
            f"{'...' if len(ends) > 8 else ''}"
        )


def check_arguments(q: Tensor, k: Tensor, v: Tensor, given: Given, options: Options) -> None:
    """For raw calls, which no public function has checked, and for what saved-tensor hooks may have changed."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4 or x.dtype is not q.dtype or x.device != q.device:
            raise refused(
                f"{describe(name, x)} must have four dimensions, and the dtype and device of {describe('q', q)}"
            )
    check_random(q, given.seed, options.dropout_p)
    batch, heads, queries, width = q.shape
    if (
        k.shape[0] != batch
        or v.shape[:3] != k.shape[:3]
        or k.shape[3] != width
        or (heads % k.shape[1] if k.shape[1] else heads)
    ):
        raise refused(f"{describe('k', k)} and {describe('v', v)} do not fit {describe('q', q)}")
    if given.mask is not None:
        if given.mask.dim() != 4:
            raise refused(f"{describe('mask', given.mask)} must have four dimensions")
        check_mask(given.mask, q, (batch, heads, queries, k.shape[2]))
    if given.slopes is not None and (
        given.slopes.dtype is not wide_dtype(q)
        or given.slopes.dim() != 2
        or given.slopes.shape[0] not in (1, batch)
        or given.slopes.shape[1] not in (1, heads)
        or given.slopes.device != q.device
    ):
        raise refused(f"{describe('slopes', given.slopes)} do not fit {describe('q', q)}")
    check_packed((given.cu_seqlens_q, given.cu_seqlens_k), q, k)


def check_backward(grad: Tensor, q: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor) -> None:
    shape = (*q.shape[:3], v.shape[3])
    for name, x in (("grad", grad), ("out", out)):
        if x.shape != shape or not together(x, q) or x.dtype is not q.dtype:
            raise refused(f"{describe(name, x)} does not fit {describe('q', q)} and {describe('v', v)}")
    if logsumexp.shape != q.shape[:3] or logsumexp.dtype is not wide_dtype(q) or not together(logsumexp, q):
        raise refused(f"{describe('logsumexp', logsumexp)} is not that of {describe('q', q)}")
