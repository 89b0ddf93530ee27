"""Classes that look like norms and are none, or do more than one: all are left, with the reason."""

import random

import pytest
import torch
from _conversion import WIDTH, Norm, left_alone
from torch import nn

import pyckpt


def look_alike(forward, base=Norm, **attributes):
    return type("SomeRMSNorm", (base,), {"forward": forward, "__module__": __name__, **attributes})


def rms(x, eps=1e-3):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


class Plain(Norm):  # is converted; below it is extended
    def forward(self, x):
        return rms(x) * self.weight


def test_without_the_extra_it_is_converted():
    assert type(pyckpt.convert(Plain())) is pyckpt.nn.ConvertedNorm


@look_alike
def HalfCentred(self, x):
    return self.weight * (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3)


@look_alike
def EpsOutside(self, x):
    return self.weight * (x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.variance_epsilon))


@look_alike
def WeightInside(self, x):
    return rms(self.weight * x)


@look_alike
def WeightSquared(self, x):
    return rms(x) * self.weight.pow(2)


@look_alike
def TwoPlusWeight(self, x):
    return rms(x) * (2.0 + self.weight)


@look_alike
def Scaled(self, x):
    return rms(x) * self.weight * 1.0000001


@look_alike
def Sum(self, x):
    return self.weight * x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + self.variance_epsilon)


@look_alike
def Unbiased(self, x):
    return self.weight * (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, keepdim=True) + 1e-3)


@look_alike
def BatchToo(self, x):
    return self.weight * x * torch.rsqrt(x.pow(2).mean((0, -1), keepdim=True) + self.variance_epsilon)


@look_alike
def ThirdDimension(self, x):
    return self.weight * x * torch.rsqrt(x.pow(2).mean(2, keepdim=True) + self.variance_epsilon)


@look_alike
def Residual(self, x):
    return x + rms(x) * self.weight


@look_alike
def Default(self, x, scale=None):
    return rms(x) * self.weight


@look_alike
def Gated(self, x, gate):
    return rms(x) * self.weight * gate


@look_alike
def Keywords(self, x, **kwargs):
    return rms(x) * self.weight


@look_alike
def Branching(self, x):
    return rms(x) * self.weight if x.abs().max() < 1e6 else x


@look_alike
def Shaped(self, x):
    return rms(x) * self.weight if x.shape[0] != 77 else x


@look_alike
def Strided(self, x):
    return rms(x) * self.weight if x.is_contiguous() else x


@look_alike
def BFloat(self, x):
    return rms(x) * self.weight if x.dtype is not torch.bfloat16 else rms(x) * self.weight * 1.5


@look_alike
def HalfWeights(self, x):
    return rms(x, 1e-3 if self.weight.dtype != torch.float16 else 1.0) * self.weight


@look_alike
def TrainingOnly(self, x):
    return rms(x) * self.weight if self.training else x * self.weight


@look_alike
def Counting(self, x):
    self.variance_epsilon += 0.0
    return rms(x) * self.weight


SEEN = []


@look_alike
def Listing(self, x):
    SEEN.append(x)
    return rms(x) * self.weight


@look_alike
def Lucky(self, x):
    return rms(x) * self.weight if random.random() < 0.9999 else x


@look_alike
def Noisy(self, x):
    return rms(x) * self.weight + 0 * torch.rand_like(x)


@look_alike
def NoisyMethod(self, x):
    return rms(x) * self.weight + 0 * x.bernoulli()


@look_alike
def Detached(self, x):
    return x * torch.rsqrt(x.detach().pow(2).mean(-1, keepdim=True) + 1e-3) * self.weight


@look_alike
def Rounded(self, x):
    return rms(x).to(torch.bfloat16).to(x.dtype) * self.weight


@look_alike
def Clamped(self, x):
    return rms(x).clamp(-1e6, 1e6) * self.weight


@look_alike
def InPlace(self, x):
    return rms(x.mul_(1.0)) * self.weight


@look_alike
def Guarded(self, x):
    try:
        return rms(x) * self.weight
    except RuntimeError:
        return x


@look_alike
def Recast(self, x):
    self.float()
    return rms(x) * self.weight


SCALE = torch.ones(())


@look_alike
def FromElsewhere(self, x):
    return rms(x) * self.weight * SCALE


def closure():
    factor = 1.0
    return look_alike(lambda self, x: rms(x) * self.weight * factor)


class Holding(Plain):
    def __init__(self):
        super().__init__()
        self.factor = torch.ones(())


class Buffered(Norm):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x):
        return rms(x) * self.weight * self.scale


class TwoSizes(Plain):
    def __init__(self):
        super().__init__()
        self.extra = nn.Parameter(torch.ones(3))


class Calls:
    def __init__(self):
        self.count = 0

    def __call__(self, x):
        self.count += 1
        return rms(x)


class ClassCallable(Norm):
    _norm = Calls()

    def forward(self, x):
        return self._norm(x) * self.weight


class StaticCallable(ClassCallable):
    _norm = staticmethod(Calls())


class ClassList(Norm):
    _seen = []  # noqa: RUF012

    def forward(self, x):
        return rms(x) * self.weight


class OtherReset(Plain):
    def reset_parameters(self):
        nn.init.zeros_(self.weight)


class Extended(Plain):
    def flops(self):
        return 3


class CenteredRMSNorm(nn.RMSNorm):
    def forward(self, x):
        return super().forward(x - x.mean(-1, keepdim=True))


NEITHER = "is neither LayerNorm nor RMSNorm"
LOOK_ALIKES = [
    (HalfCentred, NEITHER),
    (EpsOutside, NEITHER),
    (WeightInside, NEITHER),
    (WeightSquared, NEITHER),
    (TwoPlusWeight, NEITHER),
    (Scaled, NEITHER),
    (Sum, NEITHER),
    (Unbiased, NEITHER),
    (BatchToo, NEITHER),
    (ThirdDimension, NEITHER),
    (Residual, NEITHER),
    (Default, "takes other arguments"),
    (Gated, "takes other arguments"),
    (Keywords, "takes other arguments"),
    (Branching, "uses abs"),
    (Shaped, "uses shape, so that it may depend on more"),
    (Strided, "uses is_contiguous"),
    (BFloat, "different functions for different dtypes"),
    (HalfWeights, "different functions for different dtypes"),
    (TrainingOnly, "is rms_norm for some inputs or in one mode only"),
    (Counting, "changes its own attributes"),
    (Listing, "refers to SEEN"),
    (Lucky, "refers to random.random"),
    (Noisy, "refers to torch.rand_like"),
    (NoisyMethod, "uses bernoulli"),
    (Detached, "uses detach"),
    (Rounded, "to other than float32"),
    (Clamped, "uses clamp"),
    (InPlace, "uses mul_"),
    (Guarded, "has a with or try statement"),
    (Recast, "which is not known to be part"),
    (FromElsewhere, "refers to SCALE"),
    (closure(), "is a closure"),
    (Holding, "holds a Tensor"),
    (Buffered, "neither its input nor a parameter"),
    (ClassCallable, "holds a Calls in attribute '_norm'"),
    (StaticCallable, "holds a Calls in attribute '_norm'"),
    (ClassList, "holds a list in attribute '_seen'"),
    (TwoSizes, "parameters of several shapes"),
    (OtherReset, "reset_parameters of its own"),
    (Extended, "more to it than forward: flops"),
    (lambda: CenteredRMSNorm(WIDTH, eps=1e-3), "an nn.RMSNorm that computes otherwise"),
]


@pytest.mark.parametrize(("make", "reason"), LOOK_ALIKES)
def test_look_alikes_are_left_with_the_reason(make, reason):
    module = make()
    module.__class__ = type(
        f"{type(module).__name__}Norm", (type(module),), {}
    )  # a name that the report looks for
    left_alone(module, reason)
    assert not SEEN
