"""pyckpt in Hugging Face's Trainer. Accelerate needs nothing of its own: convert the model before ``accelerator.prepare``."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from .._levels import check_policy
from ..conversion import convert, revert
from ..engine import Policy
from ..monitoring import Monitor

__all__ = ["RecomputeCallback", "attach"]


class RecomputeCallback(TrainerCallback):
    """Converts the Trainer's model, and adds what the engine did to each log.

    ::

        Trainer(model, arguments, train_dataset=data, callbacks=[RecomputeCallback()]).train()

    The model is converted before the Trainer wraps it (in DDP, FSDP, a compiler).
    ``gradient_checkpointing=True`` composes: inside its segments the engine keeps the cheap set.

    A Trainer calls its loggers (TensorBoard, W&B...) before callbacks that are given to it; :func:`attach` puts this one first,
    so that they get the values as well.

    Args:
        policy: as for :func:`pyckpt.convert`'s `recompute`.
        keep: False: revert the model when training ends.
        monitor: add ``pyckpt/recomputed``, ``pyckpt/recomputed_bytes``, ``pyckpt/kept``, ``pyckpt/kept_bytes`` and
            ``pyckpt/seconds`` to the logs, counted since the last.
    """

    def __init__(self, policy: str | Policy = "pointwise", *, keep: bool = True, monitor: bool = True):
        check_policy("RecomputeCallback", policy)
        self.policy, self.keep = policy, keep
        self.monitor = Monitor() if monitor else None

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if model is not None:
            convert(model, recompute=self.policy)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.on_init_end(args, state, control, model)  # of a callback that was added later
        if self.monitor is not None:
            self.monitor.start()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if self.monitor is None or logs is None or "loss" not in logs:
            return
        logs.update(self.monitor.log(state.global_step))
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(logs)

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if self.monitor is not None:
            self.monitor.stop()
        if not self.keep and model is not None:
            revert(model)


def attach(trainer: Any, policy: str | Policy = "pointwise", **options: Any) -> RecomputeCallback:
    """Give a Trainer a :class:`RecomputeCallback`, in front of its loggers, and convert its model; returns the callback.

    Args:
        trainer: ``transformers.Trainer`` or a subclass.
        policy, options: of the callback.
    """
    callback = RecomputeCallback(policy, **options)
    convert(trainer.model, recompute=policy)
    trainer.callback_handler.callbacks.insert(0, callback)
    return callback
