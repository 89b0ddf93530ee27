"""torch.nn with fused, recomputable versions of some layers; every other name is torch's own.

Replace ``from torch import nn`` by ``from pyckpt import nn``. Each class here is the torch.nn class of the same name, with its
constructor, attributes, state_dict and repr, and another forward.
"""

import sys
from typing import Any

import torch.nn as _torch_nn
from torch import Tensor

from . import functional
from . import functional as F

_OURS = ["GELU", "Dropout", "LayerNorm", "RMSNorm", "ReLU", "SiLU", "Softmax", "functional"]
__all__ = sorted({*_OURS, *(name for name in dir(_torch_nn) if not name.startswith("_"))})

# For `import pyckpt.nn.functional as F` and the like, as with torch.nn.
sys.modules[f"{__name__}.functional"] = functional
for _name in ("init", "modules", "parallel", "parameter", "utils"):
    sys.modules[f"{__name__}.{_name}"] = getattr(_torch_nn, _name)


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


def __getattr__(name: str) -> Any:
    if not name.startswith("__") and hasattr(_torch_nn, name):
        return getattr(_torch_nn, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}, and neither has torch.nn")


def __dir__() -> list[str]:
    return sorted({*globals(), *dir(_torch_nn)})
