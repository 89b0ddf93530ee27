"""pyckpt in Lightning."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

try:
    from lightning.pytorch.callbacks import Callback
except ImportError:
    from pytorch_lightning.callbacks import Callback

from .._levels import check_policy
from ..conversion import convert, revert
from ..engine import Policy
from ..monitoring import Monitor

__all__ = ["RecomputeCallback"]


class RecomputeCallback(Callback):
    """Converts the LightningModule before the strategy wraps it, and logs what the engine did through the module's loggers.

    ::

        Trainer(callbacks=[RecomputeCallback()]).fit(module, data)

    The recompute region is around the forwards of the module's children, as ``training_step`` calls those and not the module's
    own forward; of an ``nn.ModuleList`` or ``nn.ModuleDict``, which has none, around those of the modules in it.

    Args:
        policy: as for :func:`pyckpt.convert`'s `recompute`.
        keep: False: revert the module when fitting ends.
        monitor: log ``pyckpt/recomputed`` and the like, counted since the last batch that was logged.
    """

    def __init__(self, policy: str | Policy = "pointwise", *, keep: bool = True, monitor: bool = True):
        check_policy("RecomputeCallback", policy)
        self.policy, self.keep = policy, keep
        self.monitor = Monitor() if monitor else None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage == "fit":
            for part in _called(pl_module):
                convert(part, recompute=self.policy)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        if self.monitor is not None:
            self.monitor.start()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.monitor is not None and (trainer.global_step % max(trainer.log_every_n_steps, 1)) == 0:
            for name, value in self.monitor.log(trainer.global_step).items():
                pl_module.log(name, float(value), on_step=True, on_epoch=False)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        if self.monitor is not None:
            self.monitor.stop()
        if not self.keep:
            for part in _called(pl_module):
                revert(part)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        if self.monitor is not None:
            self.monitor.stop()


def _called(module: nn.Module) -> Iterator[nn.Module]:
    """The children; in place of those that cannot be called, as they have no forward, their own."""
    for child in module.children():
        if type(child).forward is nn.Module.forward:
            yield from _called(child)
        else:
            yield child
