"""What surrounds convert has no part in the proof that a class of another library computes a norm or an activation."""

import contextlib
import threading

import pytest
import torch
import torch.nn.functional as F
from _conversion import GemmaNorm, Widened
from torch import nn
from torch._C._dynamo import eval_frame
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

import pyckpt
from pyckpt.nn import GELU, ConvertedNorm


class Doubling(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out * 2 if isinstance(out, torch.Tensor) and out.is_floating_point() else out


@contextlib.contextmanager
def compiling():
    before = eval_frame.set_eval_frame(torch._dynamo.optimize("eager").callback)
    try:
        yield
    finally:
        eval_frame.set_eval_frame(before)


@contextlib.contextmanager
def default_dtype():
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


SURROUNDINGS = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "function mode": Widened,
    "dispatch mode": Doubling,
    "fake tensors": FakeTensorMode,
    "device": lambda: torch.device("meta"),
    "default dtype": default_dtype,
    "lossy hooks": lambda: saved_tensors_hooks(lambda t: t.half(), lambda t: t.double()),
    "torch.compile": compiling,
}


def fresh():
    """Classes that have not been judged yet: a norm, an activation, and one that is neither."""

    class FreshNorm(GemmaNorm):
        pass

    class FreshGelu(nn.Module):
        def forward(self, x):
            return 0.5 * x * (1.0 + torch.erf(x * 0.7071067811865475))

    class NoGelu(nn.Module):
        def forward(self, x):
            return F.gelu(x) * 1.001

    return nn.ModuleList([FreshNorm(), FreshGelu(), NoGelu()])


def assert_converted(model):
    assert [type(m) for m in model[:2]] == [ConvertedNorm, GELU], pyckpt.report(model)
    report = pyckpt.report(model)
    assert "dtype='input'" in report.swapped["0"]
    assert "is none of gelu" in report.left["2"]


@pytest.mark.parametrize("name", SURROUNDINGS)
def test_the_verdict_is_the_same_whatever_surrounds_convert(name):
    model = fresh()
    with SURROUNDINGS[name]():
        pyckpt.convert(model)
    assert_converted(model)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap])
def test_convert_inside_transforms(transform):
    model = fresh()

    def function(x):
        pyckpt.convert(model)
        return (x * x).sum()

    transform(function)(torch.ones(3))
    assert_converted(model)


def test_convert_in_another_thread():
    model = fresh()
    worker = threading.Thread(target=pyckpt.convert, args=(model,))
    worker.start()
    worker.join()
    assert_converted(model)
