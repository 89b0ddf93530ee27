"""Which kernels exist on this machine, and which serve a tensor.

The only module whose behaviour depends on environment variables:
    PYCKPT_BACKEND   name of the backend to use wherever it applies; an error if it is not available
    PYCKPT_CPU_ISA   instruction set of the CPU kernels (x86-64-v2, x86-64-v3, x86-64-v4); default: the best one here
    PYCKPT_TRITON_AUTOTUNE  "1": the Triton kernels try several numbers of warps at the first call of each shape, and keep what
                     they find in Triton's cache; else a rule chooses
    PYCKPT_DISABLE   "1": :func:`pyckpt.convert` and :func:`pyckpt.recompute` do nothing, with one warning
"""

from __future__ import annotations

import functools
import os
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Any

import torch  # before the extension: torch's OpenMP runtime has to be there when its symbols are looked up

native: Any = None
try:
    from . import _C as native
except ImportError as error:
    _marker = Path(__file__).with_name("_no_compiler.txt")
    if not _marker.exists():
        raise ImportError(
            f"pyckpt's native module could not be loaded ({error}). Build it with `pip install -e .` in the checkout, or "
            "reinstall the package for this Python version."
        ) from error
    _why_no_native = f"built without a C++ compiler ({_marker.read_text().strip()})"
    warnings.warn(
        f"pyckpt was {_why_no_native}: it runs on the reference backend, which is plain PyTorch and saves no time. "
        "Install g++ or clang++ and reinstall.",
        RuntimeWarning,
        stacklevel=2,
    )


@dataclass(frozen=True)
class Backend:
    """A set of kernels: the device type it serves (None: any), and why it cannot be used here (empty: it can). `reason` may be a
    function that finds out: to ask for a GPU is not for import."""

    name: str
    device_type: str | None
    reason: str | Callable[[], str] = ""

    @property
    def unavailable(self) -> str:
        return self.reason if isinstance(self.reason, str) else self.reason()

    @property
    def available(self) -> bool:
        return not self.unavailable


_backends: dict[str, Backend] = {}
_default: dict[str, str] = {}


class _Local(threading.local):
    forced: Backend | None = None


_local = _Local()


# On CUDA tensors, for ops that were measured: the faster backend, and the results file that says so. All others: Triton. On ROCm
# there is only Triton.
ON_CUDA: dict[str, tuple[str, str]] = {}


def register(
    name: str, device_type: str | None, unavailable: str | Callable[[], str] = "", *, default: bool = False
) -> None:
    """Adds a backend. `default` makes it the one that serves `device_type` when none is asked for."""
    _backends[name] = Backend(name, device_type, unavailable)
    if default and device_type is not None and not unavailable:
        _default[device_type] = name


def available() -> dict[str, Backend]:
    """Every known backend by name, with the reason where it cannot be used."""
    return dict(_backends)


def _require(name: str) -> Backend:
    backend = _backends.get(name)
    if backend is None:
        raise ValueError(f"unknown backend '{name}'; known: {', '.join(sorted(_backends))}")
    if not backend.available:
        raise RuntimeError(f"backend '{name}' is not available here: {backend.unavailable}")
    return backend


@contextmanager
def use(name: str) -> Iterator[None]:
    """Within the context, in this thread, ops run on backend `name` wherever it serves the tensor's device.

    Backward runs on the backend that its forward ran on. Raises ValueError for an unknown name and RuntimeError, with the
    reason, for one that is not available here.
    """
    backend = _require(name)
    before = _local.forced
    _local.forced = backend
    try:
        yield
    finally:
        _local.forced = before


def asked_for() -> bool:
    """Whether :func:`use` or PYCKPT_BACKEND names a backend, rather than the device."""
    return (_local.forced or _environment) is not None


def select(device_type: str, op: str = "", without: str = "") -> str:
    """Name of the backend that serves tensors on `device_type` now, for an op of :mod:`pyckpt.functional`.

    `without`: one that does not do for the call at hand, unless it was asked for by name.
    """
    forced = _local.forced or _environment
    if forced is not None and forced.device_type in (None, device_type):
        return forced.name
    name = _default.get(device_type)
    return name if name is not None else _of_several(device_type, op, without)


def _of_several(device_type: str, op: str, without: str) -> str:
    if device_type != "cuda":
        return "reference"
    names = [ON_CUDA.get(op, ("triton",))[0], "triton", "cuda"]
    missing = {without, "cuda" if torch.version.hip else ""}
    usable = (name for name in names if name not in missing)
    return next((name for name in usable if _backends[name].available), "reference")


_warned_disabled = False


def disabled() -> bool:
    """Whether PYCKPT_DISABLE=1 is set: the operator's switch that turns conversion and recomputation off. Warns once."""
    global _warned_disabled
    off = os.environ.get("PYCKPT_DISABLE", "").lower() not in ("", "0", "false", "no", "off")
    if off and not _warned_disabled:
        _warned_disabled = True
        warnings.warn(
            "PYCKPT_DISABLE is set: pyckpt converts and recomputes nothing",
            RuntimeWarning,
            stacklevel=3,
        )
    return off


# Minor versions that the tests are run with; older ones are refused.
OLDEST_TRITON, NEWEST_TRITON = (3, 6), (3, 9)


@functools.cache
def triton_problem() -> str:
    """Why the installed Triton, if any, cannot be used; empty if it can. Does not import it."""
    if util.find_spec("triton") is None:
        return "Triton is not installed; pip install triton"
    try:
        version = metadata.version("triton")
    except metadata.PackageNotFoundError:
        return ""  # a distribution under another name: importing its kernels will tell
    found = re.match(r"(\d+)\.(\d+)", version)
    if found and (int(found[1]), int(found[2])) < OLDEST_TRITON:
        return (
            f"Triton {version} is installed, and the kernels need {supported_triton()}; pip install -U triton"
        )
    return ""


def supported_triton() -> str:
    return (
        f"{OLDEST_TRITON[0]}.{OLDEST_TRITON[1]} or newer (tested up to {NEWEST_TRITON[0]}.{NEWEST_TRITON[1]})"
    )


@functools.cache
def _why_no_triton() -> str:
    return triton_problem() if torch.cuda.is_available() else "this torch sees no GPU"


def triton_autotune() -> bool:
    """Whether PYCKPT_TRITON_AUTOTUNE=1 is set."""
    return os.environ.get("PYCKPT_TRITON_AUTOTUNE", "") not in ("", "0")


def covers(archs: list[str], ptx: list[str], capability: tuple[int, int]) -> bool:
    """Whether code for `archs` ("90", "90a"), or `ptx`, runs on a GPU of that compute capability.

    Compiled code runs on GPUs of its major version that are not older; PTX on all that are not older; arch-specific code
    (90a) on its own alone, and of a family (100f) on its major version. See the CUDA C++ Programming Guide, "Compatibility".
    """

    def runs(arch: str, anywhere: bool) -> bool:
        number = int(arch.rstrip("af"))
        major, minor = divmod(number, 10)
        if arch.endswith("a"):
            return (major, minor) == capability
        if arch.endswith("f") or not anywhere:
            return major == capability[0] and minor <= capability[1]
        return (major, minor) <= capability

    return any(runs(a, anywhere=False) for a in archs) or any(runs(a, anywhere=True) for a in ptx)


def built_for(cuda: dict[str, Any]) -> str:
    """The architectures in ``build_info()["cuda"]`` as text."""
    return ", ".join(
        [f"sm_{arch}" for arch in cuda["archs"]] + [f"PTX of compute_{arch}" for arch in cuda["ptx"]]
    )


@functools.cache
def _why_no_cuda() -> str:
    if native is None:
        return _why_no_native
    info = native.build_info()
    built = info["cuda"]
    if built is None:
        return f"built without CUDA: {info['no_cuda']}"
    if not torch.cuda.is_available():
        return f"no GPU that torch {torch.__version__} can use (torch.cuda.is_available() is False)"
    if torch.version.hip:
        return "this torch is built for ROCm"
    bindings: Any = torch._C  # whose stubs of CPU builds know nothing of it
    driver = bindings._cuda_getDriverVersion() // 1000
    if driver < int(built["compiler"].partition(".")[0]):
        return (
            f"built with CUDA {built['compiler']}, for which the driver is too old (it supports CUDA {driver}); update the "
            "driver, or reinstall pyckpt with an older toolkit in CUDA_HOME"
        )
    capability = torch.cuda.get_device_capability()
    if not covers(built["archs"], built["ptx"], capability):
        number = "{}{}".format(*capability)
        if capability < (8, 0):
            return f"this GPU is sm_{number}; the CUDA kernels need compute capability 8.0 or newer"
        return f"this GPU is sm_{number}; built for {built_for(built)}; set PYCKPT_CUDA_ARCHS={number} and reinstall pyckpt"
    return ""


register("reference", None)
if native is not None:
    if isa := os.environ.get("PYCKPT_CPU_ISA"):
        try:
            native.use_isa(isa)
        except ValueError as error:
            raise ValueError(f"PYCKPT_CPU_ISA: {error}; this machine has {native.supported_isas()}") from None
    register("cpu", "cpu", default=True)
else:
    register("cpu", "cpu", _why_no_native)
register("cuda", "cuda", _why_no_cuda)
register("triton", "cuda", _why_no_triton)

_environment: Backend | None = None
if _name := os.environ.get("PYCKPT_BACKEND"):
    try:
        _environment = _require(_name)
    except (ValueError, RuntimeError) as _error:
        raise type(_error)(f"PYCKPT_BACKEND: {_error}") from None
