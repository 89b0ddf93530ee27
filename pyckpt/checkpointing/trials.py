"""A guarded roll-out: real batches with and without a change, and the change stays only if it keeps what it promised."""

from __future__ import annotations

import copy
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .. import memory
from ..conversion import convert, report, revert
from .planning import Plan, budget_bytes

__all__ = ["TrialResult", "trial"]


@dataclass(frozen=True)
class TrialResult:
    """What :func:`trial` found; ``str()`` is its evidence.

    Attributes:
        kept: whether the change is on the model.
        slowdown: time of a step with the change / without: median over the batches.
        memory, memory_without: peak of a step in bytes, above what stands before it.
        loss_gap: ``|mean loss with - mean loss without| / |mean loss without|``.
        targets: as given, memory in bytes.
        missed: names of the targets that were not met.
        losses, losses_without, seconds, seconds_without: of each batch.
    """

    kept: bool
    slowdown: float
    memory: int
    memory_without: int
    loss_gap: float
    targets: dict[str, float]
    missed: tuple[str, ...]
    losses: list[float] = field(repr=False)
    losses_without: list[float] = field(repr=False)
    seconds: list[float] = field(repr=False)
    seconds_without: list[float] = field(repr=False)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        rows = [
            ("slowdown", f"{self.slowdown:.3f}", f"{self.targets['slowdown']:.3f}"),
            ("memory", f"{self.memory / 2**20:,.1f} MiB", f"{self.targets['memory'] / 2**20:,.1f} MiB"),
            ("loss_gap", f"{self.loss_gap:.2e}", f"{self.targets['loss_gap']:.2e}"),
        ]
        lines = [f"pyckpt.trial: {len(self.losses)} batches, with and without in turn"]
        for name, value, target in rows:
            lines.append(
                f"  {name:<9} {value:>14}   at most {target:>14}   {'MISSED' if name in self.missed else 'ok'}"
            )
        lines.append(f"  memory without: {self.memory_without / 2**20:,.1f} MiB")
        lines.append("the change stays" if self.kept else "the model is restored")
        return "\n".join(lines)


def trial(
    model: nn.Module,
    batches: Iterable[Any],
    step: Callable[[nn.Module, Any], Tensor],
    *,
    max_slowdown: float,
    max_memory: int | float | str,
    max_loss_gap: float,
    change: Plan | Callable[[nn.Module], Any] | None = None,
    undo: Callable[[nn.Module], Any] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    quiet: bool = False,
) -> TrialResult:
    """Try a change on real batches; keep it if all targets are met, else restore the model exactly.

    Each batch is run with and without the change, in turn (which of them first changes from batch to batch); both start from the
    same parameters, buffers, gradients and random numbers, and go their own ways. Afterwards the model is where it was before,
    with the change or without.

    Args:
        model: as it would be trained without the change.
        batches: a few of them (ten, say); more batches make the loss gap and the times surer.
        step: ``step(model, batch)`` runs one training step and returns the loss. If it does not run backward itself, that is
            done for it; if it steps an optimizer, give that too.
        max_slowdown: largest time of a step / time without, such as 1.05.
        max_memory: largest peak of a step: bytes, a text ("8GiB"), or a fraction of the peak without.
        max_loss_gap: largest relative difference of mean losses. The same bits are to be expected of a level or a plan on a
            converted model (0 will do); a converted model has other rounding, and other dropout masks.
        change: a :class:`Plan`, or a function of the model (then `undo` as well); :func:`pyckpt.convert` by default.
        optimizer: whose state is put back too.
        quiet: do not print the result.

    Raises:
        ValueError: no batches; the model is converted already and no `change` is given; a change without `undo`; a `max_memory`
            that says no bytes.
        TypeError: `step` returns no loss.
    """
    budget_bytes(max_memory, 1)
    apply, take_back = _change(model, change, undo)
    samples = list(batches)
    if not samples:
        raise ValueError("trial: needs at least one batch")
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    start = _State(model, optimizer)
    sides = {False: _Side(start), True: _Side(start)}
    on = kept = False

    def switch(to: bool) -> None:
        nonlocal on
        if to != on:
            (apply if to else take_back)(model)
            on = to

    run = lambda batch: _step(model, batch, step)  # noqa: E731
    try:
        for to, side in sides.items():
            switch(to)
            start.restore(model, optimizer)
            run(samples[0])  # warms up
            start.restore(model, optimizer)
            side.peak = memory.peak_bytes(lambda: run(samples[0]), device=device, warmup=0)
        for number, batch in enumerate(samples):
            for to in (False, True) if number % 2 == 0 else (True, False):
                switch(to)
                side = sides[to]
                side.state.restore(model, optimizer)
                begin = _now(device)
                loss = run(batch)
                side.seconds.append(_now(device) - begin)
                side.losses.append(loss)
                side.state = _State(model, optimizer)
        result = _result(sides[True], sides[False], max_slowdown, max_memory, max_loss_gap)
        kept = result.kept
    finally:
        switch(kept)
        start.restore(model, optimizer)
    if not quiet:
        print(result, file=sys.stdout)
    return result


def _change(
    model: nn.Module,
    change: Plan | Callable[[nn.Module], Any] | None,
    undo: Callable[[nn.Module], Any] | None,
) -> tuple[Callable[[nn.Module], Any], Callable[[nn.Module], Any]]:
    if isinstance(change, Plan):
        return change.apply, lambda _: change.revert()
    if change is not None:
        if undo is None:
            raise ValueError(
                "trial: a change of yours needs `undo`, a function of the model that takes it back"
            )
        return change, undo
    now = report(model)
    if now.swapped or now.recompute:
        raise ValueError(
            "trial: the model is converted already; revert it first, or give the `change` to try"
        )
    return convert, revert


def _result(
    ours: _Side, without: _Side, max_slowdown: float, max_memory: int | float | str, max_loss_gap: float
) -> TrialResult:
    slowdown = statistics.median(a / b for a, b in zip(ours.seconds, without.seconds, strict=True))
    mean = statistics.fmean(without.losses)
    difference = abs(statistics.fmean(ours.losses) - mean)
    gap = difference / abs(mean) if mean else difference
    limit = budget_bytes(max_memory, without.peak)
    found = {"slowdown": slowdown, "memory": ours.peak, "loss_gap": gap}
    targets = {"slowdown": max_slowdown, "memory": limit, "loss_gap": max_loss_gap}
    missed = tuple(name for name, value in found.items() if not value <= targets[name])  # NaN misses
    return TrialResult(
        not missed, slowdown, ours.peak, without.peak, gap, targets, missed,
        ours.losses, without.losses, ours.seconds, without.seconds,
    )  # fmt: skip


def _step(model: nn.Module, batch: Any, step: Callable[[nn.Module, Any], Tensor]) -> float:
    ran = False

    def seen(_: Any) -> None:
        nonlocal ran
        ran = True

    handles = [p.register_post_accumulate_grad_hook(seen) for p in model.parameters() if p.requires_grad]
    try:
        loss = step(model, batch)
        if isinstance(loss, (int, float)) and ran:
            return float(loss)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            found = (
                f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            )
            raise TypeError(
                "trial: step(model, batch) must return the loss, a tensor of one element (a number where it has run backward); "
                f"it returned {found}"
            )
        if not ran and loss.requires_grad:
            loss.backward()
    finally:
        for handle in handles:
            handle.remove()
    return float(loss.detach())


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class _State:
    """Parameters, buffers, gradients, optimizer and random numbers at one moment, on the host."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None):
        self.tensors = [_host(t) for t in (*model.parameters(), *model.buffers())]
        self.gradients = [None if p.grad is None else _host(p.grad) for p in model.parameters()]
        self.optimizer = None if optimizer is None else copy.deepcopy(optimizer.state_dict())
        self.random = random.getstate()
        self.torch = torch.get_rng_state()
        self.cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []

    def restore(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        with torch.no_grad():
            for tensor, value in zip((*model.parameters(), *model.buffers()), self.tensors, strict=True):
                if not torch.equal(tensor, value.to(tensor.device)):
                    tensor.copy_(value)
            for p, grad in zip(model.parameters(), self.gradients, strict=True):
                p.grad = None if grad is None else grad.to(p.device, copy=True)
        if optimizer is not None and self.optimizer is not None:
            optimizer.load_state_dict(copy.deepcopy(self.optimizer))
        random.setstate(self.random)
        torch.set_rng_state(self.torch)
        for number, state in enumerate(self.cuda):
            torch.cuda.set_rng_state(state, number)


def _host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


class _Side:
    def __init__(self, state: _State):
        self.state = state
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.peak = 0
