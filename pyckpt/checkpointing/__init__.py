"""Recompute on a larger scale than single layers: segments, and plans that fit a budget."""

from .planning import BudgetError, Plan, Prediction, plan
from .segments import checkpoint, checkpoint_sequential, checkpoint_wrapper, unwrap
from .trials import TrialResult, trial

__all__ = [
    "BudgetError",
    "Plan",
    "Prediction",
    "TrialResult",
    "checkpoint",
    "checkpoint_sequential",
    "checkpoint_wrapper",
    "plan",
    "trial",
    "unwrap",
]
