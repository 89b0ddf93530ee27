"""``torch.autocast`` while blocks are measured: its 16-bit copies of weights shall be there when they are in a training step.

Autocast caches them until the outermost context ends, which in training is where the forward does; autograd may keep them longer.
But blocks are measured within the caller's context, in forwards that shall know nothing of each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Autocast:
    """A state of it, for one type of devices."""

    device: str
    enabled: bool
    dtype: torch.dtype

    @classmethod
    def now(cls, device: str) -> Autocast:
        return cls(device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))

    @contextmanager
    def forward(self) -> Iterator[None]:
        """A context of this state that begins without copies, also within another, which then holds those that were made."""
        torch.clear_autocast_cache()
        with torch.autocast(self.device, self.dtype, enabled=self.enabled):
            yield


@contextmanager
def outside(device: str) -> Iterator[None]:
    """As outside all contexts, where backward runs and from which no context holds copies."""
    enabled = torch.is_autocast_enabled(device)
    depth = torch.autocast_increment_nesting()
    for _ in range(depth):
        torch.autocast_decrement_nesting()
    torch.set_autocast_enabled(device, False)
    try:
        yield
    finally:
        torch.clear_autocast_cache()
        torch.set_autocast_enabled(device, enabled)
        for _ in range(depth - 1):
            torch.autocast_increment_nesting()
