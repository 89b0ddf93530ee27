"""python -m bench.audit: compiles the kernels for every target, without a GPU, and reads what came out.

Fails if a kernel spills registers, moves less than 16 bytes an access where its operands are contiguous and aligned, or, being
attention in 16 bits, multiplies without matrix instructions. Writes docs/audit.md and, where there is an nvcc,
docs/audit_cuda.md, unless --check or --quick is given.
"""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from . import _cuda, _triton
from ._report import Row, summary, table

DOCUMENT = Path(__file__).parents[2] / "docs" / "audit.md"
CUDA_DOCUMENT = DOCUMENT.with_name("audit_cuda.md")
CUDA_INTRODUCTION = f"""# What the compiled CUDA kernels use

Written by `make audit` (python -m bench.audit), which compiles csrc/cuda with nvcc for {", ".join(_cuda.TARGETS)}, without
a GPU, and fails if a kernel uses local memory (a spill) or makes fewer accesses of 128 bits than it has vectors to move; and
attention, if there are fewer products on tensor cores than its tiles need. Numbers that differ by target stand in its order,
between slashes. Accesses are counted as instructions: 4x128 are four that move 128 bits a thread; asynchronous copies to shared
memory count as loads. Rows stay in registers, as chunks of 16 bytes, as far as up to 512 threads can hold them; "long" ones are
read again for each sum. "Element by element" is for addresses that are not aligned to 16 bytes, and for float64. Kernels whose
blocks have 128 to 512 threads are shown with 128. Nothing here was run: it says what a GPU would be given, not how fast it is.
"""
INTRODUCTION = """# What the compiled kernels use

Written by `make audit` (python -m bench.audit), which compiles the Triton kernels without a GPU, for each target as the launchers
choose block sizes and warps from the shape, and fails if a kernel spills registers, if accesses to contiguous, aligned operands
are narrower than 16 bytes, or if attention in 16 bits has no matrix instructions (on sm_90, of plain and causal attention up to a
width of 128: those of four warps together, wgmma). The first table counts all that were compiled; the second shows those in
bfloat16 for rows of 4096 and for causal attention of width 128.

Registers, spills and widths are read from the machine code (NVIDIA) or the assembly (AMD); occupancy is the share of a
multiprocessor's warps that its registers and shared memory allow. Accesses are counted as instructions: 4x128 are four that move
128 bits a thread; narrower ones are numbers kept for each row. Nothing here was run: it says what a GPU would be given, not how
fast it is.
"""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.audit", description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="a part, for every change: see bench/audit/_triton.py"
    )
    parser.add_argument(
        "--check", action="store_true", help="do not write docs/audit.md and docs/audit_cuda.md"
    )
    parser.add_argument("--only", choices=["triton", "cuda"], help="the kernels of one backend")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args(arguments)
    start = time.monotonic()
    rows: dict[str, Row] = {}
    cuda: list[Row] = []
    with ProcessPoolExecutor(options.processes, mp_context=get_context("spawn")) as pool:
        if options.only != "cuda":
            jobs = list(dict.fromkeys(_triton.jobs(options.quick)))
            for found in pool.map(_triton.run, jobs, chunksize=4):
                rows |= {f"{row.kernel} {row.dtype} {row.shape} {row.target}": row for row in found}
        if options.only != "triton":
            nvcc = _cuda.find_nvcc()
            if nvcc is None:
                print("no nvcc: the CUDA kernels are left out")
            else:
                for found in pool.map(_cuda.run, _cuda.jobs(nvcc, options.quick)):
                    cuda += found
    wrong = [row for row in (*rows.values(), *cuda) if row.problems]
    for row in wrong:
        print(f"WRONG: {row.kernel}, {row.dtype}, {row.shape}, {row.target}: {'; '.join(row.problems)}")
    print(f"{len(rows) + len(cuda)} kernels compiled in {time.monotonic() - start:.0f} s, {len(wrong)} wrong")
    if not (options.quick or options.check or wrong):
        if rows:
            shown = [row for row in rows.values() if _triton.is_shown(row)]
            DOCUMENT.write_text(f"{INTRODUCTION}\n{summary(list(rows.values()))}\n\n{table(shown)}\n")
        if cuda:
            CUDA_DOCUMENT.write_text(f"{CUDA_INTRODUCTION}\n{_cuda.table(cuda)}\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
