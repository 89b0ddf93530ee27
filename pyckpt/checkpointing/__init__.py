"""Recompute on a larger scale than single layers: segments."""

from .segments import checkpoint, checkpoint_sequential, checkpoint_wrapper, unwrap

__all__ = ["checkpoint", "checkpoint_sequential", "checkpoint_wrapper", "unwrap"]
