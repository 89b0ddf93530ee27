"""Activation classes judged by what they compute: which are converted, to what, and which are left."""

import copy
import math
import random

import pytest
import torch
import torch.nn.functional as F
from _conversion import (
    FUSED,
    WIDTH,
    ElsewhereGelu,
    GemmaNorm,
    ModeIndependent,
    TanhOrScaled,
    Unrecognisable,
    assert_equivalent,
    fused_paths,
    left_alone,
    randn,
)
from torch import nn

import pyckpt
from pyckpt import _targets


@pytest.mark.parametrize(
    ("make", "cls", "options"),
    [
        (ElsewhereGelu, "GELU", {"approximate": "none"}),
        (Unrecognisable, "SiLU", {"inplace": False}),
        (lambda: TanhOrScaled(1.0), "GELU", {"approximate": "tanh"}),
        (ModeIndependent, "ReLU", {"inplace": False}),
    ],
)
def test_classes_that_compute_one_of_our_functions_are_swapped(make, cls, options):
    module = make()
    original, before = copy.deepcopy(module), dict(vars(module))
    pyckpt.convert(module, verify=True)
    assert type(module) is FUSED[cls]
    assert {name: getattr(module, name) for name in options} == options
    assert_equivalent(module, original, 3 * randn(50, 7))
    pyckpt.revert(module)
    assert type(module) is type(original) and dict(vars(module)) == before


class GELUActivation(nn.Module):  # near quick GELU, under another's name
    def forward(self, input):
        return input * torch.sigmoid(1.7 * input)


class RoundedGelu(nn.Module):  # 1e-6 from tanh GELU
    def forward(self, x):
        return 0.5 * x * (1.0 + torch.tanh(0.79788 * x * (1.0 + 0.044715 * x * x)))


class NoisyGelu(nn.Module):
    def forward(self, x):
        return F.gelu(x) + 1e-3 * torch.randn_like(x) * self.training


class LuckyGelu(nn.Module):
    def forward(self, x):
        return F.gelu(x) if random.random() < 0.999 else x


FLAG = True


class GlobalGelu(nn.Module):
    def forward(self, x):
        return F.gelu(x) if FLAG else x


class ModeGelu(nn.Module):
    def forward(self, x):
        return F.gelu(x) if torch.is_grad_enabled() else x


class QuietGelu(nn.Module):
    def forward(self, x):
        try:
            return F.gelu(x) if x.max() < 1e4 else x
        except Exception:
            return F.gelu(x)


class RememberingGelu(nn.Module):
    def forward(self, x):
        return self._remember(x)

    def _remember(self, x, seen=[]):  # noqa: B006
        seen.append(x)
        return F.gelu(x)


class BFloatGelu(nn.Module):
    def forward(self, x):
        return 2 * F.gelu(x) if x.dtype is torch.bfloat16 else F.gelu(x)


class ScaledGelu(nn.Module):
    def forward(self, x):
        return F.gelu(x) * 1.00001


class WrappedGelu(nn.Module):
    forward = (lambda factor: lambda self, x: F.gelu(x) * factor)(1)


class ComparingGelu(nn.Module):
    def forward(self, x):
        return F.gelu(x) if x > 0 else x


class TwoArgumentsGelu(nn.Module):
    def forward(self, x, scale=1.0):
        return F.gelu(x) * scale


class KeywordsGelu(nn.Module):
    def forward(self, x, **ignored):
        return F.gelu(x)


class TensorGelu(nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = torch.tensor(0.5)

    def forward(self, x):
        return x * self.factor * (1.0 + torch.erf(x / math.sqrt(2.0)))


class ParameterGelu(TensorGelu):
    def __init__(self):
        super().__init__()
        del self.factor
        self.factor = nn.Parameter(torch.tensor(0.5))


class CountingGelu(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return F.gelu(x)


class BranchingGelu(nn.Module):
    def forward(self, x):
        return F.gelu(x) if x.abs().max() < 1e4 else x


class ShapeGelu(nn.Module):
    def forward(self, x):
        return F.gelu(x) if x.dim() < 4 else F.gelu(x, approximate="tanh")


class CastingGelu(nn.Module):
    def forward(self, x):
        return F.gelu(x.float())


class Guided(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.relu()

    @staticmethod
    def backward(ctx, grad):
        return grad.relu()


class GuidedRelu(nn.Module):  # a backward of its own, as interpretability tools want it
    def forward(self, x):
        return Guided.apply(x)


class HalfRelu(nn.Module):  # its derivative at 0 is 1/2
    def forward(self, x):
        return 0.5 * (x + x.abs())


class ProductRelu(nn.Module):  # NaN at -inf
    def forward(self, x):
        return x * (x > 0)


class DetachedRelu(nn.Module):
    def forward(self, x):
        with torch.no_grad():
            return F.relu(x)


class TrainingGelu(nn.Module):
    def forward(self, x):
        return F.gelu(x) if self.training else F.gelu(x, approximate="tanh")


class WritingRelu(nn.Module):
    def forward(self, x):
        return F.relu(x, inplace=True)


class MeasuredGelu(nn.Module):
    def forward(self, x):
        return F.gelu(x)

    def flops(self):
        return 8


class LoadingGelu(nn.Module):
    def forward(self, x):
        return F.gelu(x)

    def get_extra_state(self):
        return {"version": 2}


class ApproximateGelu(nn.Module):
    def __init__(self):
        super().__init__()
        self.approximate = True

    def forward(self, x):
        return F.gelu(x, approximate="tanh")


class SlottedGelu(nn.Module):
    __slots__ = ("extra",)

    def forward(self, x):
        return F.gelu(x)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (GELUActivation, "none of gelu"),
        (lambda: TanhOrScaled(3.0), "none of gelu"),
        (RoundedGelu, "none of gelu"),
        (NoisyGelu, "refers to torch.randn_like"),
        (LuckyGelu, "refers to random.random"),
        (GlobalGelu, "refers to FLAG"),
        (ModeGelu, "refers to torch.is_grad_enabled"),
        (QuietGelu, "has a with or try statement"),
        (RememberingGelu, "holds a list in attribute 'a default of _remember'"),
        (BFloatGelu, "different functions for different dtypes"),
        (ScaledGelu, "none of gelu"),
        (WrappedGelu, "is a closure"),
        (ComparingGelu, "uses __bool__, so that it may depend on values"),
        (TwoArgumentsGelu, "other arguments"),
        (KeywordsGelu, "other arguments"),
        (TensorGelu, "holds a Tensor in attribute 'factor'"),
        (ParameterGelu, "uses erf"),
        (CountingGelu, "changes its own attributes"),
        (BranchingGelu, "uses max"),
        (ShapeGelu, "uses dim, so that it may depend on more than values"),
        (CastingGelu, "returns torch.float32 for torch.float64"),
        (GuidedRelu, "refers to Guided"),
        (HalfRelu, "none of gelu"),
        (ProductRelu, "at infinity"),
        (DetachedRelu, "refers to torch.no_grad"),
        (TrainingGelu, "in training and in evaluation"),
        (WritingRelu, "writes to its input"),
        (MeasuredGelu, "more to it than forward: flops"),
        (LoadingGelu, "overrides get_extra_state"),
        (ApproximateGelu, "attribute approximate"),
        (SlottedGelu, "member_descriptor"),
    ],
)
def test_look_alikes_are_left_with_the_reason(make, reason):
    module = make()
    if isinstance(module, TanhOrScaled):
        module.__class__ = type("TanhGelu", (TanhOrScaled,), {})  # a name that the report looks for
        swapped = pyckpt.convert(type(module)(1.0))  # by a proof that must not serve for 3.0
        assert type(swapped) is pyckpt.nn.GELU
    left_alone(module, reason)
    if isinstance(module, CountingGelu):
        assert module.calls == 0, "probing ran the user's own module"


class Flagged(nn.Module):
    def __init__(self, flag):
        super().__init__()
        self.flag = flag

    def forward(self, x):
        return F.gelu(x) if self.flag is True else F.tanh(x)


def test_a_changed_option_or_forward_is_proven_anew(monkeypatch):
    module = TanhOrScaled(1.0)
    assert type(pyckpt.convert(copy.deepcopy(module))) is pyckpt.nn.GELU
    module.act = F.silu
    assert type(pyckpt.convert(module)) is pyckpt.nn.SiLU
    assert type(pyckpt.convert(Flagged(True))) is pyckpt.nn.GELU
    assert type(pyckpt.convert(Flagged(1))) is Flagged  # equal to True, yet another option
    assert type(pyckpt.convert(ElsewhereGelu())) is pyckpt.nn.GELU
    monkeypatch.setattr(ElsewhereGelu, "forward", lambda self, x: 2 * F.gelu(x))
    module = ElsewhereGelu()
    assert type(pyckpt.convert(module)) is ElsewhereGelu


def test_classes_marked_for_other_kernels_are_swapped_until_these_are_in():
    """As replace_kernel_forward_from_hub of Hugging Face's kernels marks most activations and norms of transformers."""

    class MarkedGelu(ElsewhereGelu):
        kernel_layer_name = "GeLU"
        kernel_condition = staticmethod(lambda module: True)

    class MarkedNorm(GemmaNorm):
        kernel_layer_name, kernel_condition = "RMSNorm", MarkedGelu.kernel_condition

    for make in (MarkedGelu, MarkedNorm):
        module, kernelized = make(), make()
        assert type(pyckpt.convert(module)) is not type(kernelized)
        assert_equivalent(module, make(), randn(50, WIDTH))
        kernelized.forward = kernelized.forward  # of the instance, as kernelize() sets it
        left_alone(kernelized, "forward")


def test_a_failure_for_a_passing_reason_is_not_remembered(monkeypatch):
    class GeluFirstSeenShortOfMemory(nn.Module):
        forward = ElsewhereGelu.forward

    def fail(subject):
        raise MemoryError

    holder = nn.ModuleDict({"gelu": GeluFirstSeenShortOfMemory()})
    with monkeypatch.context() as short:
        short.setattr(_targets, "prove_activation", fail)
        pyckpt.convert(holder)
        assert "could not be probed (MemoryError)" in pyckpt.report(holder).left["gelu"]
    assert type(pyckpt.convert(holder)["gelu"]) is pyckpt.nn.GELU


def test_constants_rounded_to_float32_are_accepted_where_float32_cannot_tell():
    class ShortConstantGelu(nn.Module):
        def forward(self, x):
            return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1.0 + 0.044715 * x * x)))

    model = nn.Sequential(nn.Linear(3, 3), ShortConstantGelu())
    assert "equal to" in pyckpt.report(model).left["1"]
    assert_equivalent(pyckpt.convert(copy.deepcopy(model)), model, randn(50, 3))
    assert fused_paths(pyckpt.convert(model.double())) == set()
    assert "float64" in pyckpt.report(model).left["1"]
