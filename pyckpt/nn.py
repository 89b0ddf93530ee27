"""torch.nn with fused, recomputable versions of some layers; every other name is torch's own.

Replace ``from torch import nn`` by ``from pyckpt import nn``. Each class here is the torch.nn class of the same name, with its
constructor, attributes, state_dict and repr, and another forward.
"""

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn as _torch_nn
from torch import Tensor

from . import functional
from . import functional as F
from ._multihead import MultiheadAttention

_OURS = [
    "GELU",
    "Dropout",
    "LayerNorm",
    "MultiheadAttention",
    "RMSNorm",
    "ReLU",
    "SiLU",
    "Softmax",
    "functional",
]
__all__ = sorted({*_OURS, *(name for name in dir(_torch_nn) if not name.startswith("_"))})

# For `import pyckpt.nn.functional as F` and the like, as with torch.nn.
sys.modules[f"{__name__}.functional"] = functional
for _name in ("init", "modules", "parallel", "parameter", "utils"):
    sys.modules[f"{__name__}.{_name}"] = getattr(_torch_nn, _name)


MultiheadAttention.__module__ = __name__  # where pickles look for it


class GELU(_torch_nn.GELU):
    """:class:`torch.nn.GELU` through :func:`pyckpt.functional.gelu`."""

    def forward(self, input: Tensor) -> Tensor:
        return F.gelu(input, approximate=self.approximate)


class SiLU(_torch_nn.SiLU):
    """:class:`torch.nn.SiLU` through :func:`pyckpt.functional.silu`."""

    def forward(self, input: Tensor) -> Tensor:
        return F.silu(input, inplace=self.inplace)


class ReLU(_torch_nn.ReLU):
    """:class:`torch.nn.ReLU` through :func:`pyckpt.functional.relu`."""

    def forward(self, input: Tensor) -> Tensor:
        return F.relu(input, inplace=self.inplace)


class LayerNorm(_torch_nn.LayerNorm):
    """:class:`torch.nn.LayerNorm` through :func:`pyckpt.functional.layer_norm`."""

    def forward(self, input: Tensor) -> Tensor:
        return F.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


class RMSNorm(_torch_nn.RMSNorm):
    """:class:`torch.nn.RMSNorm` through :func:`pyckpt.functional.rms_norm`."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight, self.eps)


class Dropout(_torch_nn.Dropout):
    """:class:`torch.nn.Dropout` through :func:`pyckpt.functional.dropout`: keeps a seed, not a mask."""

    def forward(self, input: Tensor) -> Tensor:
        return F.dropout(input, self.p, self.training, self.inplace)


class Softmax(_torch_nn.Softmax):
    """:class:`torch.nn.Softmax` through :func:`pyckpt.functional.softmax`."""

    def forward(self, input: Tensor) -> Tensor:
        return F.softmax(input, self.dim)


class NormRecipe(NamedTuple):
    """How a :class:`ConvertedNorm` computes ``normalise(x) * (offset + weight) + bias``.

    ``weight``, ``bias`` and ``eps`` are names of attributes, read at each call; ``eps`` may be a number.
    """

    function: str  # "layer_norm" or "rms_norm"
    eps: str | float
    weight: str | None = None
    bias: str | None = None
    offset: float = 0.0
    shape: tuple[int, ...] | None = None  # None: the last dimension, whatever its size
    channels_first: bool = False  # normalise dimension 1 instead of the last ones
    rank: int | None = None  # the number of dimensions that an input must have
    # Of the result: "native" as the function itself gives it, "input", "promoted" (of input and weight), "weight" (where
    # that has 16 bits, else promoted).
    dtype: str = "native"

    def result_dtype(self, input: torch.dtype, weight: torch.dtype) -> torch.dtype:
        """The dtype of the result for those of input and weight (of the input, where there is no weight)."""
        if self.dtype == "input":
            return input
        if self.dtype == "weight" and weight.itemsize == 2:
            return weight
        return torch.promote_types(input, weight)


class ConvertedNorm(_torch_nn.Module):
    """A norm of another library after :func:`pyckpt.convert`, which alone makes these: with the parameters and attributes it
    had, through :func:`pyckpt.functional.rms_norm` or :func:`~pyckpt.functional.layer_norm`."""

    _pyckpt_norm: NormRecipe

    def forward(self, input: Tensor) -> Tensor:
        recipe = self._pyckpt_norm
        weight, bias = [
            None if name is None else getattr(self, name) for name in (recipe.weight, recipe.bias)
        ]
        eps = getattr(self, recipe.eps) if isinstance(recipe.eps, str) else recipe.eps
        if recipe.rank not in (None, input.dim()):
            raise RuntimeError(
                f"expected an input of {recipe.rank} dimensions, got one of shape {tuple(input.shape)}"
            )
        x = input.movedim(1, -1) if recipe.channels_first else input
        result = x.dtype
        if recipe.dtype != "native":  # rounded once, at the end
            result = recipe.result_dtype(x.dtype, x.dtype if weight is None else weight.dtype)
            x = x.to(torch.promote_types(x.dtype, result))
            if recipe.offset or any(p is not None and p.dtype != x.dtype for p in (weight, bias)):
                wide = torch.promote_types(x.dtype, torch.float32)
                weight, bias = [None if p is None else p.to(wide) for p in (weight, bias)]
        if recipe.offset and weight is not None:
            weight = weight + recipe.offset
        shape: Sequence[int] = x.shape[-1:] if recipe.shape is None else recipe.shape
        rms = recipe.function == "rms_norm"
        y = F.rms_norm(x, shape, weight, eps) if rms else F.layer_norm(x, shape, weight, bias, eps)
        y = y if recipe.dtype == "native" else y.to(result)
        return y.movedim(-1, 1) if recipe.channels_first else y

    def reset_parameters(self) -> None:
        recipe = self._pyckpt_norm
        if recipe.weight is not None:
            _torch_nn.init.constant_(getattr(self, recipe.weight), 1.0 - recipe.offset)
        if recipe.bias is not None:
            _torch_nn.init.zeros_(getattr(self, recipe.bias))

    def extra_repr(self) -> str:
        recipe = self._pyckpt_norm
        eps = getattr(self, recipe.eps) if isinstance(recipe.eps, str) else recipe.eps
        return f"{recipe.function}, {recipe.shape}, eps={eps}"


class ConvertedLayerNorm(_torch_nn.LayerNorm):
    """:class:`ConvertedNorm` for subclasses of :class:`torch.nn.LayerNorm`: it is one still."""

    _pyckpt_norm: NormRecipe
    forward = ConvertedNorm.forward


def __getattr__(name: str) -> Any:
    if not name.startswith("__") and hasattr(_torch_nn, name):
        return getattr(_torch_nn, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}, and neither has torch.nn")


def __dir__() -> list[str]:
    return sorted({*globals(), *dir(_torch_nn)})
