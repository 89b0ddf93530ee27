"""Writes the table of features in docs/attention.md: ``python -m tests._attention_table``. A cell names the dtypes that pass.

The CUDA kernels are run by the emulator, which needs what tests/simt/build.py needs.
"""

import re
import sys
from pathlib import Path

import torch

from pyckpt import backends
from pyckpt.ops._registry import Unserved
from tests import _attention as attention
from tests import _interpreter, simt
from tests._oracle import DTYPES

PAGE = Path(__file__).parent.parent / "docs" / "attention.md"
BEGIN, END = "<!-- features -->\n", "<!-- end of features -->\n"
# What they serve, the rest being another backend's.
CUDA, ON_CUDA = "cuda_emulated", ("no mask", "causal, top left", "causal, bottom right", "dropout")
SHORT = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}


def _cell(name, backend):
    passed = []
    with backends.use(backend):
        for dtype in DTYPES:
            torch.manual_seed(0)
            try:
                shape = "one kv head, 64 wide" if backend == CUDA else "grouped heads, more keys"
                attention.check(name, attention.SHAPES[shape], dtype)
                passed.append(SHORT[dtype])
            except Unserved:
                pass
            except (AssertionError, NotImplementedError) as error:
                print(f"{name}, {backend}, {dtype}: {str(error)[:200]}", file=sys.stderr)
    return " ".join(passed) or "-"


def table():
    names = [b.name for b in backends.available().values() if b.available and b.device_type in (None, "cpu")]
    titles = ["cuda, emulated" if name == CUDA else name for name in names]
    rows = [f"| feature | {' | '.join(titles)} |", f"|---|{'---|' * len(names)}"]
    for feature in attention.FEATURES:
        rows.append(f"| {feature} | {' | '.join(_cell(feature, name) for name in names)} |")
    return "\n".join(rows) + "\n"


def expected(feature):
    """Its cells: reference, cpu, cuda, triton."""
    every = "fp32 bf16 fp16 fp64"
    return [every, every, "bf16 fp16" if feature in ON_CUDA else "-", every]


def features_told():
    """Of the page: feature -> its cells."""
    (body,) = re.findall(f"{BEGIN}(.*?){END}", PAGE.read_text(), re.S)
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in body.splitlines()[2:]]
    return {name: cells for name, *cells in rows}


if __name__ == "__main__":
    simt.install(CUDA, "fast")
    _interpreter.register()
    torch.set_num_threads(1)
    text = PAGE.read_text()
    head, tail = text.partition(BEGIN)[0], text.partition(END)[2]
    PAGE.write_text(f"{head}{BEGIN}{table()}{END}{tail}")
