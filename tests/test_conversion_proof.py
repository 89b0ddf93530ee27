"""What convert must leave: subclasses, patched instances...; and classes judged by what they compute."""

import copy
import math
import random

import pytest
import torch
import torch.nn.functional as F
from _conversion import (
    FUSED,
    ElsewhereGelu,
    Gelu3,
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

# ---- what is left alone ------------------------------------------------------------------------------------


class SameDropout(nn.Dropout):
    pass


class OtherSoftmax(nn.Softmax):
    def forward(self, x):
        return super().forward(2 * x)


class SigmoidSiLU(nn.GELU):  # a SiLU, but isinstance tells otherwise
    def forward(self, x):
        return x * torch.sigmoid(x)


def test_subclasses_are_left():
    left_alone(Gelu3(), "a subclass of nn.GELU: _conversion.Gelu3 is none of gelu")
    left_alone(SigmoidSiLU(), "computes what pyckpt.nn.SiLU does, yet is a nn.GELU")
    left_alone(SameDropout(), "only nn.Dropout itself is swapped")
    left_alone(OtherSoftmax(-1), "a subclass of nn.Softmax, has a forward of its own")


def test_an_instance_with_its_own_forward_is_left():
    layer = nn.GELU()
    layer.forward = lambda x: x * 2
    left_alone(layer, "set on the instance")
    assert layer(torch.ones(1)).item() == 2


def test_a_class_whose_forward_was_replaced_is_left(monkeypatch):
    monkeypatch.setattr(nn.GELU, "forward", Gelu3.forward)
    left_alone(nn.GELU(), "Gelu3.forward")


def test_parametrized_modules_are_left():
    layer = nn.LayerNorm(4)
    nn.utils.parametrize.register_parametrization(layer, "weight", nn.Softplus())
    left_alone(layer, "parametrized")


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_weight_norm_by_hook_works_and_is_verified():
    layer = nn.utils.weight_norm(nn.LayerNorm(4), dim=None)
    want = layer(randn(3, 4))
    pyckpt.convert(layer, verify=True)
    assert type(layer) is pyckpt.nn.LayerNorm
    torch.testing.assert_close(layer(randn(3, 4)), want)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*")
def test_torchscript_modules_are_left():
    scripted = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.GELU()))
    pyckpt.convert(scripted)
    report = pyckpt.report(scripted)
    assert not report.swapped and list(report.left) == ["1"]
    assert "TorchScript" in report.left["1"]


def test_quantized_and_prepared_modules_are_left():
    from torch.ao.nn.quantized import LayerNorm as QuantizedLayerNorm

    one = nn.Parameter(torch.ones(4), requires_grad=False)
    left_alone(QuantizedLayerNorm([4], one, one, scale=1.0, zero_point=0), "quantized")
    layer = nn.ReLU()
    layer.qconfig = object()
    left_alone(layer, "qconfig")


def test_uninitialised_modules_are_left():
    layer = nn.LayerNorm(4)
    layer.weight = nn.parameter.UninitializedParameter()
    holder = nn.Sequential(layer)
    pyckpt.convert(holder)
    assert type(layer) is nn.LayerNorm
    assert "not initialised" in pyckpt.report(holder).left["0"]


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")
def test_fully_sharded_modules_are_left_and_revert_refuses_those_sharded_later():
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        early = fully_shard(nn.LayerNorm(4), mesh=mesh)
        late = fully_shard(pyckpt.convert(nn.LayerNorm(4)), mesh=mesh)
        cls = type(early)
        pyckpt.convert(early)
        assert type(early) is cls and isinstance(early, nn.LayerNorm)
        assert "by fully_shard: convert before sharding" in pyckpt.report(early).left[""]
        x = randn(3, 4)
        torch.testing.assert_close(late(x), F.layer_norm(x, (4,)))
        cls = type(late)
        with pytest.warns(UserWarning, match="became a"):
            pyckpt.revert(late)
        assert type(late) is cls
        inside = fully_shard(nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)), mesh=mesh)
        pyckpt.convert(inside, verify=True)  # its parameters are DTensors
        assert type(inside[0]) is pyckpt.nn.LayerNorm
        torch.testing.assert_close(inside(x), inside[1](F.layer_norm(x, (4,))))
    finally:
        dist.destroy_process_group()


# ---- activation classes of other libraries, by behaviour ---------------------------------------------------


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


class GELUActivation(nn.Module):  # quick GELU under another's name
    def forward(self, input):
        return input * torch.sigmoid(1.702 * input)


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


def test_a_refusal_for_reasons_around_us_is_not_remembered():
    from torch._subclasses.fake_tensor import FakeTensorMode

    class FirstSeenUnderFakeTensors(nn.Module):
        forward = ElsewhereGelu.forward

    module = FirstSeenUnderFakeTensors()
    with FakeTensorMode():
        pyckpt.convert(module)
    assert type(module) is FirstSeenUnderFakeTensors
    assert type(pyckpt.convert(module)) is pyckpt.nn.GELU


def test_constants_rounded_to_float32_are_accepted_where_float32_cannot_tell():
    class ShortConstantGelu(nn.Module):
        def forward(self, x):
            return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1.0 + 0.044715 * x * x)))

    model = nn.Sequential(nn.Linear(3, 3), ShortConstantGelu())
    assert "equal to" in pyckpt.report(model).left["1"]
    assert_equivalent(pyckpt.convert(copy.deepcopy(model)), model, randn(50, 3))
    assert fused_paths(pyckpt.convert(model.double())) == set()
    assert "float64" in pyckpt.report(model).left["1"]
