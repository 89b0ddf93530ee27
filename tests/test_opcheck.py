"""torch.library.opcheck on every operator torch.ops.pyckpt.*: schema, fake function, autograd, tracing; and raw misuse."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pyckpt import backends
from pyckpt.ops import activation, attention, dropout, norm, softmax
from pyckpt.ops._registry import Op
from tests import _isolated

C = 8


def _float(shape=(3, 5, C), grad=False, dtype=torch.float32, layout="contiguous"):
    x = torch.randn(shape, dtype=torch.float64).to(dtype)
    if layout == "transposed":
        x = x.transpose(0, 1).contiguous().transpose(0, 1)
    elif layout == "sliced":
        x = torch.stack([x, x], -2).flatten(-2)[..., : shape[-1]] if len(shape) > 1 else x
    elif layout == "expanded":
        x = x[:1].expand(shape)
    return x.requires_grad_(grad)


def _seed():
    return torch.tensor([20240229], dtype=torch.int64)


def _mask(kind, dtype):
    if kind == "keep":
        return torch.rand(5, C) > 0.3
    return torch.randn(C).to(dtype) if kind == "bias" else None


def _arguments(**make):
    """op name -> list of functions of (grad, dtype, layout) that give its arguments."""
    cases = {}
    for a in ("none", "tanh", "sigmoid"):
        cases.setdefault("gelu_fwd", []).append(lambda a=a, **k: (_float(**k), a))
        cases.setdefault("gelu_bwd", []).append(lambda a=a, **k: (_float(**k), _float(**k), a))
    for name in ("silu", "relu"):
        cases[f"{name}_fwd"] = [lambda **k: (_float(**k),)]
        cases[f"{name}_bwd"] = [lambda **k: (_float(**k), _float(**k))]
    cases["dropout"] = [lambda p=p, **k: (_float(**k), _seed(), p) for p in (0.0, 0.3, 1.0)]

    def parameter(present, grad, dtype):
        return torch.randn(C).to(dtype).requires_grad_(grad) if present else None

    def statistics(count, dtype):
        return torch.rand(count, 15, dtype=torch.float64 if dtype == torch.float64 else torch.float32) + 0.5

    for weight, bias in ((True, True), (True, False), (False, True), (False, False)):

        def layer(weight=weight, bias=bias, **k):
            g, d = k["grad"], k["dtype"]
            return _float(**k), [C], parameter(weight, g, d), parameter(bias, g, d)

        cases.setdefault("layer_norm_fwd", []).append(lambda f=layer, **k: (*f(**k), 1e-5))
        cases.setdefault("layer_norm_recompute", []).append(
            lambda f=layer, **k: (*f(**k), statistics(3, k["dtype"]))
        )
    for weight in (True, False):

        def rms(weight=weight, **k):
            return _float(**k), [C], parameter(weight, k["grad"], k["dtype"])

        cases.setdefault("rms_norm_fwd", []).append(lambda f=rms, **k: (*f(**k), 1e-5))
        cases.setdefault("rms_norm_recompute", []).append(
            lambda f=rms, **k: (*f(**k), statistics(1, k["dtype"]))
        )
        for wanted in ([True, True, False], [True, False, False], [False, True, False], [True, True, True]):
            for name, count in (("layer_norm", 3), ("rms_norm", 1)):
                if name == "rms_norm" and wanted[2]:
                    continue

                def backward(f=rms, count=count, wanted=wanted, **k):
                    return (_float(**k), *f(**k), statistics(count, k["dtype"]), 1e-5, False, wanted)

                cases.setdefault(f"{name}_bwd", []).append(backward)
    for kind in (None, "keep", "bias"):
        for causal in (None, 0, C - 5):
            for p in (0.0, 0.3):

                def scores(kind=kind, causal=causal, p=p, **k):
                    return _float(**k), _mask(kind, k["dtype"]), 0.7, causal, p, _seed() if p else None

                def rows(dtype):
                    return statistics(2, dtype)

                cases.setdefault("softmax_fwd", []).append(scores)
                cases.setdefault("softmax_recompute", []).append(
                    lambda f=scores, **k: (*f(**k), rows(k["dtype"]))
                )
                if p:
                    cases.setdefault("softmax_dropout_bwd", []).append(
                        lambda f=scores, **k: (_float(**k), *f(**k), rows(k["dtype"]), 0.7)
                    )
    cases["softmax_bwd"] = [lambda m=m, **k: (_float(**k), _float(**k), m, 0.7) for m in (False, True)]
    _attention_arguments(cases)
    return cases


def _attention_arguments(cases):
    def bounds(*ends):
        return torch.tensor([0, *ends], dtype=torch.int32)

    def slopes(dtype):
        return torch.rand(1, 4, dtype=torch.float64 if dtype == torch.float64 else torch.float32)

    variants = [
        lambda d: (None, None, None, None, None, 0.4, None, None, False, 0.0, 0.0),
        lambda d: (torch.rand(3, 1, 5, 6) > 0.3, None, None, None, _seed(), 0.4, None, 0, True, 0.0, 0.3),
        lambda d: (torch.randn(1, 4, 1, 6).to(d), slopes(d), None, None, None, 0.4, 2, 1, False, 3.0, 0.0),
        lambda d: (None, None, bounds(2, 5), bounds(3, 6), None, 0.4, None, 0, False, 0.0, 0.0),
    ]
    for rest in variants:

        def forward(rest=rest, **k):
            q, key, value = (_float((3, h, n, C), **k) for h, n in ((4, 5), (2, 6), (2, 6)))
            mask, *others = rest(k["dtype"])
            if mask is not None and mask.is_floating_point():
                mask.requires_grad_(k["grad"])
            return q, key, value, mask, *others

        def backward(f=forward, wanted=(True, True, True, True), **k):
            arguments = f(**k)
            detached = [x.detach() if isinstance(x, torch.Tensor) else x for x in arguments]
            out, logsumexp = torch.ops.pyckpt.attention_fwd(*detached)
            grad = _float((3, 4, 5, C), **k)
            return grad, *arguments, out, logsumexp, [*wanted[:3], wanted[3] and arguments[3] is not None]

        cases.setdefault("attention_fwd", []).append(forward)
        for wanted in ((True, True, True, True), (True, False, False, False)):
            cases.setdefault("attention_bwd", []).append(lambda f=backward, w=wanted, **k: f(wanted=w, **k))


CASES = _arguments()
NO_GRADIENT = {"layer_norm_recompute", "rms_norm_recompute", "softmax_recompute"}
ALL = [
    pytest.param(name, make, id=f"{name}-{i}")
    for name, makes in CASES.items()
    for i, make in enumerate(makes)
]
FEW = [pytest.param(name, makes[0], id=name) for name, makes in CASES.items()]
# Tracing costs a second a case: forwards with their first arguments for the quick run.
QUICK = {f"{name}-0" for name in CASES if name == "dropout" or name.endswith("_fwd")}
TRACED = [pytest.param(*p.values, id=p.id, marks=() if p.id in QUICK else pytest.mark.slow) for p in ALL]


def _check(name, arguments, utils=("test_schema", "test_autograd_registration", "test_faketensor")):
    torch.library.opcheck(getattr(torch.ops.pyckpt, name).default, arguments, test_utils=utils)


def test_every_operator_is_covered():
    ops = {
        op.name
        for module in (activation, attention, dropout, norm, softmax)
        for op in vars(module).values()
        if isinstance(op, Op)
    }
    for n in (norm._layer_norm, norm._rms_norm):
        ops |= {n.fwd.name, n.bwd.name, n.recompute.name}
    assert ops == set(CASES)


@pytest.mark.parametrize(("name", "make"), ALL)
def test_schema_and_fake(name, make, backend):
    for grad in (False, True):
        if not (grad and name in NO_GRADIENT):
            _check(name, make(grad=grad, dtype=torch.float32, layout="contiguous"))


@pytest.mark.parametrize("layout", ["transposed", "sliced", "expanded"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(("name", "make"), FEW)
def test_fake_on_every_layout_and_dtype(name, make, dtype, layout, backend):
    """What the compiler is told about strides and dtypes is what the op returns."""
    _check(name, make(grad=False, dtype=dtype, layout=layout))


@pytest.mark.parametrize(("name", "make"), TRACED)
def test_traced_with_symbolic_shapes(name, make):
    for grad in (False, True):
        if not (grad and name in NO_GRADIENT):
            arguments = make(grad=grad, dtype=torch.float32, layout="contiguous")
            _check(name, arguments, "test_aot_dispatch_dynamic")


@pytest.mark.parametrize("shape", [(C,), (0, 5, C), (3, 0, C)], ids=str)
@pytest.mark.parametrize("name", sorted(CASES))
def test_fake_on_odd_shapes(name, shape, backend):
    """One dimension, and no elements."""

    def resize(value):
        if isinstance(value, torch.Tensor) and value.shape == (3, 5, C):
            return _float(shape)
        if isinstance(value, torch.Tensor) and value.dim() == 2 and value.shape[-1] == 15:
            return value[
                :,
                : max(1, torch.Size(shape[:-1]).numel())
                if shape[:-1] == ()
                else torch.Size(shape[:-1]).numel(),
            ]
        return value

    arguments = CASES[name][0](grad=False, dtype=torch.float32, layout="contiguous")
    _check(name, tuple(resize(a) for a in arguments))


@pytest.mark.parametrize("name", sorted(NO_GRADIENT))
def test_recompute_ops_say_that_they_have_no_gradient(name):
    arguments = CASES[name][0](grad=True, dtype=torch.float32, layout="contiguous")
    with pytest.raises(
        RuntimeError, match=f"pyckpt::{name} .*no gradient; use pyckpt::{name.replace('recompute', 'fwd')}"
    ):
        getattr(torch.ops.pyckpt, name)(*arguments)


def _run_isolated(backend, *arguments):
    if not backends.available()[backend].available:
        pytest.skip(f"no {backend} backend here")
    environment = os.environ | {
        "PYCKPT_BACKEND": backend,
        "OMP_NUM_THREADS": "1",
        "MALLOC_MMAP_THRESHOLD_": "4096",  # memory that is read after it was freed is not there
    }
    command = [sys.executable, "-W", "ignore", "-m", "tests._isolated", *arguments]
    root = Path(__file__).parents[1]
    done = subprocess.run(
        command, env=environment, cwd=root, capture_output=True, text=True, timeout=300, check=True
    )
    return json.loads(done.stdout)


@pytest.fixture(scope="module", params=[pytest.param("reference", marks=pytest.mark.slow), "cpu"])
def isolated(request):
    return _run_isolated(request.param)


@pytest.mark.parametrize("name", _isolated.CASES)
def test_memory_is_never_misread(name, isolated):
    """Each in its own process: a fault here writes to memory that is not ours."""
    assert isolated[name] == "ok", isolated[name]


@pytest.mark.slow
def test_memory_is_never_misread_by_compiled_frames():
    results = _run_isolated("cpu", "slow")
    assert {name: text for name, text in results.items() if text != "ok"} == {}
