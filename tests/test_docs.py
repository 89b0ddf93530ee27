"""The examples of README.md and docs/ run as they stand. From a checkout only: the pages are not installed."""

import re
from pathlib import Path

import pytest
import torch

import pyckpt

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def examples(page):
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.S | re.M)


def test_there_are_examples():
    if not PAGES[0].exists():
        pytest.skip("no checkout around the tests")
    assert sum(len(examples(page)) for page in PAGES) >= 4


@pytest.mark.parametrize("page", [page for page in PAGES if page.exists()], ids=lambda page: page.name)
def test_examples(page):
    names = {
        "torch": torch,
        "pyckpt": pyckpt,
        "scores": torch.randn(2, 16, 16, requires_grad=True),
        "keep": torch.rand(16, 16) > 0.3,
        "x": torch.randn(64, 64),
        "model": torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64)),
    }
    for example in examples(page):
        exec(compile(example, str(page), "exec"), names)
