"""python -m pyckpt doctor: what it prints, and that its check finds a kernel that is wrong."""

import resource
import subprocess
import sys

import pytest
import torch

import pyckpt
from pyckpt import __main__ as cli
from pyckpt import backends, doctor
from pyckpt.ops import activation, norm


@pytest.fixture(autouse=True)
def _only_what_ships(monkeypatch):
    """Not the backends that other tests of this process have registered."""
    shipped = {name: b for name, b in backends.available().items() if "_" not in name}
    monkeypatch.setattr(backends, "_backends", shipped)


def doctor_process(*arguments, **kwargs):
    return subprocess.run(
        [sys.executable, "-m", "pyckpt", "doctor", *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        **kwargs,
    )


def test_as_a_user_runs_it(native):
    """The command of the README, within the minute it promises (of processor time: the machine may be busy)."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = doctor_process("--check")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stdout + done.stderr
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 60
    assert torch.__version__ in done.stdout
    assert f"instruction set  {native.supported_isas()[0]}" in done.stdout
    assert native.build_info()["compiler"] in done.stdout
    assert "triton     not available: " in done.stdout or backends.available()["triton"].available
    assert "triton: no GPU yet" in done.stdout
    assert f"{len(doctor.CASES) * 4} right, 0 wrong" in done.stdout


def test_environment_is_shown(monkeypatch):
    monkeypatch.setenv("PYCKPT_CPU_ISA", "x86-64-v3")
    monkeypatch.setenv("UNRELATED_SECRET", "hunter2")
    text = doctor.describe()
    assert "PYCKPT_CPU_ISA" in text and "hunter2" not in text


@pytest.mark.parametrize("first", ["pyckpt", "torch"])
def test_one_openmp_runtime(first, native):
    """Kernels and torch have to share their threads, whichever is imported first."""
    code = f"import {first}, pyckpt.doctor as doctor\n"
    code += "print(len(doctor.openmp_runtimes()), doctor.backends.native.build_info()['openmp'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.stdout.split() == ["1", "True"], done.stdout + done.stderr


def test_every_public_op_is_reported_and_checked():
    checked = {case.name.partition(",")[0] for case in doctor.CASES}
    assert checked == set(pyckpt.functional.__all__) == set(doctor.RUN_ON)


def test_check_covers_every_dtype(native):
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    results = doctor.check()
    assert {(r.op, r.dtype, r.backend) for r in results} == {
        (case.name, dtype, "cpu") for case in doctor.CASES for dtype in doctor.DTYPES
    }
    assert all(r.passed for r in results), doctor.table(results)
    assert torch.equal(state, torch.get_rng_state()) and threads == torch.get_num_threads()


def nudged(kernel):
    """`kernel` with one element of its first result off by a half."""

    def wrong(*arguments):
        result = kernel(*arguments)
        first = result[0] if isinstance(result, tuple) else result
        first.view(-1)[5] += 0.5
        return result

    return wrong


@pytest.mark.parametrize(
    ("op", "dtypes"),
    [
        (activation.silu_fwd, 4),
        (activation.silu_bwd, 4),
        (norm._rms_norm.bwd, 4),
        (norm._layer_norm.recompute, 8),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_check_finds_a_wrong_kernel(op, dtypes, native, monkeypatch, capsys):
    """One element in 73,482 off: exit code 1, and the op is named."""
    monkeypatch.setitem(op.kernels, "cpu", nudged(op.kernels["cpu"]))
    assert cli.main(["doctor", "--check"]) == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if line.endswith("WRONG")]
    assert len(lines) == dtypes and all(op.name.rpartition("_")[0] in line for line in lines)


def test_check_goes_on_after_an_exception(native, monkeypatch):
    def fail(*_):
        raise RuntimeError("planted")

    monkeypatch.setitem(activation.relu_fwd.kernels, "cpu", fail)
    wrong = [r for r in doctor.check() if not r.passed]
    assert len(wrong) == 4 and all(r.failure == "RuntimeError: planted" for r in wrong)
    assert "RuntimeError: planted" in doctor.table(wrong)


def test_nan_is_wrong():
    exact = torch.ones(3, dtype=torch.float64)
    assert doctor._excess(torch.tensor([1.0, float("nan"), 1.0]), torch.ones(3), exact) == float("inf")


def test_nothing_to_check_is_no_success(monkeypatch, capsys):
    only_reference = {"reference": backends.available()["reference"]}
    monkeypatch.setattr(backends, "available", lambda: only_reference)
    assert cli.main(["doctor", "--check"]) == 1
    assert "nothing to compare" in capsys.readouterr().out


def test_only_what_a_backend_has_is_checked():
    by_name = {case.name: case for case in doctor.CASES}
    assert all(case.served_on("cpu") and case.served_on("reference") for case in doctor.CASES)
    assert by_name["gelu, tanh"].served_on("triton") and not by_name["attention, bias"].served_on("cuda")
