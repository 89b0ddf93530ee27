"""What a block costs at each choice, and what the rest of the model costs without its blocks."""

from __future__ import annotations

import copy
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from .. import memory
from .._levels import LEVELS
from ._autocast import Autocast
from ._blocks import Call, Found, with_tensors
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


#: Bytes of other things than tensors that a count may hold: less is not looked at, and makes no difference between choices.
_NOISE = memory.DEFAULT_TOLERANCE


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
    """Of one block at one choice, in bytes: kept for backward; copies of weights that autocast alone holds until the model's
    forward ends; the peak of forward with both, under autocast; that of a step, with what is kept. And nanoseconds of a step."""

    saved: int
    casts: int
    forward: int
    peak: int
    time: int


def first_tensor(value: Any) -> Tensor:
    return next(t for t in memory.tensors(value) if t.is_floating_point())


class Bench:
    """One kind of block, on copies of it: gradients, buffers and hooks of the model are not touched."""

    def __init__(self, block: nn.Module, call: Call, differentiable: bool):
        self.call = call
        self.x = first_tensor([call.args, call.kwargs]).clone().requires_grad_(differentiable)
        self.device = self.x.device
        y = first_tensor(call.output)
        fits = y.shape == self.x.shape and y.dtype == self.x.dtype
        self.blocks = [copy.deepcopy(block) for _ in range(2 if fits else 1)]
        # Two in a row, so that what one leaves to the other is counted as in the model; alone where the second is another kind.
        self.chain = len(self.blocks) if differentiable else 1

    def once(self, choice: str, block: nn.Module, x: Tensor) -> Tensor:
        args, kwargs = _replaced(self.call, x)
        return first_tensor(run(choice, block, *args, **kwargs))

    def forward(self, choice: str, count: int) -> Tensor:
        x = _Fresh.apply(self.x)
        with self.call.autocast.forward():
            for block in self.blocks[:count]:
                x = self.once(choice, block, x)
        return x

    def step(self, choice: str, count: int) -> None:
        Ones.apply(self.forward(choice, count)).backward()

    def bytes(self, choice: str) -> tuple[int, int, int, int]:
        """The first four of a :class:`Cost`, above what the blocks before take."""
        for p in [self.x, *(p for block in self.blocks for p in block.parameters())]:
            p.grad = torch.zeros_like(p) if p.requires_grad else None
        whole = partial(self.forward, choice, self.chain)
        kept = memory.saved_bytes(whole, device=self.device, warmup=1)
        alone = 0
        if self.chain > 1:
            alone = memory.saved_bytes(partial(self.forward, choice, 1), device=self.device, warmup=1)
        saved = max(kept - alone, 0)
        before = saved * (self.chain - 1)
        casts = forward = 0
        if self.call.autocast.enabled:
            casts = round(self._casts(whole) / self.chain / _NOISE) * _NOISE
            forward = memory.peak_bytes(whole, device=self.device) - before - casts * (self.chain - 1)
        peak = memory.peak_bytes(partial(self.step, choice, self.chain), device=self.device)
        return saved, casts, forward, peak - before

    def _casts(self, forward: Callable[[], Tensor]) -> int:
        with self.call.autocast.forward(), memory.no_collection():
            result = forward()
            held = memory.allocated_bytes(self.device)
            torch.clear_autocast_cache()
            held -= memory.allocated_bytes(self.device)
            del result
        return max(held, 0)

    def costs(self, choices: Sequence[str], rounds: int) -> dict[str, Cost]:
        """Of each choice; and under "replay", of a block more in a segment: what it adds to the peak, and its forward's time."""
        if not self.forward("none", 1).requires_grad:
            return dict.fromkeys(choices, self._frozen(rounds))
        sizes = {choice: self.bytes(choice) for choice in choices}
        calls: dict[str, Callable[[], Any]] = {c: lambda c=c: self.step(c, 1) for c in choices}  # type: ignore[misc]
        if "checkpoint" in choices and len(self.blocks) > 1:
            double = memory.peak_bytes(self._segment_of_two, device=self.device)
            alone = memory.peak_bytes(lambda: self.step("checkpoint", 1), device=self.device)
            sizes["replay"] = 0, 0, 0, max(double - alone, 0)
            calls["replay"] = lambda: self.forward("pointwise", 1)
        times = in_turn(calls, rounds, self.device)
        return {c: Cost(*sizes[c], times[c]) for c in sizes}

    def _frozen(self, rounds: int) -> Cost:
        """Where autograd takes no part."""
        forward = partial(self.forward, "none", 1)
        peak = memory.peak_bytes(forward, device=self.device)
        return Cost(0, 0, 0, peak, in_turn({"none": forward}, rounds, self.device)["none"])

    def _segment_of_two(self) -> None:
        x = _Fresh.apply(self.x)
        with self.call.autocast.forward():
            y = segment([partial(self.once, "none", block) for block in self.blocks], x)
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
    """Of the model without its blocks: bytes that stand when the first block begins, the peak of forward, that of a step, what is
    kept, nanoseconds, and bytes of its parameters' gradients."""

    before: int
    forward: int
    peak: int
    saved: int
    time: int
    gradients: int


class _StubModule(nn.Module):
    """In place of a block. Attributes that the model reads of it are the block's."""

    def __init__(self, block: Found, call: Call, enter: Callable[[], None]):
        super().__init__()
        self.__dict__["_block"] = block
        self.call, self.enter = call, enter
        # What the block gives needs a gradient if its parameters do, whatever it is given.
        trained = any(p.requires_grad for p in block.module.parameters())
        self.anchor = torch.zeros((), requires_grad=trained)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_block"].module, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.enter()
        x, y = first_tensor([args, kwargs]), first_tensor(self.call.output)
        self.__dict__["_block"].differentiable = x.requires_grad
        made = _Stub.apply(x, y, self.anchor)
        return with_tensors(self.call.output, lambda t: made if t is y else t)


def rest_of(
    model: nn.Module,
    found: Sequence[Found],
    calls: dict[str, Call],
    loss: Callable[[nn.Module], Tensor],
    device: torch.device,
    autocast: Autocast,
    rounds: int,
) -> Rest:
    """On a copy of the model with stubs for its blocks, of which it sets `differentiable`. `loss` is run under `autocast`."""
    standing: list[int] = []
    start = 0
    memo: dict[int, Any] = {}
    for block in found:
        memo[id(block.module)] = _StubModule(
            block, calls[block.call], lambda: standing.append(memory.allocated_bytes(device) - start)
        )
    skeleton = copy.deepcopy(model, memo)
    own = [p for p in skeleton.parameters() if p.requires_grad]
    for p in own:
        p.grad = torch.zeros_like(p)

    def forward() -> Tensor:
        with autocast.forward():
            value = loss(skeleton)
        return value

    def step() -> None:
        value = forward()
        if value.requires_grad:
            value.backward()

    saved = memory.saved_bytes(forward, device=device, warmup=1)
    gc.collect()
    standing.clear()
    start = memory.allocated_bytes(device)
    forward()
    before = max(standing[0], 0)
    highest, peak = (memory.peak_bytes(part, device=device) for part in (forward, step))
    taken = in_turn({"rest": step}, rounds, device)["rest"]
    return Rest(before, highest, peak, max(saved, 0), taken, sum(p.nbytes for p in own))
