"""Counts of what the engine does while a model trains, for logs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from ._records import Source, watchers

__all__ = ["Counts", "Monitor"]

logger = logging.getLogger("pyckpt")


@dataclass
class Counts:
    """Attributes:
    recomputed, recomputed_bytes: tensors rebuilt in backward, and their bytes.
    kept, kept_bytes: tensors that the engine was asked for and kept, as it has no way to rebuild them.
    seconds: that rebuilding took, by the host's clock (on CUDA: until its kernels were launched).
    """

    recomputed: int = 0
    recomputed_bytes: int = 0
    kept: int = 0
    kept_bytes: int = 0
    seconds: float = 0.0


class Monitor:
    """Context manager: counts what recompute regions do inside, in all threads.

    ::

        with pyckpt.Monitor(write=lambda values, step: writer.add_scalars("train", values, step)) as monitor:
            for step, batch in enumerate(batches):
                ...
                monitor.log(step)

    Args:
        write: is given ``{"pyckpt/recomputed": ..., ...}`` and the step by :meth:`log`: a TensorBoard writer's or W&B's
            function. The logger "pyckpt" gets the values in any case, at level INFO.

    Attributes:
        counts: since the beginning, or the last :meth:`log`.
        total: since the beginning.
    """

    def __init__(self, write: Callable[[dict[str, float], int], Any] | None = None):
        self.write = write
        self.counts, self.total = Counts(), Counts()
        self._lock = threading.Lock()

    def start(self) -> Monitor:
        """For use without ``with``. Once it has started, nothing more."""
        with self._lock:
            if self not in watchers:
                watchers.append(self)
        return self

    def stop(self) -> None:
        """Undoes :meth:`start`. Without that, nothing."""
        with self._lock:
            if self in watchers:
                watchers.remove(self)

    __enter__ = start

    def __exit__(self, *_: Any) -> None:
        self.stop()

    def log(self, step: int) -> dict[str, float]:
        """Log and return the counts since the last time."""
        with self._lock:
            counts, self.counts = self.counts, Counts()
        values = {f"pyckpt/{field.name}": getattr(counts, field.name) for field in fields(counts)}
        logger.info("step %d: %s", step, ", ".join(f"{name} {value:g}" for name, value in values.items()))
        if self.write is not None:
            self.write(values, step)
        return values

    def rebuilt(self, source: Source, size: int, seconds: float) -> None:
        with self._lock:
            for counts in (self.counts, self.total):
                counts.recomputed += 1
                counts.recomputed_bytes += size
                counts.seconds += seconds

    def fell_back(self, size: int) -> None:
        with self._lock:
            for counts in (self.counts, self.total):
                counts.kept += 1
                counts.kept_bytes += size
