"""Fused PyTorch layers that recompute cheap activations inside backward instead of storing them."""

from . import backends, checkpointing, functional, memory, nn
from .checkpointing import checkpoint, checkpoint_sequential, checkpoint_wrapper, plan, trial
from .conversion import convert, report, revert
from .engine import RecomputeError, recompute
from .explanation import explain
from .memory import assert_saved_bytes
from .monitoring import Monitor
from .rules import register_rule

__version__ = "0.1.0"

__all__ = [
    "Monitor",
    "RecomputeError",
    "__version__",
    "assert_saved_bytes",
    "backends",
    "checkpoint",
    "checkpoint_sequential",
    "checkpoint_wrapper",
    "checkpointing",
    "convert",
    "explain",
    "functional",
    "memory",
    "nn",
    "plan",
    "recompute",
    "register_rule",
    "report",
    "revert",
    "trial",
]
