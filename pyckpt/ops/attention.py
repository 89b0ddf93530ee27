"""Scaled dot-product attention whose probabilities are never stored.

Saved for backward: q, k, v, the output and one number a query, the logarithm of its sum of exponentials (and the mask as given).
Backward forms the probabilities again from these, block by block (Dao et al., FlashAttention, 2022), and dropout's mask from the
seed, which is an attribute of the node. The output is laid out as (batch, queries, heads, width), so that the merge of the heads
that follows is a view of it: what the output projection saves is then the same memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .. import backends
from ._attention_checks import (
    check_arguments,
    check_backward,
    check_mask,
    check_options,
    check_packed,
    check_slopes,
    check_tensors,
)
from ._attention_cpu import cpu_bwd, cpu_fwd
from ._attention_definition import (
    SCHEMA,
    Given,
    Options,
    expression,
    output_like,
    reference_bwd,
    reference_fwd,
    reference_weights,
    split,
    under_autocast,
    wide_dtype,
)
from ._registry import (
    DTYPES,
    Function,
    Op,
    by_torch,
    describe,
    dtype_problem,
    is_plain,
    is_sharded,
    lowered,
    needs_grad,
)
from .dropout import new_seed


def _fake_fwd(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return output_like(q, v), q.new_empty(q.shape[:-1], dtype=wide_dtype(q))


def _fake_bwd(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *rest: Any) -> Any:
    wanted = rest[-1]
    like = [torch.empty_like(x) for x in (q, k, v)]
    like.append(q.new_empty(0) if mask is None else mask.new_empty(mask.shape))
    return tuple(x if w else q.new_empty(0) for x, w in zip(like, wanted, strict=True))


attention_fwd = Op(
    f"attention_fwd({SCHEMA}) -> (Tensor, Tensor)",
    fake=_fake_fwd,
    reference=reference_fwd,
)
attention_bwd = Op(
    f"attention_bwd(Tensor grad, {SCHEMA}, Tensor out, Tensor logsumexp, bool[] wanted) -> (Tensor, Tensor, Tensor, Tensor)",
    fake=_fake_bwd,
    reference=reference_bwd,
)


class AttentionFunction(Function):
    """Saves q, k, v, the output, its logsumexp, and mask, slopes and sequence bounds as given (the seed is an attribute).

    Returns the output, or (output, logsumexp) for the raw op.
    """

    OUTPUT = 3  # index of the output among the saved tensors

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        given: Given,
        options: Options,
        with_logsumexp: bool = False,
    ) -> Any:
        arguments = (q, k, v, mask, *given[1:], *options)
        ctx.backend, ctx.options, ctx.seed = attention_fwd.backend_for(q, arguments), options, given.seed
        out, logsumexp = attention_fwd(ctx.backend, *arguments)
        ctx.save_for_backward(q, k, v, out, logsumexp, mask, *given[1:4])
        if not with_logsumexp:
            return out
        ctx.mark_non_differentiable(logsumexp)
        return out, logsumexp

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Any, ...]:
        q, k, v, out, logsumexp, *given = ctx.saved_tensors
        wanted = list(ctx.needs_input_grad[:4])
        arguments = (*given, ctx.seed, *ctx.options, out, logsumexp, wanted)
        gradients = attention_bwd.in_backward(ctx.backend, grad, q, k, v, *arguments)
        return *(g if w else None for g, w in zip(gradients, wanted, strict=True)), None, None, None

    @staticmethod
    def recompute(ctx: Any, out: Tensor) -> Tensor:
        """The output is kept: whoever saves it, or a view or copy of it, needs no memory of its own."""
        return out


def _apply(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    given, options = split(rest)
    return AttentionFunction.apply(q, k, v, given.mask, given, options, True)


def _bwd_guard(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> None:
    *arguments, out, logsumexp, _ = rest
    check_arguments(q, k, v, *split(arguments))
    check_backward(grad, q, v, out, logsumexp)


attention_fwd.differentiable(_apply)
attention_fwd.guard = lambda q, k, v, *rest: check_arguments(q, k, v, *split(rest))
attention_bwd.guard = _bwd_guard


def register(
    backend: str,
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    unserved: Callable[[Tensor, Tensor, Tensor, Given, Options], str] | None = None,
) -> None:
    """Lets these compute the ops on a backend. `unserved`: what they are not made for in a call; None: they serve all."""
    attention_fwd.kernel(backend)(forward)
    attention_bwd.kernel(backend)(backward)
    if unserved is not None:
        attention_fwd.partial[backend] = lambda q, k, v, *rest: unserved(q, k, v, *split(rest))
        attention_bwd.partial[backend] = lambda grad, q, k, v, *rest: unserved(q, k, v, *split(rest))


register("cpu", cpu_fwd, cpu_bwd)


def has_kernels(device: torch.device) -> bool:
    """Whether attention on `device` is more than plain PyTorch, whatever the call; of the meta device it is not known yet."""
    name = backends.select(device.type, attention_fwd.family)
    if name in attention_fwd.partial:
        name = backends.select(device.type, attention_fwd.family, without=name)
    return device.type == "meta" or (name != "reference" and name not in attention_fwd.partial)


def _sides(window: Any, is_causal: bool) -> tuple[int | None, int | None]:
    left, right = window if isinstance(window, (tuple, list)) else (window, window)
    return left, (0 if is_causal else right)


def _autocast(q: Tensor, *others: Any) -> tuple[Any, ...]:
    """What autocast does to the arguments of scaled_dot_product_attention: all to its dtype, but float64."""
    if not under_autocast(q):
        return q, *others
    dtype = torch.get_autocast_dtype(q.device.type)
    return tuple(
        x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64 else x
        for x in (q, *others)
    )


def _four_dimensional(x: Tensor, leading: torch.Size, grouped: bool) -> Tensor:
    """(batch, heads, n, m) of a tensor whose leading dimensions broadcast to `leading`, heads last among them."""
    heads = x.shape[-3] if x.dim() > 2 and grouped else leading[-1]
    x = x.expand(*leading[:-1], heads, *x.shape[-2:]) if x.shape[:-2] != (*leading[:-1], heads) else x
    return x if x.dim() == 4 else x.reshape(math.prod(leading[:-1]), heads, *x.shape[-2:])


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    softcap: float = 0.0,
    window: int | tuple[int | None, int | None] | None = None,
    causal_alignment: str = "top_left",
    alibi_slopes: Tensor | None = None,
    cu_seqlens: Tensor | tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """``softmax(scale * query @ key^T + attn_mask) @ value``, as :func:`torch.nn.functional.scaled_dot_product_attention`.

    Keeps query, key, value, the output and one float32 number per query for backward, with every option: no probabilities,
    no mask of dropout.

    Args:
        query: (..., heads, queries, width); float32, bfloat16, float16 or float64.
        key: (..., heads, keys, width), with the leading dimensions of `query`, or ones that broadcast to them.
        value: (..., heads, keys, value width).
        attn_mask: broadcastable to (..., heads, queries, keys); boolean (True = keep) or additive, of the query's dtype or
            float32. A query with nothing kept gives zeros and zero gradients (torch: NaN). Keys masked for every query may hold
            NaN or infinity. An additive mask that requires grad receives its gradient. May go with `is_causal` and `window`.
        dropout_p: probability of dropping a weight; see :func:`pyckpt.functional.dropout`. Pass 0 in evaluation.
        is_causal: query i sees keys up to i (see `causal_alignment`).
        scale: factor on the scores; None: ``1 / sqrt(width)``.
        enable_gqa: `key` and `value` may have fewer heads: each serves heads / kv heads adjacent heads of `query`.
        softcap: c > 0: scores become ``c * tanh(scale * score / c)`` before mask and bias (Gemma 2).
        window: keys that a query sees before and after its own place: (left, right), None for all; n stands for (n, n).
        causal_alignment: where a query stands if there are more or fewer keys: "top_left": query i at key i, as torch's
            is_causal; "bottom_right": the last query at the last key. Also for `window` and `alibi_slopes`.
        alibi_slopes: (heads,) or (batch, heads); adds ``-slope * distance`` to the scores (Press et al., ALiBi, 2022).
        cu_seqlens: packed sequences of different lengths: bounds (0, end of the first, ...), int32 or int64, along queries and
            keys, or a pair of such tensors, one for each. Each sequence sees itself only, with places counted from its beginning.
            Rows behind the last bound give zeros.

    Returns:
        (..., heads, queries, value width), heads beside each other in memory: ``out.transpose(-3, -2).flatten(-2)`` is a view.

    Raises:
        RuntimeError: shapes, dtypes or devices that do not fit; IndexError: enable_gqa without heads; ValueError, TypeError:
            options out of range.
    """
    if not isinstance(query, Tensor) or not isinstance(key, Tensor) or not isinstance(value, Tensor):
        return F.scaled_dot_product_attention(query, key, value)  # torch's TypeError
    check_options(dropout_p, is_causal, scale, enable_gqa, softcap, window, causal_alignment)
    extended = softcap or window is not None or alibi_slopes is not None or cu_seqlens is not None
    extended = extended or causal_alignment != "top_left" or (attn_mask is not None and is_causal)
    nested = query.is_nested or key.is_nested or value.is_nested
    if not extended and (query.dtype not in DTYPES or nested or is_sharded(query)):
        return by_torch(
            dtype_problem("attention", query),
            F.scaled_dot_product_attention,
            *(query, key, value, attn_mask, dropout_p, is_causal),
            scale=scale,
            enable_gqa=enable_gqa,
        )
    query, key, value, attn_mask = _autocast(query, key, value, attn_mask)
    if query.dtype not in DTYPES:
        raise RuntimeError(dtype_problem("attention", query))
    check_tensors(query, key, value, enable_gqa)
    shapes = [x.shape[: -3 if enable_gqa else -2] for x in (query, key, value)]
    try:
        leading = shapes[0] if shapes[0] == shapes[1] == shapes[2] else torch.broadcast_shapes(*shapes)
    except RuntimeError:
        raise RuntimeError(
            f"attention: the leading dimensions of {describe('query', query)}, {describe('key', key)} and "
            f"{describe('value', value)} do not broadcast; for fewer key heads use enable_gqa=True"
        ) from None
    leading = leading + query.shape[-3:-2] if enable_gqa else leading
    if not leading:
        leading = torch.Size((1,))
    scores = (*leading, query.shape[-2], key.shape[-2])
    squeezed = max(query.dim(), key.dim(), value.dim()) == 2
    if attn_mask is not None:
        if isinstance(attn_mask, Tensor) and attn_mask.dtype == torch.float32:
            attn_mask = attn_mask.to(wide_dtype(query))
        check_mask(attn_mask, query, scores[1:] if squeezed else scores)
        if attn_mask.dim() > 4 or (len(leading) > 2 and attn_mask.dim() == 4 and attn_mask.shape[0] != 1):
            attn_mask = attn_mask.expand(scores).reshape(-1, *scores[-3:])
        else:
            attn_mask = attn_mask.reshape(*[1] * (4 - attn_mask.dim()), *attn_mask.shape)
    q, k, v = (_four_dimensional(x, leading, enable_gqa) for x in (query, key, value))
    slopes = None
    if alibi_slopes is not None:
        check_slopes(alibi_slopes, q)
        slopes = alibi_slopes.to(wide_dtype(q)).reshape(-1, alibi_slopes.shape[-1])
    bounds_q, bounds_k = check_packed(cu_seqlens, q, k)
    given = Given(attn_mask, slopes, bounds_q, bounds_k, new_seed(q.device) if dropout_p > 0 else None)
    left, right = _sides(window, is_causal)
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None and q.shape[-1] else 1.0 if scale is None else scale
    options = Options(
        float(factor), left, right, causal_alignment == "bottom_right", float(softcap), float(dropout_p)
    )
    out = _attention(q, k, v, given, options)
    if squeezed:
        return out.reshape(out.shape[-2:])
    return out if leading == out.shape[:2] else out.unflatten(0, leading[:-1]) if len(leading) > 1 else out[0]


def _attention(q: Tensor, k: Tensor, v: Tensor, given: Given, options: Options) -> Tensor:
    tensors = [x for x in (k, v, *given) if x is not None]
    if not lowered(q) and all(is_plain(x) for x in tensors):
        if needs_grad(q, k, v, given.mask):
            return AttentionFunction.apply(q, k, v, given.mask, given, options)
        arguments = (q, k, v, *given, *options)
        return attention_fwd(attention_fwd.backend_for(q, arguments), *arguments)[0]
    if torch.compiler.is_compiling() and not torch.compiler.is_exporting():
        # One opaque op: as a plain expression a compiled model would keep the probabilities.
        return attention_fwd.overload(q, k, v, *given, *options)[0]
    return expression(q, k, v, given, options)


def attention_with_weights(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    scale: float,
    is_causal: bool = False,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """(output, weights after dropout) for operands of four dimensions. The weights are computed by a second pass, and again in
    its backward: they live as long as the caller holds them."""
    check_options(dropout_p, is_causal, scale, False, softcap, None, "top_left")
    given = Given(mask, seed=new_seed(q.device) if dropout_p > 0 else None)
    options = Options(scale, right=0 if is_causal else None, softcap=softcap, dropout_p=dropout_p)
    out = _attention(q, k, v, given, options)

    def weights(q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
        return reference_weights(q, k, given._replace(mask=mask), options)

    if lowered(q) or not needs_grad(q, k, mask):
        return out, weights(q, k, mask)
    return out, checkpoint(weights, q, k, mask, use_reentrant=False, preserve_rng_state=False)
