"""csrc/cuda compiled by nvcc for each target, and what every kernel in it uses; no GPU is needed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import _cubin
from ._report import Row, widths

SOURCES = Path(__file__).parents[2] / "csrc" / "cuda"
TARGETS = ("sm_80", "sm_90", "sm_100")
FLAGS = ("-std=c++17", "-O3", "--fmad=false")  # as csrc/cuda.cmake
TYPES = {"float": "float32", "__nv_bfloat16": "bfloat16", "__half": "float16", "double": "float64"}

Job = tuple[str, Path, str]  # nvcc, source, target


def find_nvcc() -> str | None:
    """The compiler that a build would take, by the order of csrc/cuda.cmake."""
    homes = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    candidates = [
        os.environ.get("CUDACXX"),
        *(home / "bin" / "nvcc" for home in homes),
        shutil.which("nvcc"),
        "/usr/local/cuda/bin/nvcc",
        *sorted(Path(sysconfig.get_path("purelib"), "nvidia").glob("*/bin/nvcc")),
    ]
    return next((str(path) for path in candidates if path and Path(path).exists()), None)


def jobs(nvcc: str, quick: bool) -> Iterator[Job]:
    for target in ("sm_90",) if quick else TARGETS:
        for source in sorted(SOURCES.glob("*.cu")):
            yield nvcc, source, target


def run(job: Job) -> list[Row]:
    """Compiles one file, and reads what came out."""
    nvcc, source, target = job
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernels.cubin")
        command = [nvcc, *FLAGS, f"-arch={target}", "-cubin", "-o", str(cubin), str(source)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
        kernels = _cubin.read(cubin)
    names = subprocess.run(
        ["c++filt"], input="\n".join(k.name for k in kernels), capture_output=True, text=True, check=True
    ).stdout.splitlines()
    return [_row(described(name), kernel, target) for name, kernel in zip(names, kernels, strict=True)]


@dataclass
class Described:
    """A kernel by its demangled name. `loads` and `stores`: as many accesses of 16 bytes it makes at least; 0: none.

    `products`: the least number on tensor cores, of 16 x 8 x 16; `shared`: bytes of dynamic shared memory.
    """

    kernel: str
    dtype: str
    shape: str
    threads: int
    loads: int = 0
    stores: int = 0
    products: int = 0
    shared: int = 0


def described(name: str) -> Described:
    short = re.sub(r"pyckpt::(cuda::)?", "", name)
    match = re.match(r"(?:void )?(\w+)_kernel<(.*)>\(", short)
    if match is None:
        raise RuntimeError(f"not a kernel of csrc/cuda: {name}")
    kernel, arguments = match[1], match[2]
    if kernel.startswith("attention_"):
        return _attention(kernel.removeprefix("attention_"), arguments)
    dtype = next(TYPES[t] for t in re.findall(r"\w+", arguments) if t in TYPES)
    flags = [word == "true" for word in re.findall(r"true|false", arguments.partition(">, ")[2])]
    if kernel in ("vector", "single"):
        operation = re.split(r", (?=\w+(?:<\w+ ?>)?\s*$)", arguments)[-1].replace(" ", "")
        inputs = 2 if operation.startswith("Backward") else 1
        operation = re.sub(r"(\w+)<(\w+)>", lambda m: f"{m[2]} {m[1].lower()}", operation)
        dense = "DenseView" in arguments
        vectors = (2 if dense else 1) * (kernel == "vector")
        layout = "dense" if dense else "strided" if kernel == "vector" else "element by element"
        return Described(operation, dtype, layout, 256, vectors * inputs, vectors)
    if kernel == "add_blocks":
        return Described("norm backward, second stage", dtype, "", 512)
    if kernel == "norm_parameters":
        wide, centred = (word == "true" for word in re.findall(r"\b(true|false)\b", arguments))
        vectors = 1 if dtype == "float32" else 2  # of the sums, in float32
        return Described(
            f"{_norm(centred)} backward, parameters only",
            dtype,
            "by columns" if wide else "by columns, element by element",
            128,
            2 * wide,
            wide * vectors * (1 + centred),
        )
    layout = re.search(r"Layout<[^,]+, (\d+), (\w+)>", arguments)
    assert layout is not None, name
    chunks, wide = int(layout[1]), layout[2] == "true"
    shape = (f"in registers, {chunks} chunks" if chunks else "long") + (
        "" if wide else ", element by element"
    )
    operands = 1 if kernel.endswith("forward") else 2
    if kernel.startswith("norm"):
        title = f"{_norm(flags[0])} {kernel.removeprefix('norm_')}" + (
            ", with parameters" if flags[1:] == [True] else ""
        )
    else:
        title = kernel.replace("_", " ") + (", plain" if flags == [True] else "")
    slots = max(1, chunks) * wide
    return Described(title, dtype, shape, 128, slots * operands, slots)


# Tiles of csrc/cuda/attention*.cu by width: rows (for which a block's results are stored, in 4 warps), rows of the tile that
# moves past them, tiles that stay, and tiles that move (each in two buffers).
_ATTENTION = {
    "forward": {64: (128, 64, 1, 2), 128: (128, 32, 1, 2)},
    "queries": {64: (64, 64, 2, 2), 128: (64, 32, 2, 2)},
    "keys": {64: (64, 64, 2, 2), 128: (64, 32, 2, 2)},
}
_THREADS = 128


def _attention(kernel: str, arguments: str) -> Described:
    element, width = arguments.split(", ")[0], int(arguments.split(", ")[1])
    if kernel == "rows":
        return Described("attention backward, rows", TYPES[element], f"width {width}", 256, loads=2)
    rows, moving, fixed, streams = _ATTENTION[kernel][width]
    title = "attention forward" if kernel == "forward" else f"attention backward, {kernel}"
    chunks = width // 8
    fetched = (fixed * rows + 2 * streams * moving) * chunks // _THREADS
    stored = rows * chunks // _THREADS * (2 if kernel == "keys" else 1)
    # Products over the width give scores (and dP), over the moving rows what is stored (and sum(P K)).
    products = {"forward": 2, "queries": 4, "keys": 4}[kernel] * rows // 16 * moving // 8 * width // 16 // 4
    pitch = 2 * (width + 8)
    shared = (fixed * rows + 2 * streams * moving) * pitch + (16 * moving if kernel == "keys" else 0)
    dropout = ", dropout" if arguments.split(", ")[2] == "true" else ""
    return Described(
        title, TYPES[element], f"width {width}{dropout}", _THREADS, fetched, stored, products, shared
    )


def _norm(centred: bool) -> str:
    return "layer_norm" if centred else "rms_norm"


def _row(what: Described, kernel: _cubin.Kernel, target: str) -> Row:
    row = Row(what.kernel, what.dtype, what.shape, target, threads=what.threads)
    row.take(kernel, what.shared)
    row.check(wide=False, element_bits=8)
    for kind, counts, least in (("loads", row.loads, what.loads), ("stores", row.stores, what.stores)):
        if counts[128] < least:
            row.problems.append(f"{counts[128]} {kind} of 128 bits instead of {least}")
    if kernel.matrix < what.products:
        row.problems.append(f"{kernel.matrix} products on tensor cores instead of {what.products}")
    return row


def table(rows: Sequence[Row]) -> str:
    """Markdown, a line for each kernel; numbers that differ by target are separated by slashes."""
    kernels: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        kernels.setdefault((row.kernel, row.dtype, row.shape), []).append(row)
    titles = (
        "kernel",
        "dtype",
        "rows or view",
        "threads",
        "registers",
        "spills",
        "shared",
        "occupancy",
        "loads",
        "stores",
    )
    lines = ["| " + " | ".join(titles) + " |", "|" + " --- |" * len(titles)]

    def each(values: list[object]) -> str:
        return " / ".join(str(value) for value in (values if len(set(values)) > 1 else values[:1]))

    for (kernel, dtype, shape), same in sorted(kernels.items()):
        cells = (
            kernel, dtype, shape, each([r.threads for r in same]), each([r.registers for r in same]),
            each([r.spills for r in same]), each([r.shared for r in same]),
            each([f"{100 * (r.occupancy or 0):.0f} %" for r in same]),
            each([widths(r.loads) for r in same]), each([widths(r.stores) for r in same]),
        )  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
