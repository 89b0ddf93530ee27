"""torch.nn.functional with fused, recomputable versions of some functions; every other name is torch's own.

Replace ``import torch.nn.functional as F`` by ``import pyckpt.functional as F``.
"""

from typing import Any

import torch.nn.functional as _torch_functional

from .ops.activation import gelu, relu, silu
from .ops.attention import attention
from .ops.dropout import dropout
from .ops.norm import layer_norm, rms_norm
from .ops.softmax import softmax

__all__ = ["attention", "dropout", "gelu", "layer_norm", "relu", "rms_norm", "silu", "softmax"]


def __getattr__(name: str) -> Any:
    if not name.startswith("__") and hasattr(_torch_functional, name):
        return getattr(_torch_functional, name)
    raise AttributeError(
        f"module {__name__!r} has no attribute {name!r}, and neither has torch.nn.functional"
    )


def __dir__() -> list[str]:
    return sorted({*globals(), *dir(_torch_functional)})
