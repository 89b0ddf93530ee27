"""Accounting of memory: what is allocated, what a forward keeps for backward, how high a step peaks.

All figures come from the allocator, never from counting tensors in autograd hooks: a hook sees what is handed
to autograd, not what stays alive (a cached recompute, a view of a larger buffer, a Python reference fool it).

On the CPU the counter is glibc's ``mallinfo2``: bytes in use on the heaps plus bytes in mapped blocks. The
whole process counts, Python's larger objects and other threads too, and a mapped block is rounded up to whole
pages. On CUDA it is ``torch.cuda.memory_allocated``: PyTorch's caching allocator, blocks of 512 bytes.

References: mallinfo(3) and malloc/malloc.c of glibc; "CUDA semantics" in PyTorch's documentation.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import torch

__all__ = ["allocated_bytes", "assert_saved_bytes", "peak_bytes", "saved_bytes"]

PROBE_BYTES = 64 << 20

#: Slack of `assert_saved_bytes` in bytes: autograd's nodes, malloc's headers, page rounding of a few blocks.
DEFAULT_TOLERANCE = 16 << 10


class _Mallinfo2(ctypes.Structure):
    """``struct mallinfo2`` of glibc 2.33 and later (malloc.h)."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


@functools.cache
def _mallinfo2() -> Callable[[], Any]:
    try:
        # The process' own symbols, not libc.so.6: a preloaded allocator that has a mallinfo2 then answers.
        function = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError, TypeError) as error:
        raise RuntimeError(
            "cannot count CPU memory: the C library has no mallinfo2 (it came with glibc 2.33; musl, macOS "
            "and Windows have none). Run on Linux with a recent glibc, or measure on a CUDA device."
        ) from error
    function.restype = _Mallinfo2
    function.argtypes = []
    return function


def _count(device: torch.device) -> int:
    if device.type == "cpu":
        info = _mallinfo2()()
        return int(info.uordblks) + int(info.hblkhd)
    if device.type == "cuda":
        return int(torch.cuda.memory_allocated(device))
    raise RuntimeError(
        f"cannot count memory on device {str(device)!r}: only cpu and cuda have a counter here"
    )


@functools.cache
def _check_counter(device: torch.device) -> None:
    """Raise unless the counter sees a tensor of 64 MiB come and go. Runs once a process and device."""
    before = _count(device)
    probe = torch.empty(PROBE_BYTES, dtype=torch.uint8, device=device)
    seen = _count(device) - before
    del probe
    left = _count(device) - before
    # Other threads may allocate meanwhile, but hardly an eighth of the probe.
    slack = PROBE_BYTES // 8
    if abs(seen - PROBE_BYTES) > slack or abs(left) > slack:
        raise RuntimeError(
            f"the memory counter of {device} cannot be trusted: a tensor of {PROBE_BYTES:,} bytes changed "
            f"it by {seen:,} bytes, its release left {left:,}. On the CPU that happens where PyTorch gets "
            "its memory from another library than the C library that is asked: jemalloc or tcmalloc in "
            "LD_PRELOAD, a sanitizer, a custom allocator. Start the process without it."
        )


def _device(device: str | torch.device) -> torch.device:
    result = torch.device(device)
    if result.type == "cuda" and not torch.cuda.is_available():
        raise RuntimeError(f"cannot count memory on device {str(device)!r}: this torch sees no GPU")
    if result.type == "cuda" and result.index is None:
        result = torch.device("cuda", torch.cuda.current_device())
    return result


def allocated_bytes(device: str | torch.device = "cpu") -> int:
    """Bytes that the allocator of `device` holds for live objects at this moment.

    On the CPU the whole process counts, so use differences. The first call for a device checks that the
    counter sees a tensor of 64 MiB.

    Raises:
        RuntimeError: no counter for this device or C library, or the counter does not see PyTorch's
            allocations (jemalloc or tcmalloc preloaded, musl); the message says which.
    """
    where = _device(device)
    _check_counter(where)
    return _count(where)


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Tensors in nested tuples, lists, mappings (Hugging Face's ModelOutput is one) and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors(getattr(value, field.name))


def _graph(fn: Callable[[], Any]) -> list[Any]:
    """Run `fn`, let its results go, and return the autograd nodes they came from, which hold the graph."""
    nodes = [tensor.grad_fn for tensor in tensors(fn()) if tensor.grad_fn is not None]
    if not nodes:
        raise RuntimeError(
            "fn() returned no tensor with a gradient graph, so nothing is kept for backward. Return the "
            "output or the loss (tensors, tuples, lists, dicts or dataclasses of them), and let some input "
            "or parameter require grad."
        )
    return nodes


@contextmanager
def no_collection() -> Iterator[None]:
    """Collect cyclic garbage now and none inside, so that no unrelated object dies between two readings."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def saved_bytes(fn: Callable[[], Any], *, device: str | torch.device = "cpu", warmup: int = 2) -> int:
    """Bytes that stay alive between forward and backward because backward needs them.

    `fn()` runs a forward and returns its output or loss. The returned tensors are let go and only their
    ``grad_fn`` is held: what is then alive beyond what was alive before is what the graph keeps. So

    * an output counts if the graph keeps it (softmax, relu) and does not if it doesn't (GELU's own output);
    * shared storage counts once, a view counts its whole storage;
    * 16-bit copies of weights count if the graph keeps them, and not if only the cache of ``torch.autocast`` does, which lets
      them go when the forward ends (`fn` may begin autocast itself, or be given inside it);
    * parameters and whatever else was alive before `fn` do not count. For what an op keeps of its *input*,
      make the input inside: ``saved_bytes(lambda: F.gelu(x.clone()))`` (clone itself keeps nothing) gives the
      input's bytes.

    `fn` is run `warmup` times beforehand (lazily created workspaces, primitive caches), then once measured.
    Backward is not run. On the CPU the result carries the allocator's overhead (tens of bytes a block; page
    rounding for mapped blocks) and autograd's nodes, a few hundred bytes each; small negative results are
    that noise.

    Args:
        fn: called without arguments.
        device: whose allocator is asked, "cpu" or "cuda[:index]".
        warmup: forwards run before the measured one.

    Raises:
        RuntimeError: `fn` returned nothing that has a graph, or the counter cannot be trusted (see
            `allocated_bytes`).
    """
    where = _device(device)
    _check_counter(where)
    for _ in range(warmup):
        _graph(fn)
    with no_collection():
        torch.clear_autocast_cache()
        before = _count(where)
        graph = _graph(fn)
        torch.clear_autocast_cache()
        kept = _count(where) - before
        del graph
    return kept


def assert_saved_bytes(
    fn: Callable[[], Any],
    expected: int,
    *,
    tolerance: int = DEFAULT_TOLERANCE,
    device: str | torch.device = "cpu",
    warmup: int = 2,
) -> None:
    """Assert that the forward `fn` keeps `expected` bytes for backward, as `saved_bytes` counts them.

    Example: GELU keeps its input, 4 bytes an element, and nothing else::

        x = torch.randn(4096, 1024, requires_grad=True)
        assert_saved_bytes(lambda: F.gelu(x.clone()), 4 * x.numel())

    Args:
        fn, device, warmup: as for `saved_bytes`.
        expected: bytes.
        tolerance: bytes by which the count may differ either way (default 16 KiB). Choose tensors that are
            large against it.

    Raises:
        AssertionError: the count differs by more; the message gives both.
        RuntimeError: as for `saved_bytes`.
    """
    kept = saved_bytes(fn, device=device, warmup=warmup)
    if abs(kept - expected) > tolerance:
        raise AssertionError(
            f"the forward keeps {kept:,} bytes for backward, expected {expected:,} "
            f"({kept - expected:+,}, tolerance {tolerance:,}; by the count of the {device} allocator)"
        )


def peak_bytes(fn: Callable[[], Any], *, device: str | torch.device = "cpu", warmup: int = 1) -> int:
    """The most bytes that `fn()` has allocated at any one moment, above what was alive before it.

    Give a whole training step as `fn` to see the peak of forward and backward together. On the CPU the figure
    is the running sum of the allocations and releases that PyTorch's allocator reports to ``torch.profiler``:
    exact for tensors, blind to what libraries allocate by themselves (packed matrices of MKL, scratch buffers
    in C++); releasing a tensor that was alive before does not lower it. On CUDA it is
    ``max_memory_allocated`` after a reset of the peak statistics.

    Raises:
        RuntimeError: another profiler is active, or the device has no such counter.
    """
    where = _device(device)
    for _ in range(warmup):
        fn()
    torch.clear_autocast_cache()  # inside autocast: what a step casts is new to it
    if where.type == "cuda":
        torch.cuda.synchronize(where)
        before = torch.cuda.memory_allocated(where)
        torch.cuda.reset_peak_memory_stats(where)
        fn()
        torch.cuda.synchronize(where)
        return int(torch.cuda.max_memory_allocated(where)) - int(before)
    if where.type != "cpu":
        raise RuntimeError(
            f"cannot measure peak memory on device {str(device)!r}: only cpu and cuda are supported"
        )
    with no_collection():
        changes = _allocations(fn)
    held = peak = 0
    for change in changes:
        held += change
        peak = max(peak, held)
    return peak


@contextmanager
def _quiet_profiler() -> Iterator[None]:
    """Kineto, which the profiler stands on, writes a line at each start and end, unless told otherwise when it is first used."""
    level = "KINETO_LOG_LEVEL"
    if level in os.environ:
        yield
        return
    os.environ[level] = "6"  # above all that it has
    try:
        yield
    finally:
        del os.environ[level]


def _allocations(fn: Callable[[], Any]) -> list[int]:
    """Bytes of PyTorch's CPU allocations (positive) and releases (negative) during `fn()`, in order."""
    if torch.autograd._profiler_enabled():
        raise RuntimeError(
            "peak memory on the CPU is read from torch.profiler, and another profiler is active: its trace would be lost. "
            "Measure outside it."
        )
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
    with _quiet_profiler():
        profiler.start()
    try:
        fn()
    finally:
        profiler.stop()
    # The trace file is the documented way to the single events; the event list merges them into operators.
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "trace.json")
        profiler.export_chrome_trace(path)
        with open(path, encoding="utf-8") as file:
            events = json.load(file)["traceEvents"]
    memory = [event for event in events if event["name"] == "[memory]" and event["args"]["Device Type"] == 0]
    # Each thread's events come as a block of their own; the sort keeps the order of equal time stamps.
    memory.sort(key=lambda event: float(event["ts"]))
    return [int(event["args"]["Bytes"]) for event in memory]
