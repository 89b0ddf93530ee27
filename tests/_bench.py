"""The benchmark belongs to the checkout: tests of it are skipped where the installed package is tested."""

from pathlib import Path

import pytest

import pyckpt

ROOT = Path(__file__).resolve().parents[1]
if Path(pyckpt.__file__).resolve().parents[1] != ROOT:
    pytest.skip(
        "the benchmark belongs to the checkout, not to the installed package", allow_module_level=True
    )

#: Fields of every benchmark row.
FIELDS = {
    *("op", "dtype", "shape", "impl", "backend", "forward_ms", "step_ms", "ratio", "gbps", "copy_gbps"),
    *("saved_bytes", "peak_bytes"),
}
