"""Recompute on a larger scale than single layers: segments, and plans that fit a budget."""

from .planning import BudgetError, Plan, Prediction, plan
from .segments import checkpoint, checkpoint_sequential, checkpoint_wrapper, unwrap

__all__ = [
    "BudgetError",
    "Plan",
    "Prediction",
    "checkpoint",
    "checkpoint_sequential",
    "checkpoint_wrapper",
    "plan",
    "unwrap",
]
