"""Fused PyTorch layers that recompute cheap activations inside backward instead of storing them."""

from . import backends, functional, memory, nn
from .conversion import convert, report, revert

__version__ = "0.1.0"

__all__ = ["__version__", "backends", "convert", "functional", "memory", "nn", "report", "revert"]
