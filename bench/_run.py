"""Rows of the table: check the results of one case, time its implementations in turn, count their memory."""

from __future__ import annotations

import math
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from pyckpt import memory
from pyckpt.ops._registry import Unserved

from ._check import CheckFailed, Error, errors, errors_random, judge
from ._harness import Effort, copy_of, graphed, time_in_turn
from .ops import DROP, DTYPES, SUBJECTS, Case

OVERHEAD_SHAPE = (8, 8)
_COPY = "copy"
_NO_BUDGET = "the budget for compilation is used up (--compile-budget SECONDS)"

#: Two equal implementations measured in turn on a quiet machine differ by up to this share.
NOISE = 0.03

#: torch.compile is a peer to be timed, not on trial: its error may be this many times what pyckpt's may be.
PEER_SLACK = 8.0

#: Inputs drawn before a result is called wrong.
DRAWS = 8


@dataclass(frozen=True)
class Config:
    """One case to measure. `kind` is "throughput", or "overhead" for the cost of a call on a tiny input.

    `compile`: torch.compile takes part, which costs seconds of compilation.
    """

    op: str
    dtype: str
    shape: tuple[int, ...]
    layout: str = "contiguous"
    kind: str = "throughput"
    compile: bool = False

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape))
        return f"{self.op} {self.dtype} {shape}" + ("" if self.layout == "contiguous" else f" {self.layout}")


class _OutOfTime(BaseException):
    """Raised by the alarm; not an Exception, so that no handler inside the compiler swallows it."""


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(*_: Any) -> None:
        raise _OutOfTime

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Compiler:
    """torch.compile under a budget of seconds for the whole run; if the first attempt fails, the only one."""

    def __init__(self, budget_s: float) -> None:
        self.left = budget_s
        self.trouble = "" if budget_s > 0 else _NO_BUDGET
        self.works = False

    def __call__(
        self,
        function: Callable[..., Tensor],
        step: Callable[[Callable[..., Tensor]], Any],
        backend: str | Callable[..., Any] = "inductor",
    ) -> tuple[Callable[..., Tensor] | None, str]:
        """`function` compiled, `step` (a forward and backward of it) run once, or None and the reason."""
        if self.trouble:
            return None, self.trouble
        import torch._inductor.config as inductor

        inductor.compile_threads = 1  # a pool of compilers would go on using the cores that are timed
        start = time.perf_counter()
        try:
            with _alarm(self.left):
                compiled: Callable[..., Tensor] = torch.compile(
                    function, backend=backend, fullgraph=True, dynamic=False
                )
                step(compiled)
            self.works = True
            return compiled, ""
        except _OutOfTime:
            return None, _NO_BUDGET
        except Exception as error:  # any compiler trouble: the row says so, the benchmark goes on
            lines = str(error).strip().splitlines() or [""]
            reason = f"torch.compile failed: {type(error).__name__}: {lines[0][:200]}"
            self.trouble = "" if self.works else reason
            return None, reason
        finally:
            self.left -= time.perf_counter() - start
            if self.left <= 0:
                self.trouble = _NO_BUDGET


def memory_trouble(device: torch.device) -> str:
    """Why memory cannot be counted here; empty where it can."""
    try:
        memory.allocated_bytes(device)
    except RuntimeError as error:
        return str(error)
    return ""


def _row(config: Config, case: Case, impl: str, backend: str) -> dict[str, Any]:
    return {
        "op": config.op,
        "dtype": config.dtype,
        "shape": "x".join(map(str, case.inputs[0].shape)),
        "impl": impl,
        "backend": backend,
        "forward_ms": None,
        "step_ms": None,
        "ratio": None,
        "gbps": None,
        "copy_gbps": None,
        "saved_bytes": None,
        "peak_bytes": None,
        # Beyond the common fields:
        "status": "ok",
        "kind": config.kind,
        "layout": config.layout,
        "median_ratio": None,
        "least_ratio": None,
        "step_least_ms": None,
        "forward_ratio": None,
        "forward_bytes": case.forward_bytes,
        "step_bytes": case.step_bytes,
        "copy_ms": None,
        "page_faults": None,
        "others_cpu": None,
        "contended": None,
        "samples": None,
        "undisturbed": None,
    }


def _draw(config: Config, device: torch.device, seed: int) -> tuple[Case, Tensor]:
    """The case on inputs drawn with `seed`, and a gradient of its output."""
    torch.manual_seed(seed)
    case = SUBJECTS[config.op].case(config.shape, DTYPES[config.dtype], device, config.layout)
    x = case.inputs[0]
    return case, torch.randn(x.shape, device=device).to(x.dtype)


def _errors(fn: Callable[..., Tensor], case: Case, grad_output: Tensor) -> list[Error]:
    if case.reference is not None:
        return errors(fn, case.reference, case.inputs, grad_output)
    assert case.with_mask is not None
    return errors_random(fn, case.with_mask, case.inputs, grad_output, DROP, case.shows_mask)


def verify(config: Config, device: torch.device, seed: int) -> None:
    """Check pyckpt's result of one case.

    Eager's largest error on one small input can be small by luck: where the first draw fails, the largest
    errors of up to `DRAWS` draws are compared.

    Raises:
        CheckFailed: it is less accurate than it may be.
    """
    found: list[Error] = []
    for draw in range(DRAWS):
        case, grad_output = _draw(config, device, seed + draw)
        found += _errors(case.pyckpt, case, grad_output)
        try:
            judge(found)
            return
        except CheckFailed:
            if draw == DRAWS - 1:
                raise


def _step(fn: Callable[..., Tensor], case: Case, grad_output: Tensor) -> Callable[[], Any]:
    inputs = list(case.inputs)
    # As in a network, where the gradient arrives in the layout of the output that this implementation chose.
    gradient = torch.empty_like(fn(*inputs), requires_grad=False).copy_(grad_output)
    return lambda: torch.autograd.grad(fn(*inputs), inputs, gradient)


def _own_input(fn: Callable[..., Tensor], case: Case) -> Callable[[], Tensor]:
    """`fn` on a copy that nobody else holds, so that what is kept of the input shows in the allocator."""
    return lambda: fn(case.inputs[0].clone(), *case.inputs[1:])


def measure(
    config: Config,
    device: torch.device,
    effort: Effort,
    compiler: Compiler,
    backend: str,
    seed: int,
    peers: Mapping[str, Callable[..., Tensor]] = MappingProxyType({}),
) -> list[dict[str, Any]]:
    """Check, time and count one case: rows for eager, torch.compile (if `config` asks), `peers`, the case's own, and pyckpt.

    A row whose result is wrong or whose call raises has no figures and a `status` that begins with "error"; where torch.compile
    or a peer does not do it, or our kernels are not made for it, with "skipped". Memory is None where it cannot be counted.
    """
    case, grad_output = _draw(config, device, seed)
    peers = {**case.peers, **peers}
    compiled_peers = {"compile": case.eager, **case.compiled_peers} if config.compile else {}
    rows = {
        "eager": _row(config, case, "eager", "torch"),
        **{name: _row(config, case, name, "inductor") for name in compiled_peers},
        **{name: _row(config, case, name, "torch" if name in case.peers else name) for name in peers},
        "pyckpt": _row(config, case, "pyckpt", backend),
    }
    calls: dict[str, Callable[..., Tensor]] = {"eager": case.eager}

    inputs = list(case.inputs)
    if config.compile:
        torch.compiler.reset()  # each case is its own function; do not count them as recompilations of one
    for name, function in compiled_peers.items():
        compiled, reason = compiler(
            function, lambda fn: torch.autograd.grad(fn(*inputs), inputs, grad_output)
        )
        if compiled is None:
            rows[name]["status"] = f"skipped: {reason}"
            continue
        try:
            judge(_errors(compiled, case, grad_output), PEER_SLACK)
            calls[name] = compiled
        except Exception as error:  # nor may a peer's trouble hide the other rows
            rows[name]["status"] = f"skipped: {type(error).__name__}: {str(error)[:200]}"
    for name, function in peers.items():
        try:
            judge(_errors(function, case, grad_output), PEER_SLACK)
            calls[name] = function
        except Exception as error:
            rows[name]["status"] = f"skipped: {type(error).__name__}: {str(error)[:200]}"
    try:
        verify(config, device, seed)
        calls["pyckpt"] = case.pyckpt
    except Unserved as reason:
        rows["pyckpt"]["status"] = f"skipped: {reason}"
    except Exception as error:  # a kernel that raises must not hide the other rows
        rows["pyckpt"]["status"] = f"error: {type(error).__name__}: {error}"

    _measure_times(rows, calls, case, grad_output, effort, device)
    # On a tiny input the count would be of autograd's nodes, not of the tensors.
    if config.kind == "throughput" and not memory_trouble(device):
        for name, fn in calls.items():
            rows[name]["saved_bytes"] = memory.saved_bytes(_own_input(fn, case), device=device, warmup=1)
            rows[name]["peak_bytes"] = memory.peak_bytes(_step(fn, case, grad_output), device=device)
    return list(rows.values())


def _measure_times(
    rows: dict[str, dict[str, Any]],
    calls: dict[str, Callable[..., Tensor]],
    case: Case,
    grad_output: Tensor,
    effort: Effort,
    device: torch.device,
) -> None:
    timed: dict[str, Callable[[], Any]] = {_COPY: copy_of(case.step_bytes, device)}
    for name, fn in calls.items():
        timed[f"{name} forward"] = partial(fn, *case.inputs)
        timed[f"{name} step"] = _step(fn, case, grad_output)
    if device.type == "cuda":
        timed = {name: graphed(call, device) for name, call in timed.items()}
    samples, contention = time_in_turn(timed, effort, device)
    copy_ms = samples[_COPY].median
    eager_forward, eager_step = samples["eager forward"], samples["eager step"]
    for name in calls:
        forward, step = samples[f"{name} forward"], samples[f"{name} step"]
        rows[name].update(
            forward_ms=forward.median,
            step_ms=step.median,
            ratio=eager_step.ratio_of_medians(step),
            median_ratio=eager_step.median_of_ratios(step),
            least_ratio=eager_step.least / step.least,
            step_least_ms=step.least,
            forward_ratio=eager_forward.ratio_of_medians(forward),
            gbps=case.step_bytes / step.median / 1e6,
            copy_gbps=case.step_bytes / copy_ms / 1e6,
            copy_ms=copy_ms,
            page_faults=statistics.median(step.page_faults),
            others_cpu=contention.share,
            contended=contention.contended and not (step.sound and forward.sound),
            samples=len(step.values),
            undisturbed=len(step.undisturbed),
        )


def overhead_limit_ms(eager_step_ms: float) -> float:
    """What forward and backward on a tiny input may take: 1.5 x torch.nn's, or 20 us more if that is more."""
    return max(1.5 * eager_step_ms, eager_step_ms + 0.020)


def shortfalls(rows: Sequence[dict[str, Any]], floor_elements: int = 64 * 1024) -> list[str]:
    """What pyckpt's rows miss: slower than eager from 64 Ki elements up, or a call that costs too much.

    "Slower" means by more than `NOISE`, a step in the ratio of medians and in the median of ratios both.
    """
    found = []
    eager = {_key(row): row for row in rows if row["impl"] == "eager"}
    for row in rows:
        if row["impl"] != "pyckpt" or row["step_ms"] is None:
            continue
        name = " ".join((row["op"], row["dtype"], row["shape"], row["layout"]))
        note = " (machine contended)" if row["contended"] else ""
        if row["kind"] == "overhead":
            limit = overhead_limit_ms(eager[_key(row)]["step_ms"])
            if row["step_ms"] > limit:
                found.append(
                    f"{name}: a call takes {row['step_ms'] * 1e3:.1f} us, the aim is {limit * 1e3:.1f}{note}"
                )
        elif math.prod(map(int, row["shape"].split("x"))) >= floor_elements:
            steps = max(row["ratio"], row["median_ratio"])
            for what, ratio in (("step", steps), ("forward", row["forward_ratio"])):
                if ratio < 1.0 - NOISE:
                    found.append(f"{name}: {what} slower than eager, {ratio:.2f}x{note}")
    return found


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("op", "dtype", "shape", "layout", "kind"))
