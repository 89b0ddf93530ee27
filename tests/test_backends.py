"""Choosing a backend: by name, by environment variable; and that a backward stays on its forward's backend."""

import os
import re
import subprocess
import sys
import types

import pytest
import torch

import pyckpt.functional as F
from pyckpt import backends


def test_backend_names():
    with pytest.raises(ValueError, match=r"unknown backend 'gpu'.*cpu.*reference"), backends.use("gpu"):
        pass
    for name, state in backends.available().items():
        if not state.available:
            with (
                pytest.raises(RuntimeError, match=f"backend '{name}'.*{re.escape(state.unavailable)}"),
                backends.use(name),
            ):
                pass
            assert state.unavailable
    before = backends.select("cpu")
    with pytest.raises(KeyError), backends.use("reference"):
        raise KeyError
    assert backends.select("cpu") == before


def test_reason_is_asked_for_late(monkeypatch):
    asked = []
    monkeypatch.setattr(backends, "_backends", dict(backends._backends))
    backends.register("slow to find", "xpu", lambda: asked.append(1) or "not here")
    assert not asked
    with pytest.raises(RuntimeError, match="backend 'slow to find' is not available here: not here"):
        backends.use("slow to find").__enter__()
    assert asked


COVERED = [  # archs, PTX, compute capability of a GPU, whether it can run them
    (["80", "90", "100"], ["100"], (9, 0), True),
    (["80"], [], (8, 6), True),
    (["86"], [], (8, 0), False),
    (["80"], [], (9, 0), False),
    (["80"], ["80"], (9, 0), True),
    (["100"], ["100"], (9, 0), False),
    (["100"], ["100"], (12, 1), True),
    (["90a"], ["90a"], (9, 0), True),
    (["90a"], ["90a"], (10, 0), False),
    (["100f"], [], (10, 3), True),
    (["100f"], ["100f"], (12, 0), False),
]


@pytest.mark.parametrize(("archs", "ptx", "capability", "covered"), COVERED)
def test_covered_gpus(archs, ptx, capability, covered):
    assert backends.covers(archs, ptx, capability) is covered


def cuda_of(monkeypatch, *, cuda, gpu=None, driver=13020):
    """Why the backend cuda is unavailable on a machine with that build, GPU and driver; empty if it is available."""
    info = {"cuda": cuda, "no_cuda": "" if cuda else "no nvcc was found"}
    monkeypatch.setattr(backends, "native", types.SimpleNamespace(build_info=lambda: info))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: gpu)
    monkeypatch.setattr(torch._C, "_cuda_getDriverVersion", lambda: driver, raising=False)
    return backends._why_no_cuda.__wrapped__()


def test_why_cuda_is_unavailable(monkeypatch):
    built = {"compiler": "13.0.88", "archs": ["80", "90"], "ptx": ["90"]}
    assert cuda_of(monkeypatch, cuda=None) == "built without CUDA: no nvcc was found"
    assert "no GPU that torch" in cuda_of(monkeypatch, cuda=built)
    assert cuda_of(monkeypatch, cuda=built, gpu=(9, 0)) == ""
    assert cuda_of(monkeypatch, cuda=built, gpu=(12, 0)) == ""
    assert cuda_of(monkeypatch, cuda=built | {"ptx": []}, gpu=(12, 0)) == (
        "this GPU is sm_120; built for sm_80, sm_90; set PYCKPT_CUDA_ARCHS=120 and reinstall pyckpt"
    )
    assert cuda_of(monkeypatch, cuda=built, gpu=(7, 5)) == (
        "this GPU is sm_75; the CUDA kernels need compute capability 8.0 or newer"
    )
    assert "the driver is too old (it supports CUDA 12)" in cuda_of(
        monkeypatch, cuda=built, gpu=(9, 0), driver=12080
    )


def test_backend_of_create_graph_is_the_forwards(monkeypatch, native):
    """Backward, also a recorded one, runs on the backend of its forward."""
    from pyckpt.ops import activation

    ran = []
    for name in ("reference", "cpu"):
        kernel = activation.gelu_bwd.kernels[name]
        monkeypatch.setitem(
            activation.gelu_bwd.kernels, name, lambda *a, k=kernel, n=name: ran.append(n) or k(*a)
        )
    x = torch.randn(4, 6).requires_grad_()
    with backends.use("reference"):
        y = F.gelu(x)
    for create_graph in (False, True):
        ran.clear()
        with backends.use("cpu"):
            torch.autograd.grad(y.sum(), x, create_graph=create_graph, retain_graph=True)
        # A recorded backward is the differentiable definition itself, which need not go through a kernel.
        assert ran == ["reference"] or (create_graph and not ran)


ENVIRONMENTS = {
    "unknown backend": ({"PYCKPT_BACKEND": "gpu"}, "ValueError", "PYCKPT_BACKEND", "gpu"),
    "backend that is not here": ({"PYCKPT_BACKEND": "triton"}, "RuntimeError", "PYCKPT_BACKEND", "triton"),
    "unknown instruction set": ({"PYCKPT_CPU_ISA": "avx9"}, "ValueError", "PYCKPT_CPU_ISA", "avx9"),
}


@pytest.mark.parametrize("what", ENVIRONMENTS)
def test_environment(what):
    variables, kind, *mentions = ENVIRONMENTS[what]
    if "PYCKPT_CPU_ISA" in variables and backends.native is None:
        pytest.skip("no native module to choose an instruction set of")
    done = subprocess.run(
        [sys.executable, "-c", "import pyckpt"],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode, "accepted"
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(kind), last
    for mention in mentions:
        assert mention in last, f"no {mention} in: {last}"


def test_environment_chooses_the_backend():
    code = "import pyckpt; print(pyckpt.backends.select('cpu'))"
    for value, name in (("reference", "reference"), ("", backends.select("cpu"))):
        variables = os.environ | {"PYCKPT_BACKEND": value}
        done = subprocess.run(
            [sys.executable, "-c", code], env=variables, capture_output=True, text=True, timeout=100
        )
        assert done.stdout.strip() == name, done.stderr


@pytest.mark.parametrize("function, elements", [(F.silu, 2**17), (F.softmax, 2**19), (F.relu, None)])
def test_small_inputs_are_left_to_torch(function, elements, native):
    """Where torch keeps the same bytes and a call of ours costs more than its kernel gains; not where a backend is asked for."""

    def ours(count):
        return "Function" in type(function(torch.randn(count, requires_grad=True)).grad_fn).__name__

    if elements is None:
        assert not ours(2**20)
    else:
        assert not ours(elements - 1) and ours(elements)
    with backends.use("cpu"):
        assert ours(8)
