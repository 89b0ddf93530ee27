"""What the engine's hooks cost: microseconds for each tensor that autograd saves, on models too small for arithmetic.

Three ways in turn, one thread, the least of many rounds: without hooks; with hooks that hand the tensor through, which
is what any saved-tensor hook in Python costs; with the engine. Tensors of 512 bytes the engine keeps at its first
test; of those of 2 KiB it makes recipes, and backward's figure then holds the recomputation itself.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import pyckpt
from pyckpt.memory import no_collection

from . import _report

HIDDEN, DEPTH = 64, 8
#: Rows of the input, by what the engine does with tensors of that size.
MODELS = {"kept": 2, "recomputed": 8}
#: Aim for forward and backward together, engine against no hooks.
AIM_US = 2.5
_WAYS: dict[str, Callable[[], Any]] = {
    "none": contextlib.nullcontext,
    "identity": lambda: saved_tensors_hooks(lambda t: t, lambda t: t),
    "engine": pyckpt.recompute,
}


def _model() -> nn.Module:
    torch.manual_seed(0)
    layers = [
        layer
        for _ in range(DEPTH)
        for layer in (nn.Linear(HIDDEN, HIDDEN), nn.GELU(approximate="tanh"), nn.LayerNorm(HIDDEN))
    ]
    return nn.Sequential(*layers)


def _saved(model: nn.Module, x: Tensor) -> int:
    """How many tensors a forward saves, which is how often a hook is called."""
    seen: list[tuple[int, ...]] = []
    with saved_tensors_hooks(lambda t: seen.append(t.shape) or t, lambda t: t):
        model(x)
    return len(seen)


def _round(model: nn.Module, x: Tensor, grad_output: Tensor, way: Callable[[], Any]) -> tuple[float, float]:
    """Microseconds of a forward, and of forward and backward."""
    start = time.perf_counter()
    with way():
        output = model(x)
    middle = time.perf_counter()
    torch.autograd.grad(output, list(model.parameters()), grad_output)
    return (middle - start) * 1e6, (time.perf_counter() - start) * 1e6


def measure(rounds: int) -> list[dict[str, Any]]:
    """For each of `MODELS`: least times, and what identity hooks and the engine add for each saved tensor."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with no_collection():
            return [_measure(name, size, rounds) for name, size in MODELS.items()]
    finally:
        torch.set_num_threads(threads)


def _measure(name: str, size: int, rounds: int) -> dict[str, Any]:
    model, x = _model(), torch.randn(size, HIDDEN)
    grad_output = torch.randn(size, HIDDEN)
    saved = _saved(model, x)
    forward, step = ({way: float("inf") for way in _WAYS} for _ in range(2))
    for index in range(rounds + 20):
        for way, hooks in _WAYS.items():
            times = _round(model, x, grad_output, hooks)
            if index >= 20:  # the engine checks its rules at their first use
                forward[way], step[way] = min(forward[way], times[0]), min(step[way], times[1])
    added = {
        f"{way}_{what}_us": (times[way] - times["none"]) / saved
        for way in ("identity", "engine")
        for what, times in (("forward", forward), ("step", step))
    }
    return {
        "model": name,
        "bytes": x.nbytes,
        "saved_tensors": saved,
        "rounds": rounds,
        "forward_us": forward,
        "step_us": step,
        **added,
    }


def print_result(rows: list[dict[str, Any]]) -> None:
    """A line a model and way, and whether the aim is met."""
    lines = [
        (
            f"{row['bytes']} B, {row['model']}",
            way,
            str(row["saved_tensors"]),
            f"{row['step_us']['none']:.1f}",
            f"{row[f'{way}_forward_us']:.2f}",
            f"{row[f'{way}_step_us']:.2f}",
        )
        for row in rows
        for way in ("identity", "engine")
    ]
    _report.print_table(
        "Cost of saved-tensor hooks on a tiny model, one thread: microseconds added for each saved tensor",
        ("tensors", "hooks", "saved", "step us without", "+ forward us", "+ step us"),
        lines,
    )
    worst = max(row["engine_step_us"] for row in rows)
    print(f"aim: engine at most {AIM_US} us a saved tensor, forward and backward; worst here {worst:.2f}")
