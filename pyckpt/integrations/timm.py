"""timm: the modules with a ``fused_attn`` switch (``Attention``, and those of Swin, BEiT, EVA, MaxViT...).

:func:`pyckpt.convert` turns the switch on, and there pyckpt's attention serves the calls for which torch's
scaled_dot_product_attention would store the weights: with dropout, or with a mask that requires grad (a learned bias of relative
positions). Both branches of such a module compute the same function by timm's own account; masks of dropout differ.
"""

from __future__ import annotations

import functools
import types
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._targets import describe, instance_obstacle
from ..ops.attention import attention, has_kernels

SETTING = "fused_attn"

_MARK = "_pyckpt_fused_attn"  # on a converted module: its class and its switch before


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """torch's function; by :func:`pyckpt.functional.attention` where torch's would keep the weights for backward."""
    traced = torch.overrides.has_torch_function((query, key, value))
    learned = attn_mask is not None and not traced and attn_mask.requires_grad and torch.is_grad_enabled()
    function = attention if not traced and (dropout_p > 0 or learned) else F.scaled_dot_product_attention
    return function(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


class _Instead:
    """A module of which some names mean something else."""

    def __init__(self, module: types.ModuleType, **names: Any) -> None:
        vars(self).update(names, _module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_module"], name)


_functional = _Instead(F, scaled_dot_product_attention=scaled_dot_product_attention)
_nn = _Instead(nn, functional=_functional)
# However a method spells it: F.name, nn.functional.name, torch.nn.functional.name, or the name alone.
_NAMES: dict[int, Any] = {
    id(F): _functional,
    id(nn): _nn,
    id(torch): _Instead(torch, nn=_nn),
    id(F.scaled_dot_product_attention): scaled_dot_product_attention,
}


def _calls(function: Any) -> bool:
    return (
        isinstance(function, types.FunctionType)
        and "scaled_dot_product_attention" in function.__code__.co_names
    )


def _served(function: types.FunctionType) -> types.FunctionType:
    """The same code, in which scaled_dot_product_attention is the one above."""
    names = {name: _NAMES.get(id(value), value) for name, value in function.__globals__.items()}
    copy = types.FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, function.__closure__
    )
    functools.update_wrapper(copy, function)
    return copy


@functools.cache
def _class_of(original: Any) -> type[nn.Module] | None:
    """A subclass that attends by pyckpt; None where no method of timm's calls scaled_dot_product_attention."""
    methods = {
        name: method
        for cls in reversed(original.__mro__)
        if cls.__module__.startswith("timm.")
        for name, method in vars(cls).items()
    }
    served = {name: _served(method) for name, method in methods.items() if _calls(method)}
    if not served:
        return None

    def reduce(self: nn.Module, protocol: Any) -> Any:
        # By the class that timm has: this one is made where it is needed, and no name leads to it.
        _, _, *rest = original.__reduce_ex__(self, protocol)
        return _empty, (original,), *rest

    names = {
        **served,
        "__reduce_ex__": reduce,
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
    }
    made = type(original.__name__, (original,), names)
    return made


def _empty(original: Any) -> nn.Module:
    cls = _class_of(original) or original
    return cls.__new__(cls)


def convert_attention(root: nn.Module) -> None:
    """Turns the switch on in each module that lies where attention has kernels for every call, unless others have changed it."""
    for module in root.modules():
        cls: Any = type(module)
        state = vars(module)
        if (
            not isinstance(state.get(SETTING), bool)
            or not cls.__module__.startswith("timm.")
            or _MARK in state
        ):
            continue
        device = next((p.device for p in module.parameters()), torch.device("cpu"))
        made = _class_of(cls) if not instance_obstacle(module) and has_kernels(device) else None
        if made is not None:
            state[_MARK] = (cls, state[SETTING])
            state[SETTING] = True
            module.__class__ = made


def revert_attention(root: nn.Module) -> dict[str, str]:
    """Undoes it. What of it was changed since, and therefore stays, by path."""
    changed = {}
    for path, module in root.named_modules():
        if _MARK not in vars(module):
            continue
        original, switch = vars(module)[_MARK]
        if type(module) is not _class_of(original):
            changed[path] = f"became a {describe(type(module))}"
            continue
        module.__class__ = original
        vars(module)[SETTING] = switch
        del vars(module)[_MARK]
    return changed


def converted_attention(root: nn.Module) -> dict[str, str]:
    """Path of a converted module -> what it ran before."""
    before = {False: "weights stored", True: "scaled_dot_product_attention"}
    return {
        path: before[vars(module)[_MARK][1]] for path, module in root.named_modules() if _MARK in vars(module)
    }
