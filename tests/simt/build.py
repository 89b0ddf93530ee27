"""Compiles csrc/cuda/*.cu for the CPU: ``python -m tests.simt [fast] [check]``.

The modules go to build/simt/<module>_<flavour>-<tag of this Python>, where Ninja rebuilds what has changed. "fast" runs kernels;
"check" also watches every access. Needs g++ (or the compiler in CXX), pybind11, Ninja, and CUDA's headers: those of a toolkit
(CUDA_HOME, CUDA_PATH, nvcc on PATH, /usr/local/cuda) or of the packages nvidia-cuda-runtime, nvidia-cuda-crt and
nvidia-cuda-cccl. No GPU, no nvcc.
"""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RUNTIME = HERE / "runtime"
KERNELS = ROOT / "csrc" / "cuda"
TOOLKIT = Path("/usr/local/cuda")
FLAVOURS = ("fast", "check")

# Instrumentation whose calls runtime/hooks.cpp answers. Frame pointers tell by which calls a thread came to a barrier.
CHECKS = (
    "-fsanitize=thread,alignment,bounds,shift,signed-integer-overflow,integer-divide-by-zero "
    "-fno-omit-frame-pointer -fno-builtin-memcpy -fno-builtin-memset -fno-builtin-memmove -Wno-tsan"
)
RENAMED = " ".join(f"--redefine-sym {name}=simt_{name}" for name in ("memcpy", "memmove", "memset"))


class Missing(RuntimeError):
    """Something that the build needs is not on this machine."""


def cuda_headers() -> Path:
    """The include folder of a CUDA toolkit, or of NVIDIA's packages in this environment."""
    candidates = [
        Path(os.environ[name], "include") for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)
    ]
    if nvcc := shutil.which("nvcc"):
        # A wrapper may stand on PATH: nvcc itself tells where it lies.
        told = subprocess.run([nvcc, "--dryrun", "x.cu"], capture_output=True, text=True).stderr
        candidates += [
            Path(line.partition("TOP=")[2], "include")
            for line in told.splitlines()
            if line.startswith("#$ TOP=")
        ]
    candidates.append(TOOLKIT / "include")
    for site in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        candidates += sorted(Path(site, "nvidia").glob("*/include"))
    for include in candidates:
        if all(
            (include / name).exists() for name in ("cuda_bf16.h", "vector_functions.h", "crt/host_defines.h")
        ):
            return include.resolve()
    raise Missing(
        "no CUDA headers: set CUDA_HOME to a toolkit, or pip install nvidia-cuda-runtime nvidia-cuda-crt nvidia-cuda-cccl "
        f"(looked in {', '.join(map(str, candidates))})"
    )


def ninja() -> str:
    beside = Path(sys.executable).with_name("ninja")
    found = str(beside) if beside.exists() else shutil.which("ninja")
    if found is None:
        raise Missing("no Ninja: pip install ninja")
    return found


def processor_flags() -> str:
    """`fused` of csrc/math.h shall round once, as on a GPU; on x86-64 that is an instruction of level v3."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return ""
    flags = Path("/proc/cpuinfo").read_text().partition("flags")[2].partition("\n")[0].split()
    return "-march=x86-64-v3" if {"fma", "avx2", "bmi2", "f16c", "movbe"} <= set(flags) else ""


def script(name: str, flavour: str, kernels: Iterable[Path], host: Iterable[Path], defines: str) -> str:
    """The text of build.ninja for the module `name`."""
    try:
        import pybind11
    except ImportError:
        raise Missing("no pybind11: pip install pybind11") from None
    compiler = os.environ.get("CXX") or "g++"
    if shutil.which(compiler.split()[0]) is None:
        raise Missing(f"no C++ compiler {compiler}")
    headers = cuda_headers()
    includes = [pybind11.get_include(), sysconfig.get_path("include"), str(headers), str(headers / "cccl")]
    common = (
        f"-std=c++17 -g1 -fPIC -fvisibility=hidden -fno-gnu-unique -ffp-contract=off -Wall -Wextra -Wno-unknown-pragmas "
        f"-DPYCKPT_SIMT_EMULATED -DSIMT_CHECK={int(flavour == 'check')} -DSIMT_MODULE={name} {defines} "
        f"-I{KERNELS} -I{RUNTIME} " + " ".join(f"-isystem {path}" for path in includes)
    )
    of_kernels = f"-O1 {CHECKS}" if flavour == "check" else "-O2"
    rename = f" && objcopy {RENAMED} $out" if flavour == "check" else ""

    def rule(name: str, command: str, then: str = "") -> list[str]:
        made = f"{command} -MMD -MF $out.d -c $in -o $out{then}"
        return [f"rule {name}", f"  command = {made}", "  depfile = $out.d", "  deps = gcc"]

    lines = [
        "ninja_required_version = 1.5",
        *rule("kernels", f"{compiler} {common} {of_kernels} {processor_flags()} -x c++", rename),
        *rule("host", f"{compiler} {common} -O2 -fno-omit-frame-pointer"),
        "rule link",
        f"  command = {compiler} -shared -Wl,-Bsymbolic,-z,nodelete $in -o $out",
    ]
    objects = {source: f"{source.stem}-kernels.o" for source in kernels}
    objects |= {
        source: f"{source.stem}-{source.parent.name}.o" for source in (*host, *sorted(RUNTIME.glob("*.cpp")))
    }
    lines += [
        f"build {file}: {'kernels' if s.suffix == '.cu' else 'host'} {s}" for s, file in objects.items()
    ]
    lines.append(f"build {name}{sysconfig.get_config_var('EXT_SUFFIX')}: link {' '.join(objects.values())}")
    return "\n".join(lines) + "\n"


def build(
    flavour: str,
    *,
    name: str = "pyckpt_cuda",
    kernels: Sequence[Path] | None = None,
    host: Sequence[Path] | None = None,
    defines: str = "",
) -> Path:
    """Builds a module and returns its file. Raises Missing, or RuntimeError with the compiler's messages.

    Args:
        flavour: "fast" or "check".
        name: what the module is called, with the flavour appended.
        kernels: .cu files; those of csrc/cuda if not given.
        host: C++ files beside them, which define ``pyckpt::bind_cuda``.
        defines: flags for all of them.
    """
    assert flavour in FLAVOURS, flavour
    name = f"{name}_{flavour}"
    kernels = sorted(KERNELS.glob("*.cu")) if kernels is None else kernels
    host = [KERNELS / "bindings.cpp"] if host is None else host
    folder = ROOT / "build" / "simt" / f"{name}-{sys.implementation.cache_tag}"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several test processes may start at once
        text = script(name, flavour, kernels, host, defines)
        written = folder / "build.ninja"
        if not written.exists() or written.read_text() != text:
            written.write_text(text)
        done = subprocess.run([ninja(), "-C", str(folder)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"building {name} failed:\n{done.stdout}{done.stderr}")
    return folder / f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}"
