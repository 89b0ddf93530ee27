"""The Triton kernels compiled offline, for NVIDIA and AMD, as their launchers would have them compiled; no GPU is needed."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pyckpt.triton_kernels._common import NARROWEST, WIDEST

from . import _cubin
from ._launches import Launch, Subject, recorded, subjects
from ._report import Row

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
ROWS, USUAL = 8192, 4096
WIDTHS = [NARROWEST << i for i in range((WIDEST // NARROWEST).bit_length())] + [
    WIDEST + 64
]  # the last: rows in pieces
#: Subjects that stand for a kernel each: what the options of the others add to them is audited at the usual width.
MAIN = (
    "gelu forward", "gelu backward", "dropout", "layer_norm forward", "layer_norm recompute",
    "layer_norm backward, dx and parameters", "layer_norm backward, dx", "rms_norm forward, weight",
    "rms_norm backward, dx and parameters", "softmax forward", "softmax forward, additive mask, causal, dropout",
    "softmax backward", "softmax backward, additive mask, causal, dropout",
)  # fmt: skip

#: Widths of heads.
HEADS = (64, 128, 256)
NARROW = ("_add_blocks", "_parameter_gradients")  # programs of few columns, which reach 16 bytes only by rows

Job = tuple[str, str, torch.dtype, int, bool]  # target, subject, dtype, columns, aligned


def jobs(quick: bool) -> Iterator[Job]:
    """What to compile. Whole: every option in every dtype at the usual width; every width for sm_90, some for the other targets,
    in two dtypes; misaligned addresses and odd widths. Quick: every option, a few widths, and one width for the other targets,
    in bfloat16."""
    attention = [subject.name for subject in subjects() if subject.name.startswith("attention")]
    yield from _attention_jobs(attention, quick)
    names = [subject.name for subject in subjects() if subject.name not in attention]
    assert set(MAIN) <= set(names)
    some = (NARROWEST, WIDEST, WIDEST + 64)
    for name in names:
        for dtype in (torch.bfloat16,) if quick else DTYPES:
            yield "sm_90", name, dtype, USUAL, True
    for target in TARGETS:
        for dtype in (torch.bfloat16,) if quick else (torch.bfloat16, torch.float32):
            every = some if quick else WIDTHS
            for columns in every if target == "sm_90" else (USUAL,) if quick else (*some, USUAL):
                for name in MAIN:
                    yield target, name, dtype, columns, True
    for name in MAIN:
        yield "sm_90", name, torch.bfloat16, USUAL + 1, False


def _attention_jobs(names: list[str], quick: bool) -> Iterator[Job]:
    """Whole: every option in bfloat16 at width 128 for sm_90; causal for every target, width and dtype. Quick: causal, bfloat16,
    width 128, for a GPU of each maker."""
    causal = [name for name in names if name.endswith(", causal")]
    for target in ("sm_90", "gfx942") if quick else TARGETS:
        yield from ((target, name, torch.bfloat16, 128, True) for name in causal)
    if quick:
        return
    for name in names:
        yield "sm_90", name, torch.bfloat16, 128, True
    for name in causal:
        for width in HEADS:
            yield "sm_90", name, torch.bfloat16, width, True
        for dtype in (torch.float16, torch.float32, torch.float64):
            yield "sm_90", name, dtype, 64, True


def run(job: Job) -> list[Row]:
    """Compiles what the job's launches need, and reads what came out."""
    target, name, dtype, columns, aligned = job
    subject = next(s for s in subjects() if s.name == name)
    amd = TARGETS[target].backend == "hip"
    with mock.patch.object(torch.version, "hip", "offline" if amd else None):  # what launchers ask
        launches = recorded(lambda: subject.call(ROWS, columns, dtype), aligned)
    with tempfile.TemporaryDirectory() as folder, triton.knobs.cache.scope():
        triton.knobs.cache.dir = folder
        return [_row(job, subject, launch, Path(folder, "kernel.cubin")) for launch in launches]


def _row(job: Job, subject: Subject, launch: Launch, file: Path) -> Row:
    target, name, dtype, columns, aligned = job
    attributes = {(index,): [["tt.divisibility", 16]] for index in launch.aligned}
    source = ASTSource(launch.kernel, launch.types, launch.constants, attributes)
    options: dict[str, Any] = {"num_warps": launch.warps, "enable_fp_fusion": False}
    if launch.stages is not None:
        options["num_stages"] = launch.stages
    compiled = triton.compile(source, target=TARGETS[target], options=options)
    width = f"{columns}" if aligned else f"{columns}, misaligned"
    row = Row(f"{name} [{launch.kernel.__name__}]", str(dtype).removeprefix("torch."), width, target)
    row.shared = compiled.metadata.shared
    row.threads = launch.warps * TARGETS[target].warp_size
    wide = aligned and subject.contiguous and launch.kernel.__name__ not in NARROW
    if TARGETS[target].backend == "cuda":
        file.write_bytes(compiled.asm["cubin"])
        (kernel,) = _cubin.read(file)
        row.take(kernel, dynamic_shared=row.shared)
        # With masks, bounds or dropout, and for wider heads, backward's tiles are too small for a group of warps: larger ones
        # spill.
        grouped = target == "sm_90" and columns <= 128 and name.endswith((", plain", ", causal"))
        matrix = kernel.group_matrix if grouped else kernel.matrix
    else:
        _read_amd(row, compiled.asm["amdgcn"])
        matrix = len(_AMD_MATRIX.findall(compiled.asm["amdgcn"]))
    if (
        dtype.itemsize == 2
        and name.startswith("attention")
        and launch.kernel.__name__ != "_row_products"
        and not matrix
    ):
        row.problems.append("no matrix instructions of the kind that is fast there")
    row.check(wide=wide, element_bits=8 * dtype.itemsize)
    return row


def is_shown(row: Row) -> bool:
    """Whether the document has this row; there are too many for all."""
    subject = row.kernel.partition(" [")[0]
    if subject.startswith("attention"):
        return subject.endswith(", causal") and (row.dtype, row.shape) == ("bfloat16", "128")
    return subject in MAIN and (row.dtype, row.shape) == ("bfloat16", f"{USUAL}")


_AMD_MATRIX = re.compile(r"^\s*v_mfma_", re.MULTILINE)
_AMD_ACCESS = re.compile(r"^\s*(global|buffer)_(load|store)_(\w+)", re.MULTILINE)
_AMD_WIDTHS = {"dwordx4": 128, "dwordx3": 96, "dwordx2": 64, "dword": 32, "b128": 128, "b64": 64, "b32": 32}


def _read_amd(row: Row, assembly: str) -> None:
    """Registers, spills and access widths from AMD's assembly text."""
    for key, field in (("vgpr_count", "registers"), ("vgpr_spill_count", "spills")):
        found = re.search(rf"^\s*\.{key}:\s*(\d+)", assembly, re.MULTILINE)
        assert found, f"no {key} in the assembly"
        setattr(row, field, int(found[1]))
    row.spills += len(re.findall(r"^\s*scratch_(?:load|store)", assembly, re.MULTILINE))
    for _, kind, form in _AMD_ACCESS.findall(assembly):
        width = _AMD_WIDTHS.get(form.split("_")[0], 8 if "byte" in form else 16)
        (row.loads if kind == "load" else row.stores)[width] += 1
