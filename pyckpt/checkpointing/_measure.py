"""What a block costs at each choice, and what the rest of the model costs without its blocks."""

from __future__ import annotations

import copy
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from .. import memory
from .._levels import LEVELS
from ._blocks import Call, with_tensors
from .segments import checkpoint, offload, quiet_region, segment


@contextmanager
def few_objects() -> Iterator[None]:
    """Each measurement collects garbage first; that goes over what is there now once only."""
    if gc.get_freeze_count():  # the caller's own
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def run(choice: str, block: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The block, as :meth:`Plan.apply` will have it run."""
    if choice == "none":
        return block(*args, **kwargs)
    if choice in LEVELS:
        with quiet_region(choice):
            return block(*args, **kwargs)
    return {"checkpoint": checkpoint, "offload": offload}[choice](block, *args, **kwargs)


class _Fresh(Function):
    """A copy that no rule rebuilds, as what the block before gives is to this one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Ones(Function):
    """In place of what follows: keeps nothing, and makes the gradient when it is asked for."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.like = x.shape, x.dtype, x.device
        return x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        shape, dtype, device = ctx.like
        return torch.ones(shape, dtype=dtype, device=device)


class _Stub(Function):
    """In place of a block: gives what it gave, and keeps nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, anchor: Tensor) -> Tensor:
        ctx.like = x.shape, x.dtype, x.device
        return y.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        shape, dtype, device = ctx.like
        return torch.zeros(shape, dtype=dtype, device=device), None, None


@dataclass
class Cost:
    """Of one block at one choice, in bytes and nanoseconds."""

    saved: int
    peak: int
    time: int


def first_tensor(value: Any) -> Tensor:
    return next(t for t in memory.tensors(value) if t.is_floating_point())


class Bench:
    """One kind of block, on a copy of it: gradients, buffers and hooks of the model are not touched."""

    def __init__(self, block: nn.Module, call: Call, autocast: tuple[bool, torch.dtype]):
        self.block = copy.deepcopy(block)
        self.call = call
        self.x = first_tensor([call.args, call.kwargs]).clone().requires_grad_()
        self.device, self.autocast = self.x.device, autocast
        y = first_tensor(call.output)
        # Two in a row, so that what one leaves to the other is counted as in the model; alone where they do not fit.
        self.chain = 2 if y.shape == self.x.shape and y.dtype == self.x.dtype else 1

    def forward(self, choice: str, count: int) -> Tensor:
        enabled, dtype = self.autocast
        x = _Fresh.apply(self.x)
        with torch.autocast(self.device.type, dtype, enabled=enabled):
            for _ in range(count):
                args, kwargs = _replaced(self.call, x)
                x = first_tensor(run(choice, self.block, *args, **kwargs))
        return x

    def step(self, choice: str, count: int) -> None:
        Ones.apply(self.forward(choice, count)).backward()

    def bytes(self, choice: str) -> tuple[int, int]:
        """Kept, and the peak of forward and backward with it, above what the blocks before keep."""
        for p in [self.x, *self.block.parameters()]:
            p.grad = torch.zeros_like(p) if p.requires_grad else None
        measured = [
            memory.saved_bytes(lambda n=n: self.forward(choice, n), device=self.device, warmup=1)  # type: ignore[misc]
            for n in range(1, self.chain + 1)
        ]
        saved = max(measured[-1] - (measured[0] if self.chain > 1 else 0), 0)
        peak = memory.peak_bytes(lambda: self.step(choice, self.chain), device=self.device)
        return saved, peak - (saved if self.chain > 1 else 0)

    def costs(self, choices: Sequence[str], rounds: int) -> dict[str, Cost]:
        """Of each choice; and under "replay", of a block more in a segment: what it adds to the peak, and its forward's time."""
        sizes = {choice: self.bytes(choice) for choice in choices}
        calls: dict[str, Callable[[], Any]] = {c: lambda c=c: self.step(c, 1) for c in choices}  # type: ignore[misc]
        if "checkpoint" in choices and self.chain > 1:
            double = memory.peak_bytes(self._segment_of_two, device=self.device)
            alone = memory.peak_bytes(lambda: self.step("checkpoint", 1), device=self.device)
            sizes["replay"] = 0, max(double - alone, 0)
            calls["replay"] = lambda: self.forward("pointwise", 1)
        times = in_turn(calls, rounds, self.device)
        return {c: Cost(*sizes[c], times[c]) for c in sizes}

    def _segment_of_two(self) -> None:
        enabled, dtype = self.autocast

        def once(x: Tensor) -> Tensor:
            args, kwargs = _replaced(self.call, x)
            return first_tensor(self.block(*args, **kwargs))

        x = _Fresh.apply(self.x)
        with torch.autocast(self.device.type, dtype, enabled=enabled):
            y = segment([once, once], x)
        Ones.apply(y).backward()


def _replaced(call: Call, x: Tensor) -> tuple[list[Any], dict[str, Any]]:
    """The arguments, with x for the first tensor."""
    args, kwargs = list(call.args), dict(call.kwargs)
    for place, value in enumerate(args):
        if isinstance(value, Tensor) and value.is_floating_point():
            args[place] = x
            return args, kwargs
    for name, value in kwargs.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            kwargs[name] = x
            return args, kwargs
    raise ValueError("plan: a block takes no floating-point tensor as an argument of its own")


def in_turn(calls: dict[str, Callable[[], Any]], rounds: int, device: torch.device) -> dict[str, int]:
    """Median nanoseconds of each, from rounds in which each runs once: a disturbance hits all alike."""
    samples: dict[str, list[int]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            start = time.perf_counter_ns()
            call()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            samples[name].append(time.perf_counter_ns() - start)
    return {name: int(statistics.median(values)) for name, values in samples.items()}


@dataclass
class Rest:
    """Of the model without its blocks: bytes that stand when the first block begins, the peak, what is kept, nanoseconds, and
    bytes of its parameters' gradients."""

    before: int
    peak: int
    saved: int
    time: int
    gradients: int


class _StubModule(nn.Module):
    """In place of a block. Attributes that the model reads of it are the block's."""

    def __init__(self, block: nn.Module, call: Call, enter: Callable[[], None]):
        super().__init__()
        self.__dict__["_stands_for"] = block
        self.call, self.enter = call, enter
        # What the block gives needs a gradient if its parameters do, whatever it is given.
        trained = any(p.requires_grad for p in block.parameters())
        self.anchor = torch.zeros((), requires_grad=trained)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_stands_for"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.enter()
        y = first_tensor(self.call.output)
        made = _Stub.apply(first_tensor([args, kwargs]), y, self.anchor)
        return with_tensors(self.call.output, lambda t: made if t is y else t)


def rest_of(
    model: nn.Module,
    blocks: Sequence[tuple[nn.Module, Call]],
    loss: Callable[[nn.Module], Tensor],
    device: torch.device,
    rounds: int,
) -> Rest:
    """On a copy of the model with stubs for its blocks."""
    standing: list[int] = []
    start = 0
    memo: dict[int, Any] = {}
    for block, call in blocks:
        memo[id(block)] = _StubModule(
            block, call, lambda: standing.append(memory.allocated_bytes(device) - start)
        )
    skeleton = copy.deepcopy(model, memo)
    own = [p for p in skeleton.parameters() if p.requires_grad]
    for p in own:
        p.grad = torch.zeros_like(p)

    def step() -> None:
        value = loss(skeleton)
        if value.requires_grad:
            value.backward()

    saved = memory.saved_bytes(lambda: loss(skeleton), device=device, warmup=1)
    gc.collect()
    standing.clear()
    start = memory.allocated_bytes(device)
    loss(skeleton)
    before = max(standing[0], 0)
    peak = memory.peak_bytes(step, device=device)
    taken = in_turn({"rest": step}, rounds, device)["rest"]
    return Rest(before, peak, max(saved, 0), taken, sum(p.nbytes for p in own))
