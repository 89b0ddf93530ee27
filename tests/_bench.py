"""The benchmark for its tests, which are skipped where it is not: it belongs to the checkout and is never installed."""

import sys
from pathlib import Path

import pytest
import torch

import pyckpt

ROOT = Path(__file__).resolve().parents[1]
if Path(pyckpt.__file__).resolve().parents[1] != ROOT:
    pytest.skip(
        "the installed package is under test, and the benchmark is not in it", allow_module_level=True
    )
sys.path.insert(0, str(ROOT))

from bench import __main__ as cli  # noqa: E402
from bench import _check, _encoder, _harness, _report, _run, minilm, ops  # noqa: E402

CPU = torch.device("cpu")

__all__ = ["CPU", "ROOT", "_check", "_encoder", "_harness", "_report", "_run", "cli", "minilm", "ops"]
