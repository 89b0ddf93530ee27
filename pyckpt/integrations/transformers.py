"""Hugging Face transformers: ``attn_implementation="pyckpt"``.

Importing this module registers it. :func:`pyckpt.convert` sets it on models that store attention weights: eager attention, and
scaled_dot_product_attention with dropout, if they lie where attention has kernels for every call. Masks are those of "sdpa":
boolean, or None where the kernel's own causal limit does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

from ..ops.attention import attention, attention_with_weights, has_kernels

try:
    from transformers.utils.output_capturing import _active_collector
except ImportError:  # a version that tells
    _active_collector = None

NAME = "pyckpt"
SETTING = "config.attn_implementation"
_MARK = "_pyckpt_attention"  # on a converted model: its implementations before, as set_attn_implementation takes them


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """An attention function as transformers calls it: (output of shape (batch, queries, heads, width), weights or None).

    Weights are given for ``output_attentions=True``, by a second pass. Key heads are not repeated. A window arrives as a mask.

    Raises:
        ValueError: attention sinks (``s_aux``), which "eager" has.
    """
    if kwargs.get("s_aux") is not None:
        raise ValueError("attn_implementation='pyckpt' has no attention sinks (s_aux); use 'eager'")
    queries, keys = query.shape[2], key.shape[2]
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    causal = bool(is_causal) and queries > 1 and attention_mask is None
    mask = attention_mask
    if mask is not None:
        mask = mask[..., :keys]
        mask = mask if mask.dtype == torch.bool else mask.to(query.dtype)
    if position_bias is not None:
        bias = position_bias[..., :keys].to(query.dtype)
        if mask is not None:
            bias = bias.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else bias + mask
        mask = bias
    cap = softcap or 0.0
    grouped = key.shape[1] != query.shape[1]
    weights = None
    if kwargs.get("output_attentions") or _weights_are_collected():
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        out, weights = attention_with_weights(query, key, value, mask, dropout, scale, causal, cap)
    else:
        out = attention(query, key, value, mask, dropout, causal, scaling, grouped, softcap=cap)
    return out.transpose(1, 2).contiguous(), weights


def _weights_are_collected() -> bool:
    """Models collect weights for ``output_attentions=True`` by hooks, and not all tell their attention of it."""
    collected = _active_collector.get() if _active_collector else None
    return any("attentions" in name for name in collected or ())


AttentionInterface.register(NAME, attention_forward)
AttentionMaskInterface.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


_DROPOUTS = (
    "attention_probs_dropout_prob",
    "attention_dropout",
    "attn_pdrop",
    "attn_dropout",
    "dropout_rate",
)


def _configurations(config: Any) -> Iterator[tuple[str, Any]]:
    yield "", config
    for name in getattr(config, "sub_configs", {}):
        if (inner := getattr(config, name, None)) is not None:
            yield name, inner


def _stores_weights(config: Any) -> bool:
    implementation = config._attn_implementation
    dropout = max((float(getattr(config, name, None) or 0.0) for name in _DROPOUTS), default=0.0)
    return implementation in (None, "eager") or (implementation == "sdpa" and dropout > 0)


def _models(root: nn.Module) -> Iterator[nn.Module]:
    """The outermost models of transformers in `root` whose attention can be chosen and is served here: no attention sinks."""
    from transformers import PreTrainedModel

    within: list[str] = []
    for path, module in root.named_modules():
        if any(path.startswith(prefix) for prefix in within):
            continue
        if isinstance(module, PreTrainedModel):
            within.append(f"{path}." if path else "")
            served = module._supports_sdpa or getattr(module, "_supports_attention_backend", False)
            sinks = any(name.rpartition(".")[2] == "sinks" for name, _ in module.named_parameters())
            if served and not sinks and type(module)._can_set_attn_implementation():
                yield module


def convert_attention(root: nn.Module) -> None:
    """Sets ``attn_implementation="pyckpt"`` where weights would be stored and the model's device has kernels, and remembers what
    it was. (Elsewhere attention would be plain PyTorch, and torch's own may well store less there.)"""
    for model in _models(root):
        config: Any = model.config
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        if not has_kernels(device):
            continue
        if getattr(config, "output_attentions", False) or _MARK in vars(model):
            continue
        parts = dict(_configurations(config))
        change = {name: NAME for name, part in parts.items() if _stores_weights(part)}
        if not change:
            continue
        before = {name: part._attn_implementation or "eager" for name, part in parts.items()}
        model.set_attn_implementation({**before, **change})  # type: ignore[operator]
        vars(model)[_MARK] = before


def revert_attention(root: nn.Module) -> dict[str, str]:
    """Undoes it. What of it was changed since, and therefore stays, by path: nothing here."""
    for model in _models(root):
        before = vars(model).pop(_MARK, None)
        if before is not None:
            model.set_attn_implementation(before)  # type: ignore[operator]
    return {}


def converted_attention(root: nn.Module) -> dict[str, str]:
    """Path of a converted model -> what its attention was."""
    found = {}
    for path, module in root.named_modules():
        before = vars(module).get(_MARK)
        if before is not None:
            found[path] = ", ".join(sorted(set(before.values()) - {NAME}))
    return found
