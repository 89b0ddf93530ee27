"""What ``python -m pyckpt doctor`` prints and checks.

A check runs an op and its backward on a backend and on the reference backend, and compares both with the reference in
float64 on the same inputs: the backend may be as far off as 1.1 times the reference in that dtype, and one unit in the last
place of the largest element. Float64 has nothing wider to be compared with; there the two may differ by a few such units.
"""

from __future__ import annotations

import math
import os
import platform
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import __version__, backends
from . import functional as F
from .ops._registry import DTYPES, Op, Unserved

SHAPE = (6, 37, 331)
SEED = 2026
#: Units in the last place of the largest element by which two float64 implementations may differ.
FLOAT64_ULPS = 16

_NO_GPU = {
    "cuda": "no GPU yet: emulated on the CPU only",
    "triton": "no GPU yet: Triton's interpreter only",
}
#: Where each op has been run so far, by backend. What is missing has no kernel, or none that was ever run.
RUN_ON: dict[str, dict[str, str]] = {name: {"cpu": "x86-64 hardware", **_NO_GPU} for name in F.__all__}

_PACKAGES = ("torch", "numpy", "triton", "transformers")
_VARIABLES = re.compile(
    r"(PYCKPT|OMP|GOMP|KMP|MKL|MALLOC|PYTORCH|TORCH|TRITON|CUDA)_|GLIBC_TUNABLES$|LD_PRELOAD$|CXX$"
)


@dataclass(frozen=True)
class Case:
    """An op as called by users: ``call(x, *parameters)``, the parameters being vectors of the last dimension's size."""

    name: str
    call: Callable[..., Tensor]
    parameters: int = 0
    shape: tuple[int, ...] = SHAPE

    def served_on(self, backend: str, partly: bool = False) -> bool:
        """Whether the backend has kernels for it; `partly`: for some calls at least."""
        family = self.name.partition(",")[0]
        return all(
            backend in op.kernels and (partly or backend not in op.partial)
            for op in Op.all
            if op.family == family
        )


def _mask(x: Tensor) -> Tensor:
    """Additive, broadcast over the first dimension, -inf at every fifth key."""
    mask = torch.linspace(-2, 2, x.shape[-2] * x.shape[-1], dtype=torch.float64).reshape(x.shape[-2:])
    mask[:, ::5] = -math.inf
    return mask.to(x.device, x.dtype)


def _keep(x: Tensor) -> Tensor:
    """Boolean; nothing kept in the first row."""
    keep = torch.arange(x.shape[-2] * x.shape[-1], device=x.device).reshape(x.shape[-2:]) % 3 != 0
    keep[0] = False
    return keep


def _attention(x: Tensor, **options: Any) -> Tensor:
    """Of 6 heads with one key head for every two; keys and values are the same numbers in another order."""
    keys, values = x[1::2].flip(1), x[::2].flip(2)
    return F.attention(x, keys, values, scale=0.02, enable_gqa=True, **options)


CASES = (
    Case("gelu", F.gelu),
    Case("gelu, tanh", lambda x: F.gelu(x, approximate="tanh")),
    Case("gelu, sigmoid", lambda x: F.gelu(x, approximate="sigmoid")),
    Case("silu", F.silu),
    Case("relu", F.relu),
    Case("layer_norm", lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b), 2),
    Case("layer_norm, plain", lambda x: F.layer_norm(x, x.shape[-1:])),
    Case("rms_norm", lambda x, w: F.rms_norm(x, x.shape[-1:], w), 1),
    Case("dropout", lambda x: F.dropout(x, 0.3)),
    Case("softmax", F.softmax),
    Case("softmax, causal", lambda x: F.softmax(x, scale=0.7, mask=_mask(x), is_causal=True)),
    Case("softmax, boolean", lambda x: F.softmax(x, scale=0.7, mask=_keep(x))),
    Case("softmax, dropout", lambda x: F.softmax(x, scale=0.7, dropout_p=0.3)),
    Case("attention", lambda x: _attention(x)),
    Case("attention, causal", lambda x: _attention(x, is_causal=True, window=(20, None), softcap=5.0)),
    Case("attention, 64 wide", lambda x: _attention(x, is_causal=True, dropout_p=0.3), shape=(6, 37, 64)),
    Case("attention, bias", lambda x: _attention(x, attn_mask=_mask(x[..., :37]))),
    Case("attention, boolean", lambda x: _attention(x, attn_mask=_keep(x[..., :37]), dropout_p=0.3)),
)


@dataclass(frozen=True)
class Result:
    """One op, dtype and backend. Errors are fractions of what is allowed.

    ``recomputed``: the output was rebuilt bit for bit from what the op keeps for backward; None: it failed before.
    """

    op: str
    dtype: torch.dtype
    backend: str
    forward: float
    backward: float
    recomputed: bool | None = None
    failure: str = ""

    @property
    def passed(self) -> bool:
        return not self.failure and self.recomputed is not False and self.forward <= 1 and self.backward <= 1


def _run(case: Case, backend: str, tensors: Sequence[Tensor], grad: Tensor) -> tuple[list[Tensor], Tensor]:
    """[output, gradient of each tensor], and the output as it is rebuilt from what its node keeps."""
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    torch.manual_seed(SEED)  # the same dropout masks everywhere
    with backends.use(backend):
        y = case.call(*leaves)
        node: Any = y.grad_fn
        while not hasattr(node, "saved_tensors"):  # views
            node = node.next_functions[0][0]
        saved = node.saved_tensors or leaves[:1]
        kept = next((t for t in saved if t is not None and t.data_ptr() == y.data_ptr()), None)
        again = type(node)._forward_cls.recompute(node, *saved).detach() if kept is None else kept.view_as(y)
    return [y.detach(), *torch.autograd.grad(y, leaves, grad)], again


def _ulp(largest: float, dtype: torch.dtype) -> float:
    """Distance of neighbouring numbers of `dtype` at `largest`."""
    info = torch.finfo(dtype)
    return float(2.0 ** math.floor(math.log2(max(largest, info.tiny))) * info.eps)


def _excess(actual: Tensor, reference: Tensor, exact: Tensor) -> float:
    """The error of `actual` as a fraction of what is allowed; infinite if it has NaN or infinity where `exact` has none."""
    unit = _ulp(float(exact.abs().max()), actual.dtype)
    if actual.dtype == torch.float64:
        allowed = FLOAT64_ULPS * unit
    else:
        allowed = 1.1 * float((reference.double() - exact).abs().max()) + unit
    error = float((actual.double() - exact).abs().max())
    return error / allowed if math.isfinite(error) else math.inf


def _compare(case: Case, dtype: torch.dtype, backend: str, device: str, threads: int) -> Result | None:
    """None: the backend's kernels are not made for this call."""
    generator = torch.Generator().manual_seed(SEED)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)

    tensors = [random(*case.shape) * 3, *(random(case.shape[-1]) for _ in range(case.parameters))]
    grad = random(*case.shape)
    try:
        torch.set_num_threads(threads)
        actual, again = _run(case, backend, tensors, grad)
        torch.set_num_threads(
            1
        )  # on a busy machine threads that wait for each other would take most of the time
        reference, _ = _run(case, "reference", tensors, grad)
        exact, _ = _run(case, "reference", [t.double() for t in tensors], grad.double())
    except Unserved:
        return None
    except Exception as error:  # a report has to go on to the next op
        return Result(
            case.name, dtype, backend, math.inf, math.inf, failure=f"{type(error).__name__}: {error}"
        )
    excess = [_excess(*triple) for triple in zip(actual, reference, exact, strict=True)]
    recomputed = torch.equal(actual[0], again)
    return Result(case.name, dtype, backend, excess[0], max(excess[1:]), recomputed)


def check() -> list[Result]:
    """Every op and dtype on every backend that is available here and has it; empty if there is none but the reference."""
    serving = [b for b in backends.available().values() if b.available and b.device_type is not None]
    threads = torch.get_num_threads()
    with torch.random.fork_rng():
        try:
            results = [
                _compare(case, dtype, backend.name, backend.device_type or "cpu", threads)
                for backend in serving
                for case in CASES
                if case.served_on(backend.name, partly=True)
                for dtype in DTYPES
            ]
            return [result for result in results if result is not None]
        finally:
            torch.set_num_threads(threads)


def table(results: Sequence[Result]) -> str:
    """The results of :func:`check` as text."""
    if not results:
        return "\nCheck: nothing to compare, only the reference backend is available here."
    lines = [
        "",
        "Check against the reference backend: error / allowed error, and whether the recompute is exact",
    ]
    lines.append(
        f"  {'op':<18} {'dtype':<9} {'backend':<8} {'forward':>8} {'backward':>8}  recompute  result"
    )
    for r in results:
        dtype = str(r.dtype).removeprefix("torch.")
        recomputed = {True: "exact", False: "DIFFERS", None: "-"}[r.recomputed]
        numbers = f"{r.forward:8.2f} {r.backward:8.2f}  {recomputed:<9}"
        verdict = f"{'ok' if r.passed else 'WRONG'}{': ' if r.failure else ''}{r.failure}"
        lines.append(f"  {r.op:<18} {dtype:<9} {r.backend:<8} {numbers}  {verdict}")
    wrong = sum(not r.passed for r in results)
    lines.append(f"  {len(results) - wrong} right, {wrong} wrong")
    return "\n".join(lines)


def describe() -> str:
    """Versions, machine, backends and settings as text."""
    sections = {
        "Versions": _versions(),
        "Machine": _machine(),
        "Backends": {
            name: "available" if backend.available else f"not available: {backend.unavailable}"
            for name, backend in backends.available().items()
        },
        "CPU kernels": _cpu_kernels(),
        "CUDA kernels": _cuda_kernels(),
        "Environment": {k: v for k, v in sorted(os.environ.items()) if _VARIABLES.match(k)}
        or {"(none set)": ""},
        "Ops have run on": _ops(),
    }
    lines = []
    for title, entries in sections.items():
        width = max(map(len, entries))
        lines += [title, *(f"  {key:<{width}}  {value}".rstrip() for key, value in entries.items())]
    return "\n".join(lines)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _versions() -> dict[str, str]:
    found = {"pyckpt": __version__, **{package: _version(package) for package in _PACKAGES}}
    found["torch"] = f"{torch.__version__} (CUDA {torch.version.cuda or 'none'})"
    found["python"] = f"{platform.python_implementation()} {platform.python_version()}"
    if backends.native is None:
        found["native module"] = "none: built without a C++ compiler"
    else:
        info = backends.native.build_info()
        found["native module"] = f"{info['version']}, {info['compiler']}, pybind11 {info['pybind11']}"
    return found


def _machine() -> dict[str, str]:
    found = {"system": f"{platform.system()} {platform.release()}, {platform.machine()}"}
    try:
        model = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        model = None
    found["processor"] = model[1] if model else platform.processor() or "unknown"
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found["cores"] = f"{affinity} of {os.cpu_count()} usable by this process"
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    found["gpu"] = ", ".join(gpus) or "none that this torch can use"
    return found


def openmp_runtimes() -> list[str]:
    """Paths of the OpenMP libraries loaded into this process, where the system tells (Linux)."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return []
    return sorted(set(re.findall(r"\S*/lib(?:gomp|iomp|omp)[^/\s]*\.so\S*", maps)))


def _openmp() -> str:
    runtimes = openmp_runtimes()
    found = ", ".join(runtimes) or "no library seen"
    if len(runtimes) > 1:
        found += " (more than one: their threads compete)"
    if backends.native is not None and not backends.native.build_info()["openmp"]:
        found += " (without GOMP_parallel: the kernels run on one thread)"
    return found


def _cpu_kernels() -> dict[str, str]:
    found = {}
    if backends.native is not None:
        info = backends.native.build_info()
        found["instruction set"] = backends.native.isa()
        found["runs here"] = ", ".join(backends.native.supported_isas())
        found["built"] = ", ".join(info["isas"])
    found["threads"] = str(torch.get_num_threads())
    found["OpenMP"] = _openmp()
    return found


def _cuda_kernels() -> dict[str, str]:
    info = {} if backends.native is None else backends.native.build_info()
    built = info.get("cuda")
    if not built:
        return {"built": f"no: {info.get('no_cuda', 'no C++ compiler')}"}
    found = {"built": f"nvcc {built['compiler']}, for {backends.built_for(built)}"}
    for i in range(torch.cuda.device_count()):
        capability = torch.cuda.get_device_capability(i)
        covered = backends.covers(built["archs"], built["ptx"], capability)
        found[f"GPU {i}"] = "sm_{}{}, {}covered".format(*capability, "" if covered else "not ")
    return found


def _ops() -> dict[str, str]:
    names = [name for name in backends.available() if name != "reference"]
    return {
        op: ", ".join(f"{name}: {RUN_ON[op].get(name, 'none yet')}" for name in names)
        for op in sorted(RUN_ON)
    }


if __name__ == "__main__":
    sys.exit("run it as: python -m pyckpt doctor")
