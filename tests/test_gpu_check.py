"""bench/gpu_check: what it does without a GPU, how it decides to build, and its table, on made-up machines."""

import json
import subprocess
import sys
import types

import pytest
import torch

from bench import _harness, _peers, _run, gpu_check
from pyckpt import backends
from tests._bench import FIELDS, ROOT

CPU = torch.device("cpu")


@pytest.fixture
def gpu(monkeypatch):
    """A GPU that nothing is run on."""
    monkeypatch.setattr(gpu_check, "no_gpu", lambda: "")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_skipped_without_a_gpu(tmp_path):
    file = tmp_path / "check.json"
    environment = {"PYTHON": sys.executable, "PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [ROOT / "bench" / "gpu_check", "--json", file],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("skipped: ") and torch.__version__ in done.stdout
    assert json.loads(file.read_text())["rows"] == []


def test_bad_arguments(capsys):
    with pytest.raises(SystemExit):
        gpu_check.main(["--json", "/nowhere/at/all/x.json", "--ops"])
    assert "expected at least one argument" in capsys.readouterr().err


REASONS = {  # why the backend is not there before the build: what is run
    "": 0,
    "built without CUDA: no nvcc was found": 1,
    "this GPU is sm_90; built for sm_80; set PYCKPT_CUDA_ARCHS=90 and reinstall pyckpt": 1,
    "ImportError: pyckpt's native module could not be loaded": 1,
    "built with CUDA 13.0, for which the driver is too old": 0,
}


@pytest.mark.parametrize("reason", REASONS)
def test_builds_what_is_missing_for_this_gpu(monkeypatch, gpu, reason):
    reasons, commands = [reason, ""], []
    monkeypatch.setattr(gpu_check, "why_not_cuda", lambda: reasons.pop(0))

    def run(command, seconds, **environment):
        commands.append((command[1:], environment))
        return {"status": "ok", "seconds": 1.0, "last_line": ""}

    monkeypatch.setattr(gpu_check, "run", run)
    result = gpu_check.build(gpu_check.Clock(100))
    assert len(commands) == REASONS[reason]
    for command, environment in commands:
        assert command[0] == "setup.py" and environment == {"PYCKPT_CUDA": "on", "PYCKPT_CUDA_ARCHS": "90"}
    assert (result["status"] == "ok") == ("driver" not in reason)


def test_a_build_that_changes_nothing_is_a_failure(monkeypatch, gpu):
    monkeypatch.setattr(gpu_check, "why_not_cuda", lambda: "built without CUDA: no nvcc was found")
    monkeypatch.setattr(gpu_check, "run", lambda *_, **__: {"status": "ok", "seconds": 1.0, "last_line": ""})
    assert gpu_check.build(gpu_check.Clock(100))["status"] == "failed: built without CUDA: no nvcc was found"
    monkeypatch.setattr(gpu_check, "measure", lambda *_: pytest.fail("measured all the same"))
    assert gpu_check.main([]) == 1


def test_tests_of_every_backend_that_is_there(monkeypatch, gpu, capsys):
    commands = []

    def run(command, seconds, **_):
        commands.append(" ".join(command))
        return {
            "status": "exit code 1" if "triton" in commands[-1] else "ok",
            "seconds": 1.0,
            "last_line": "",
        }

    monkeypatch.setattr(gpu_check, "run", run)
    monkeypatch.setattr(gpu_check, "measure", lambda *_: {"rows": [], "left_out": []})
    for there in (["cuda"], ["cuda", "triton"]):
        commands.clear()
        states = {
            name: backends.Backend(name, "cuda", "" if name in there else "gone") for name in gpu_check.TESTS
        }
        monkeypatch.setattr(backends, "available", lambda states=states: states)
        assert gpu_check.main(["--no-build"]) == ("triton" in there)
        assert len(commands) == len(there)
    assert "--require-backend triton" in commands[1]
    assert "tests on cuda: ok, tests on triton: exit code 1" in capsys.readouterr().out


def test_why_not_cuda_asks_the_package():
    assert gpu_check.why_not_cuda() == backends.available()["cuda"].unavailable


def test_commands_are_bounded(capsys):
    result = gpu_check.run(
        [sys.executable, "-c", "print('so far', flush=True); import time; time.sleep(60)"], 2
    )
    assert result["status"] == "not finished in 2 s" and result["last_line"] == "so far"
    assert gpu_check.run([sys.executable, "-c", "raise SystemExit(3)"], 10)["status"] == "exit code 3"
    assert (
        gpu_check.run([sys.executable, "-c", "import os; print(os.environ['X'])"], 10, X="7")["last_line"]
        == "7"
    )
    assert "X=7" in capsys.readouterr().out


def small(config, shape=(64, 48)):
    return _run.Config(config.op, config.dtype, shape, compile=config.compile)


def test_rows_of_every_backend(monkeypatch, gpu, capsys, tmp_path):
    """The whole of it, on the CPU's kernels in the place of a GPU's, with a package that fails among the peers."""
    real, seen = _run.measure, []

    def measure(config, device, effort, compiler, backend, seed, peers):
        seen.append((config, backend, sorted(peers)))
        return real(
            small(config), CPU, _harness.Effort(0.01, least=2, most=2), _run.Compiler(0), backend, seed, peers
        )

    here = [backends.Backend(name, "cuda") for name in ("cpu", "reference")]
    monkeypatch.setattr(_run, "measure", measure)
    monkeypatch.setattr(backends, "available", lambda: {b.name: b for b in here})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(_harness, "machine", lambda device: {"gpu": str(device)})
    layer_norm = {"layer_norm": lambda x, w, b: torch.nn.functional.layer_norm(x, x.shape[-1:], w, b)}
    broken = {"layer_norm": lambda x, w, b: x}
    monkeypatch.setattr(
        _peers, "PACKAGES", {"good": lambda: layer_norm, "wrong": lambda: broken, "none": lambda: 1 / 0}
    )
    file = tmp_path / "check.json"
    arguments = ["--no-build", "--no-test", "--ops", "layer_norm", "gelu_erf", "--json", str(file)]
    assert gpu_check.main(arguments) == 0, capsys.readouterr().out
    written = json.loads(file.read_text())
    assert all(set(row) >= FIELDS for row in written["rows"])
    assert written["absent"] == {"none": "ZeroDivisionError: division by zero"} and not written["left_out"]
    assert len(seen) == 2 * 2 * 2 * (1 + len(gpu_check.SHAPES))
    assert {(backend, tuple(names)) for _, backend, names in seen if names} == {("cpu", ("good", "wrong"))}
    impls = [(r["impl"], r["backend"], r["status"].partition(":")[0]) for r in written["rows"]]
    assert (
        impls.count(("pyckpt", "cpu", "ok")) == impls.count(("pyckpt", "reference", "ok")) == len(seen) // 2
    )
    assert impls.count(("eager", "torch", "ok")) == len(seen) // 2
    assert impls.count(("good", "good", "ok")) == impls.count(("wrong", "wrong", "skipped")) == 2
    assert f"{len(written['rows'])} rows, 0 wrong" in capsys.readouterr().out


def test_out_of_time(monkeypatch, gpu):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(_harness, "machine", lambda device: {})
    args = types.SimpleNamespace(full=False, ops=["relu"], seed=0)
    result = gpu_check.measure(args, gpu_check.Clock(1.0))
    assert not result["rows"]
    assert (
        len(result["left_out"]) == 2 * (1 + len(gpu_check.SHAPES))
        and result["left_out"][0] == "relu bf16 8192x4096"
    )


def test_shares_of_the_copy(capsys):
    row = {
        "op": "gelu_erf",
        "shape": "8192x4096",
        "impl": "pyckpt",
        "backend": "cuda",
        "dtype": "bf16",
        "kind": "throughput",
    }
    row |= {
        "forward_bytes": 8_000_000,
        "forward_ms": 2.0,
        "step_bytes": 18_000_000,
        "step_ms": 5.0,
        "copy_gbps": 4.0,
    }
    assert gpu_check.share_of_copy(row, "forward") == 1.0 and gpu_check.share_of_copy(row, "step") == 0.9
    gpu_check.print_shares([row, row | {"backend": "triton", "step_ms": 6.0}])
    output = capsys.readouterr().out
    assert "100%" in output and "90%" in output and "Below the aim: gelu_erf triton step 75%" in output
