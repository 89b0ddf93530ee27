"""Writes the table of features in docs/attention.md: ``python -m tests._attention_table``. A cell names the dtypes that pass."""

import re
import sys
from pathlib import Path

import torch

from pyckpt import backends
from tests import _attention as attention
from tests import _interpreter
from tests._oracle import DTYPES

PAGE = Path(__file__).parent.parent / "docs" / "attention.md"
BEGIN, END = "<!-- features -->\n", "<!-- end of features -->\n"
SHORT = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}


def _cell(name, backend):
    passed = []
    with backends.use(backend):
        for dtype in DTYPES:
            torch.manual_seed(0)
            try:
                attention.check(name, attention.SHAPES["grouped heads, more keys"], dtype)
                passed.append(SHORT[dtype])
            except (AssertionError, NotImplementedError) as error:
                print(f"{name}, {backend}, {dtype}: {str(error)[:200]}", file=sys.stderr)
    return " ".join(passed) or "-"


def table():
    names = [b.name for b in backends.available().values() if b.available and b.device_type in (None, "cpu")]
    rows = [f"| feature | {' | '.join(names)} |", f"|---|{'---|' * len(names)}"]
    for feature in attention.FEATURES:
        rows.append(f"| {feature} | {' | '.join(_cell(feature, name) for name in names)} |")
    return "\n".join(rows) + "\n"


def features_told():
    """Of the page: feature -> its cells."""
    (body,) = re.findall(f"{BEGIN}(.*?){END}", PAGE.read_text(), re.S)
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in body.splitlines()[2:]]
    return {name: cells for name, *cells in rows}


if __name__ == "__main__":
    _interpreter.register()
    torch.set_num_threads(1)
    text = PAGE.read_text()
    head, tail = text.partition(BEGIN)[0], text.partition(END)[2]
    PAGE.write_text(f"{head}{BEGIN}{table()}{END}{tail}")
