"""Choosing a backend: by name, by environment variable; and that a backward stays on its forward's backend."""

import os
import re
import subprocess
import sys

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
