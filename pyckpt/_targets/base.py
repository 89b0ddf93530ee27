"""What a module may become, how classes are named in reports, and how a refusal is said."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from .. import nn as fused

TORCH_CLASSES: dict[type[nn.Module], type[nn.Module]] = {
    nn.GELU: fused.GELU,
    nn.SiLU: fused.SiLU,
    nn.ReLU: fused.ReLU,
    nn.LayerNorm: fused.LayerNorm,
    nn.RMSNorm: fused.RMSNorm,
    nn.Dropout: fused.Dropout,
    nn.Softmax: fused.Softmax,
    nn.MultiheadAttention: fused.MultiheadAttention,
}
CONVERTED_CLASSES = frozenset({fused.ConvertedNorm, fused.ConvertedLayerNorm})
FUSED_CLASSES = CONVERTED_CLASSES.union(TORCH_CLASSES.values())


@dataclass(frozen=True)
class Target:
    """What a module becomes: its new class and the attributes that go with it, and a remark for the report.

    Attributes that the module lacks are added; one that it has is replaced only where the class stays.
    """

    cls: type[nn.Module]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True)
class Proof:
    """A target, and how far the two functions are apart by the measure of whoever compared them."""

    target: Target
    error: float = 0.0


class Unprovable(Exception):
    """Carries the reason why a class cannot be shown to compute one of our functions."""


def describe(cls: type) -> str:
    """``nn.GELU`` for torch's own layers, ``pyckpt.nn.GELU`` for ours, the full dotted name for others."""
    if cls in FUSED_CLASSES:
        return f"pyckpt.nn.{cls.__name__}"
    if getattr(nn, cls.__name__, None) is cls:
        return f"nn.{cls.__name__}"
    return f"{cls.__module__}.{cls.__qualname__}"
