"""What torch.utils.checkpoint leaves to its users: running statistics that a replay would move a second time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase


def modules_in(value: Any, depth: int = 3) -> Iterator[nn.Module]:
    """The modules that a callable is known to run: itself, its owner, its closure, its bound arguments."""
    if isinstance(value, nn.Module):
        yield value
        return
    if depth == 0:
        return
    parts: Iterable[Any] = ()
    if isinstance(value, functools.partial):
        parts = (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, (list, tuple)):
        parts = value
    elif isinstance(value, dict):
        parts = value.values()
    elif callable(value):
        parts = [getattr(value, "__self__", None), *_cells(value)]
    for part in parts:
        yield from modules_in(part, depth - 1)


def _cells(function: Any) -> Iterator[Any]:
    for cell in getattr(function, "__closure__", None) or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not assigned yet
            continue


@contextmanager
def statistics_kept(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, norms that track statistics move copies of them."""
    swapped: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    seen: set[int] = set()
    for root in modules:
        for module in root.modules():
            if isinstance(module, _NormBase) and module.training and id(module) not in seen:
                seen.add(id(module))
                for name, buffer in module._buffers.items():
                    if buffer is not None:
                        swapped.append((module._buffers, name, buffer))
    for buffers, name, buffer in swapped:
        buffers[name] = buffer.clone()
    try:
        yield
    finally:
        for buffers, name, buffer in swapped:
            buffers[name] = buffer


def once(function: Callable[..., Any], modules: Iterable[nn.Module]) -> Callable[..., Any]:
    """`function`, whose second and later runs (a checkpoint's replays) leave statistics as they are."""
    roots = list(modules)
    ran = False

    def run(*values: Any) -> Any:
        nonlocal ran
        if not ran:
            ran = True
            return function(*values)
        with statistics_kept(roots):
            return function(*values)

    return run
