"""convert, revert and report: what is swapped, what is left, and that nothing else about the model changes."""

import copy
import functools
import io
import json
import math
import os
import pickle
import subprocess
import sys
import textwrap
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pyckpt
from pyckpt.conversion import ConversionError

FUSED = {name: getattr(pyckpt.nn, name) for name in ("GELU", "SiLU", "ReLU", "LayerNorm", "RMSNorm", "Dropout", "Softmax")}


class Block(nn.Module):
    """Every swapped type, a few that are not, and a parameterless norm; dropout off so that outputs compare."""

    def __init__(self, width=12):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width, eps=1e-3, bias=False)
        self.fc1, self.fc2 = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.act, self.drop = nn.GELU(), nn.Dropout(0.0)
        self.rms, self.bare = nn.RMSNorm(width, eps=1e-4), nn.RMSNorm(width, elementwise_affine=False)
        self.silu, self.relu, self.softmax, self.tanh = nn.SiLU(), nn.ReLU(), nn.Softmax(dim=-1), nn.Tanh()
        for index, parameter in enumerate(self.parameters()):
            generator = torch.Generator().manual_seed(index)
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator) + (parameter.dim() == 1)

    def forward(self, x):
        x = x + self.drop(self.fc2(self.act(self.fc1(self.norm1(x)))))
        x = self.silu(self.rms(self.norm2(x))) + self.softmax(self.bare(x))
        return x + self.relu(x) * self.tanh(x)


SWAPPED_IN_BLOCK = {"norm1", "norm2", "act", "drop", "rms", "bare", "silu", "relu", "softmax"}


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def run(module, x):
    """Output and the gradients of input and parameters, of a fixed weighted sum."""
    leaf = x.clone().requires_grad_()
    output = module(leaf * 1.0)
    output = output if isinstance(output, torch.Tensor) else output[0]
    weights = torch.linspace(0, 9, output.numel(), dtype=torch.float64).cos().reshape(output.shape).to(output)
    parameters = [p for p in module.parameters() if p.requires_grad]
    return [output.detach(), *torch.autograd.grad(output, [leaf, *parameters], weights, allow_unused=True)]


def assert_equivalent(converted, original, x):
    """Outputs and all gradients are as near to float64 as the original's: 1.1 times its error and a few ulps."""
    exact = run(copy.deepcopy(original).double(), x.double() if x.is_floating_point() else x)
    for got, eager, want in zip(run(converted, x), run(original, x), exact, strict=True):
        if want is None:
            assert got is None and eager is None
            continue
        assert got.dtype == eager.dtype
        ulps = 4 * torch.finfo(got.dtype).eps * want.abs().max()
        assert (got - want).abs().max() <= 1.1 * (eager - want).abs().max() + ulps


def state_of(model):
    """All that conversion must not change, in comparable form (identities, not copies)."""
    return [
        (path, id(module), module.training, list(module._forward_hooks.items()), repr(module))
        for path, module in model.named_modules()
    ] + [
        (name, id(tensor), tensor.data_ptr(), tensor.requires_grad, tensor.dtype)
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    ]


def fused_paths(model):
    return {path for path, module in model.named_modules() if type(module) in FUSED.values()}


def left_alone(module, reason):
    """Converting changes nothing about ``module``, and the report says why in these words."""
    holder = nn.ModuleDict({"it": module})
    before = type(module), dict(vars(module))
    pyckpt.convert(holder)
    assert (type(module), dict(vars(module))) == before
    report = pyckpt.report(holder)
    assert not report.swapped
    assert reason in report.left["it"], report.left["it"]


# ---- torch.nn's types ------------------------------------------------------------------------------------------------------

LAYERS = [
    (lambda: nn.GELU(), (4, 12)),
    (lambda: nn.GELU(approximate="tanh"), (4, 12)),
    (lambda: nn.SiLU(), (4, 12)),
    (lambda: nn.SiLU(inplace=True), (4, 12)),
    (lambda: nn.ReLU(), (4, 12)),
    (lambda: nn.ReLU(inplace=True), (4, 12)),
    (lambda: nn.LayerNorm(12, eps=0.5), (4, 12)),
    (lambda: nn.LayerNorm((3, 4), bias=False), (5, 3, 4)),
    (lambda: nn.LayerNorm(12, elementwise_affine=False), (4, 12)),
    (lambda: nn.RMSNorm(12, eps=0.25), (4, 12)),
    (lambda: nn.RMSNorm((3, 4)), (5, 3, 4)),
    (lambda: nn.Dropout(0.0), (4, 12)),
    (lambda: nn.Dropout(0.7).eval(), (4, 12)),
    (lambda: nn.Softmax(dim=1), (3, 4, 5)),
    (lambda: nn.Softmax(dim=-1), (3, 4, 5)),
]


@pytest.mark.parametrize(("make", "shape"), LAYERS, ids=[repr(make()) for make, _ in LAYERS])
def test_exact_types_are_swapped_with_their_options(make, shape):
    layer = make()
    for index, parameter in enumerate(layer.parameters()):
        parameter.data = 1 + 0.3 * randn(*parameter.shape, seed=index)
    original = copy.deepcopy(layer)
    assert pyckpt.convert(layer) is layer
    assert type(layer) is FUSED[type(original).__name__]
    assert repr(layer) == repr(original)
    assert list(layer.state_dict()) == list(original.state_dict())
    assert_equivalent(layer, original, 2 * randn(*shape))
    if getattr(layer, "inplace", False):
        x = randn(*shape)
        assert layer(x).data_ptr() == x.data_ptr()


def test_the_fused_forward_is_what_runs(monkeypatch):
    calls = []
    for name, cls in FUSED.items():
        forward = cls.forward
        spy = lambda self, input, name=name, forward=forward: (calls.append(name), forward(self, input))[1]  # noqa: E731
        monkeypatch.setattr(cls, "forward", spy)
    model = Block()
    model(randn(3, 12))
    assert calls == []
    pyckpt.convert(model)(randn(3, 12))
    assert set(calls) == set(FUSED)


def test_only_the_classes_change():
    model = Block()
    model.norm1.weight.requires_grad_(False)
    model.norm2.double()
    model.register_buffer("table", randn(3))
    model.eval()
    model.norm2.train()
    handle = model.act.register_forward_hook(lambda *args: None)
    before, keys = state_of(model), list(model.state_dict())
    assert pyckpt.convert(model) is model
    assert fused_paths(model) == SWAPPED_IN_BLOCK
    assert state_of(model) == before
    assert list(model.state_dict()) == keys
    assert not any("pyckpt" in name for name, _ in (*model.named_modules(), *model.named_parameters(), *model.named_buffers()))
    assert "_pyckpt" not in repr(model)
    handle.remove()
    assert not model.act._forward_hooks


def test_outputs_and_gradients_of_a_whole_model_agree():
    model = Block()
    original = copy.deepcopy(model)
    assert_equivalent(pyckpt.convert(model), original, randn(5, 12))


def test_an_optimizer_made_before_goes_on_as_without_conversion():
    def train(convert):
        model = Block()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(6):
            if convert and step == 3:
                pyckpt.convert(model)
            optimizer.zero_grad()
            loss = (model(randn(8, 12, seed=step)) - 1).square().mean()
            loss.backward()
            optimizer.step()
        return model, loss.item()

    (plain, want), (converted, got) = train(False), train(True)
    assert got == pytest.approx(want, rel=1e-5)
    start = Block()
    for name, parameter in converted.named_parameters():
        assert not torch.equal(parameter, start.get_parameter(name)), f"{name} no longer learns"
        torch.testing.assert_close(parameter, plain.get_parameter(name), rtol=0, atol=1e-3 * 1e-2)  # of one step


def test_hooks_fire_once_per_call_and_may_replace_the_output():
    def calls_of(convert):
        model, calls = Block(), []
        model.norm1.register_forward_hook(lambda m, i, o: calls.append("forward"))
        model.act.register_forward_pre_hook(lambda m, i: calls.append("pre"))
        model.norm2.register_full_backward_hook(lambda m, gi, go: calls.append("backward"))
        model.silu.register_forward_hook(lambda m, i, o: 2.0 * o)
        if convert:
            pyckpt.convert(model)
            assert calls == [], "conversion ran a hook"
        return run(model, randn(4, 12)), calls

    (want, want_calls), (got, got_calls) = calls_of(False), calls_of(True)
    assert got_calls == want_calls and sorted(got_calls) == ["backward", "forward", "pre"]
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_shared_modules_stay_shared_and_are_reported_once():
    act = nn.GELU()
    model = nn.Sequential(nn.Linear(4, 4), act, nn.Sequential(nn.Linear(4, 4), act))
    pyckpt.convert(model)
    assert model[1] is act and model[2][1] is act and type(act) is pyckpt.nn.GELU
    assert pyckpt.report(model).swapped == {"1": "nn.GELU -> pyckpt.nn.GELU"}
    pyckpt.revert(model)
    assert type(act) is nn.GELU


def test_converting_twice_is_converting_once():
    model = Block()
    before = {path: type(module) for path, module in model.named_modules()}
    pyckpt.convert(model)
    once = [(type(module), dict(vars(module))) for module in model.modules()]
    pyckpt.convert(model)
    assert [(type(module), dict(vars(module))) for module in model.modules()] == once
    pyckpt.revert(model)
    assert {path: type(module) for path, module in model.named_modules()} == before


def test_meta_modules_and_default_devices():
    with torch.device("meta"):
        model = pyckpt.convert(Block(), verify=True)
    assert fused_paths(model) == SWAPPED_IN_BLOCK
    assert all(parameter.is_meta for parameter in model.parameters())
    model.to_empty(device="cpu").load_state_dict(Block().state_dict())
    assert_equivalent(model, Block(), randn(3, 12))


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_conversion_under_no_grad_and_inference_mode(context):
    with context():
        model = pyckpt.convert(nn.Sequential(nn.LayerNorm(8), ElsewhereGelu()), verify=True)
    assert fused_paths(model) == {"0", "1"}


# ---- what is left alone ----------------------------------------------------------------------------------------------------


class Gelu3(nn.GELU):
    def forward(self, x):
        return 3 * super().forward(x)


class ChannelsFirst(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


class SameLayerNorm(nn.LayerNorm):
    pass


def test_subclasses_are_left():
    left_alone(Gelu3(), "a subclass of nn.GELU, has a forward of its own")
    left_alone(ChannelsFirst(6), "a subclass of nn.LayerNorm, has a forward of its own")
    left_alone(SameLayerNorm(6), "only nn.LayerNorm itself is swapped")


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


def test_weight_norm_by_hook_works_and_is_verified():
    layer = nn.utils.weight_norm(nn.LayerNorm(4), dim=None)
    original = copy.deepcopy(layer)
    pyckpt.convert(layer, verify=True)
    assert type(layer) is pyckpt.nn.LayerNorm
    assert_equivalent(layer, original, randn(3, 4))


def test_torchscript_modules_are_left():
    scripted = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.GELU()))
    pyckpt.convert(scripted)
    report = pyckpt.report(scripted)
    assert not report.swapped and list(report.left) == ["1"]
    assert "TorchScript" in report.left["1"]


def test_quantized_and_prepared_modules_are_left():
    from torch.ao.nn.quantized import LayerNorm as QuantizedLayerNorm

    one = torch.ones(4)
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
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        early, late = fully_shard(nn.LayerNorm(4), mesh=mesh), fully_shard(pyckpt.convert(nn.LayerNorm(4)), mesh=mesh)
        cls = type(early)
        pyckpt.convert(early)
        assert type(early) is cls and isinstance(early, nn.LayerNorm)
        assert "fully_shard" in pyckpt.report(early).left[""]
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


# ---- activation classes of other libraries, by behaviour ---------------------------------------------------------------------
# Their names mislead on purpose: what counts is what they compute.


class ElsewhereGelu(nn.Module):  # erf
    def forward(self, x):
        return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


class Unrecognisable(nn.Module):  # silu
    def forward(self, h):
        return h.sigmoid().mul(h)


class TanhOrScaled(nn.Module):
    """tanh GELU by a function held as attribute; times ``scale``."""

    def __init__(self, scale):
        super().__init__()
        self.scale, self.act = scale, functools.partial(F.gelu, approximate="tanh")

    def forward(self, input):
        return self.scale * self.act(input)


class ModeIndependent(nn.Module):  # relu
    def forward(self, x):
        return torch.relu(x) if self.training else F.relu(x)


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


class Noisy(ElsewhereGelu):
    def forward(self, x):
        return F.gelu(x) + 1e-3 * torch.randn_like(x) * self.training


class TwoArgumentsGelu(nn.Module):
    def forward(self, x, scale=1.0):
        return F.gelu(x) * scale


class KeywordsGelu(nn.Module):
    def forward(self, x, **ignored):
        return F.gelu(x)


class TensorGelu(nn.Module):
    def __init__(self):
        super().__init__()
        self.half = torch.tensor(0.5)

    def forward(self, x):
        return x * self.half * (1.0 + torch.erf(x / math.sqrt(2.0)))


class ParameterGelu(nn.Module):
    def __init__(self):
        super().__init__()
        self.half = nn.Parameter(torch.tensor(0.5))

    forward = TensorGelu.forward


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


class GuidedRelu(nn.Module):
    """relu whose backward is another's, as interpretability tools use"""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.relu()

        @staticmethod
        def backward(ctx, grad):
            return grad.relu()

    def forward(self, x):
        return self.Function.apply(x)


class ClampRelu(nn.Module):  # its derivative at 0 is 1
    def forward(self, x):
        return torch.clamp(x, min=0)


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
        (Noisy, "randn_like"),
        (TwoArgumentsGelu, "other arguments"),
        (KeywordsGelu, "other arguments"),
        (TensorGelu, "holds a Tensor in attribute 'half'"),
        (ParameterGelu, "has parameters"),
        (CountingGelu, "changes its own attributes"),
        (BranchingGelu, "no plain elementwise expression"),
        (ShapeGelu, "no plain elementwise expression"),
        (CastingGelu, "uses float"),
        (GuidedRelu, "no plain elementwise expression"),
        (ClampRelu, "none of gelu"),
        (ProductRelu, "at infinity"),
        (DetachedRelu, "could not be probed"),
        (TrainingGelu, "in training and in evaluation"),
        (WritingRelu, "writes to its input"),
        (MeasuredGelu, "more to it than forward: flops"),
        (LoadingGelu, "overrides get_extra_state"),
        (ApproximateGelu, "attribute approximate"),
        (SlottedGelu, "memory layout"),
    ],
)
def test_look_alikes_are_left_with_the_reason(make, reason):
    module = make()
    if isinstance(module, TanhOrScaled):
        pyckpt.convert(nn.Sequential(TanhOrScaled(1.0)))  # the proof for other options of the class must not serve here
        module.__class__ = type("TanhGelu", (TanhOrScaled,), {})
        pyckpt.convert(nn.Sequential(type(module)(1.0)))
    left_alone(module, reason)
    if isinstance(module, CountingGelu):
        assert module.calls == 0, "probing ran the user's own module"


def test_a_changed_option_or_forward_is_proven_anew(monkeypatch):
    module = TanhOrScaled(1.0)
    assert type(pyckpt.convert(copy.deepcopy(module))) is pyckpt.nn.GELU
    module.act = F.silu
    assert type(pyckpt.convert(module)) is pyckpt.nn.SiLU
    one, true = TanhOrScaled(1), TanhOrScaled(True)  # equal to 1.0, yet other values
    assert type(pyckpt.convert(one)) is type(pyckpt.convert(true)) is pyckpt.nn.GELU
    assert type(pyckpt.convert(ElsewhereGelu())) is pyckpt.nn.GELU
    monkeypatch.setattr(ElsewhereGelu, "forward", lambda self, x: 2 * F.gelu(x))
    module = ElsewhereGelu()
    assert type(pyckpt.convert(module)) is ElsewhereGelu


def test_constants_rounded_to_float32_are_accepted_where_float32_cannot_tell():
    class ShortConstantGelu(nn.Module):
        def forward(self, x):
            return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1.0 + 0.044715 * x * x)))

    model = nn.Sequential(nn.Linear(3, 3), ShortConstantGelu())
    assert "equal to" in pyckpt.report(model).left["1"]
    assert_equivalent(pyckpt.convert(copy.deepcopy(model)), model, randn(50, 3))
    assert fused_paths(pyckpt.convert(model.double())) == set()
    assert "float64" in pyckpt.report(model).left["1"]


HUGGING_FACE = {
    "gelu": ("GELU", "none"),
    "gelu_python": ("GELU", "none"),
    "gelu_new": ("GELU", "tanh"),
    "gelu_fast": ("GELU", "tanh"),
    "gelu_accurate": ("GELU", "tanh"),
    "gelu_pytorch_tanh": ("GELU", "tanh"),
    "gelu_python_tanh": ("GELU", "tanh"),
    "silu": ("SiLU", None),
    "swish": ("SiLU", None),
    "relu": ("ReLU", None),
}


def test_hugging_face_activations():
    activations = pytest.importorskip("transformers.activations")
    assert {"gelu", "gelu_new", "silu", "quick_gelu", "relu2"} <= set(activations.ACT2CLS)
    for name in activations.ACT2CLS:
        module = activations.ACT2FN[name]
        original, before = copy.deepcopy(module), type(module)
        pyckpt.convert(module, verify=True)
        cls, approximate = HUGGING_FACE.get(name, (None, None))
        assert type(module) is (FUSED[cls] if cls else before), name
        if cls is None:
            assert "" in pyckpt.report(module).left or "Linear" in before.__name__ or "Laplace" in before.__name__, name
            continue
        assert getattr(module, "approximate", None) == approximate, name
        x = torch.linspace(-9, 9, 901, dtype=torch.float64)
        for got, want in zip(run(module, x), run(original, x), strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=2e-11, msg=name)
        assert_equivalent(module, original, 3 * randn(40, 8))


# ---- revert, copies ----------------------------------------------------------------------------------------------------------


def mixed_model():
    model = nn.Sequential(Block(), nn.Linear(12, 12), TanhOrScaled(1.0), ElsewhereGelu(), KeepsMethod(True), pyckpt.nn.LayerNorm(12))
    return model.eval()


class KeepsMethod(nn.Module):
    """Holds a method of its own as attribute, as Hugging Face's GELUActivation(use_gelu_python=True) does."""

    def __init__(self, python):
        super().__init__()
        self.act = self._python if python else F.gelu

    def _python(self, x):
        return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))

    def forward(self, x):
        return self.act(x)


def test_revert_restores_types_attributes_and_bits():
    model = mixed_model()
    x = randn(5, 12)
    types, attributes, want = [type(m) for m in model.modules()], [dict(vars(m)) for m in model.modules()], run(model, x)
    pyckpt.convert(model)
    assert [type(m) for m in model.modules()] != types
    assert "act" not in vars(model[4])
    assert pyckpt.revert(model) is model
    assert [type(m) for m in model.modules()] == types
    assert [dict(vars(m)) for m in model.modules()] == attributes
    assert all(torch.equal(a, b) for a, b in zip(run(model, x), want, strict=True))
    assert type(model[5]) is pyckpt.nn.LayerNorm, "the model was built with this one"
    assert model[4].act.__self__ is model[4]


def test_revert_leaves_what_was_changed_since():
    layer = pyckpt.convert(nn.LayerNorm(4))
    nn.utils.parametrize.register_parametrization(layer, "weight", nn.Softplus())
    with pytest.warns(UserWarning, match=r"\(the model itself\) was converted, then became a"):
        pyckpt.revert(layer)
    assert isinstance(layer, pyckpt.nn.LayerNorm)
    nn.utils.parametrize.remove_parametrizations(layer, "weight")
    assert type(pyckpt.revert(layer)) is nn.LayerNorm
    act = pyckpt.convert(ElsewhereGelu())
    act.forward = act.forward
    with pytest.warns(UserWarning, match="forward of its own"):
        pyckpt.revert(act)
    assert type(act) is pyckpt.nn.GELU
    del act.forward
    assert type(pyckpt.revert(act)) is ElsewhereGelu


def through_torch_save(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def replica(model):
    """As DataParallel copies modules: the class and a shallow copy of the __dict__, children replaced."""
    new = model._replicate_for_data_parallel()
    new._parameters = dict(model._parameters)
    new._modules = {name: replica(child) for name, child in model._modules.items()}
    return new


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), through_torch_save, replica]
)
def test_copies_of_a_converted_model_work_and_can_be_reverted(duplicate):
    model = mixed_model()
    x, before = randn(5, 12), [type(m) for m in model.modules()]
    pyckpt.convert(model)
    after, keys = [type(m) for m in model.modules()], list(model.state_dict())
    clone = duplicate(model)
    assert [type(m) for m in clone.modules()] == after
    assert torch.equal(clone(x), model(x))
    if duplicate is not replica:
        assert list(clone.state_dict()) == keys
    pyckpt.revert(clone)
    assert [type(m) for m in clone.modules()] == before
    torch.testing.assert_close(clone(x), model(x), rtol=1e-5, atol=1e-5)
    if duplicate is not replica:
        assert clone[4].act.__self__ is clone[4]
    assert [type(m) for m in model.modules()] == after, "reverting the copy changed the original"
    model(x)


def test_a_converted_state_dict_loads_anywhere():
    model, plain = pyckpt.convert(Block()), Block()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    plain.load_state_dict(model.state_dict(), strict=True)
    torch.testing.assert_close(plain(randn(3, 12)), model(randn(3, 12)), rtol=1e-5, atol=1e-5)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    model.load_state_dict(torch.load(file, weights_only=True), strict=True)


# ---- compiled models, misuse, kill switch -------------------------------------------------------------------------------------


def test_a_compiled_model_is_converted_inside_its_wrapper():
    seen = []

    def backend(graph, inputs):
        seen.append(graph)
        return graph.forward

    torch._dynamo.reset()
    model = Block()
    compiled = torch.compile(model, backend=backend)
    x = randn(4, 12)
    want = compiled(x)
    graphs = len(seen)
    assert pyckpt.convert(compiled) is compiled
    assert fused_paths(model) == SWAPPED_IN_BLOCK
    assert set(pyckpt.report(compiled).swapped) == SWAPPED_IN_BLOCK
    torch.testing.assert_close(compiled(x), want, rtol=1e-5, atol=1e-5)
    assert len(seen) > graphs, "the old code was run: nothing was compiled anew"
    pyckpt.revert(compiled)
    assert fused_paths(model) == set()
    assert torch.equal(compiled(x), want)
    torch._dynamo.reset()


def test_a_module_compiled_in_place():
    torch._dynamo.reset()
    act = ElsewhereGelu()
    act.compile(backend="eager")
    want = act(randn(9))
    assert type(pyckpt.convert(act)) is pyckpt.nn.GELU
    torch.testing.assert_close(act(randn(9)), want, rtol=1e-5, atol=1e-6)
    torch._dynamo.reset()


@pytest.mark.parametrize("function", [pyckpt.convert, pyckpt.revert, pyckpt.report])
@pytest.mark.parametrize(
    ("argument", "words"),
    [
        (nn.GELU, "the class GELU; pass an instance: "),
        ([nn.GELU()], "a list; pass the models one by one"),
        ({"weight": torch.ones(1)}, "type dict; pass the model itself"),
        (F.gelu, "builtin_function_or_method"),
        (None, "NoneType"),
    ],
)
def test_what_is_not_a_module_is_refused(function, argument, words):
    with pytest.raises(TypeError, match=words) as caught:
        function(argument)
    assert f"pyckpt.{function.__name__}" in str(caught.value) and "torch.nn.Module" in str(caught.value)


def test_kill_switch_and_imports():
    """In a process of its own: PYCKPT_DISABLE makes convert do nothing and say so once; transformers is not imported."""
    script = """
    import os, sys, warnings
    import torch, pyckpt
    from torch import nn
    os.environ["PYCKPT_DISABLE"] = "1"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            model = nn.Sequential(nn.GELU(), nn.LayerNorm(3))
            assert pyckpt.convert(model, verify=True) is model
            assert [type(m) for m in model] == [nn.GELU, nn.LayerNorm]
    assert [str(w.message) for w in caught if "PYCKPT_DISABLE" in str(w.message)].__len__() == 1, caught
    assert caught[0].filename == "<string>", caught[0].filename
    os.environ["PYCKPT_DISABLE"] = "0"
    assert type(pyckpt.convert(model)[0]) is pyckpt.nn.GELU
    os.environ["PYCKPT_DISABLE"] = "1"
    assert type(pyckpt.revert(model)[0]) is nn.GELU
    assert not {"transformers", "torch._dynamo"} & set(sys.modules)
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYCKPT_DISABLE"}
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, env=environment, timeout=120)


# ---- verify --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_verify_passes_and_leaves_no_trace(dtype):
    model = mixed_model().to(dtype).train()
    model[0].drop.p = 0.5
    model[0].act.register_forward_hook(lambda *args: pytest.fail("a hook ran"))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.manual_seed(0)
    rng, before = torch.get_rng_state(), state_of(model)
    pyckpt.convert(model, verify=True)
    assert state_of(model)[-3:] == before[-3:] and fused_paths(model[0]) == SWAPPED_IN_BLOCK
    assert torch.equal(torch.get_rng_state(), rng)
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters())
    assert all(m.training for m in model.modules())


def wrong_gelu(self, x):
    return F.gelu(x, approximate="tanh" if self.approximate == "none" else "none")


def wrong_eps(self, x):
    return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, 1e-5)


def wrong_gradient(self, x):
    return F.silu(x).detach() + 0 * x


def wrong_dtype(self, x):
    return F.relu(x).double()


def not_a_number(self, x):
    return F.softmax(x, self.dim) * math.nan


def wrong_in_half(self, x):
    return F.gelu(x, approximate=self.approximate) * (1 if x.dtype == torch.float64 else 1.1)


def fails(self, x):
    raise NotImplementedError("no kernel")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "forward", "path"),
    [
        ("GELU", wrong_gelu, "0.act"),
        ("GELU", wrong_in_half, "0.act"),
        ("LayerNorm", wrong_eps, "0.norm2"),
        ("SiLU", wrong_gradient, "0.silu"),
        ("ReLU", wrong_dtype, "0.relu"),
        ("Softmax", not_a_number, "0.softmax"),
        ("RMSNorm", fails, "0.rms"),
    ],
)
def test_verify_names_the_module_and_changes_nothing(monkeypatch, name, forward, path, dtype):
    model = mixed_model().to(dtype)
    before, types = state_of(model), [type(m) for m in model.modules()]
    monkeypatch.setattr(FUSED[name], "forward", forward)
    with pytest.raises(ConversionError, match=rf"{path} \(nn.{name} -> pyckpt.nn.{name}\)") as caught:
        pyckpt.convert(model, verify=True)
    assert isinstance(caught.value, RuntimeError) and "unchanged" in str(caught.value)
    assert [type(m) for m in model.modules()] == types and state_of(model) == before
    pyckpt.convert(model)
    assert type(model.get_submodule(path)) is FUSED[name]


# ---- report --------------------------------------------------------------------------------------------------------------------


def test_report_tells_the_present_state():
    model = nn.ModuleDict(
        {
            "blocks": nn.ModuleList(Block() for _ in range(3)),
            "layer": nn.TransformerEncoderLayer(8, 2, activation=F.gelu),
            "own": pyckpt.nn.GELU(),
            "odd": Gelu3(),
            "batch": nn.BatchNorm1d(3),
            "embed": nn.Embedding(3, 3),
            "identity": nn.Identity(),
        }
    )
    before = pyckpt.report(model)
    assert before.swapped == {} and before.native == {"own": "pyckpt.nn.GELU"}
    assert before.left["blocks.1.act"] == "not converted: nn.GELU would become pyckpt.nn.GELU"
    after = pyckpt.report(pyckpt.convert(model))
    assert {path for path in after.swapped if path.startswith("blocks.0")} == {f"blocks.0.{p}" for p in SWAPPED_IN_BLOCK}
    assert after.swapped["blocks.2.act"] == "nn.GELU -> pyckpt.nn.GELU"
    assert set(after.swapped) == fused_paths(model) - {"own"}
    assert set(after.left) == {"blocks.0.tanh", "blocks.1.tanh", "blocks.2.tanh", "odd", "batch", "layer.activation"}
    assert after.left["batch"] == "no fused counterpart of nn.BatchNorm1d"
    assert "torch.nn.functional.gelu: a function" in after.left["layer.activation"]
    assert after.native == before.native
    assert set(before.left) == set(after.left) | set(after.swapped)

    assert json.loads(json.dumps(after.to_dict())) == after.to_dict()
    counts = {"swapped": len(after.swapped), "left": 6, "native": 1}
    assert after.to_dict() == {"swapped": after.swapped, "left": after.left, "native": after.native, "counts": counts}
    lines = str(after).splitlines()
    assert f"{len(after.swapped)} swapped" in lines[0] and "6 left" in lines[0]
    (row,) = [line for line in lines if "blocks.*.act" in line]
    assert row.split() == ["blocks.*.act", "3", "nn.GELU", "->", "pyckpt.nn.GELU"]
    assert row.index("nn.GELU") == next(line for line in lines if "BatchNorm" in line).index("no fused"), "not aligned"
    assert str(pyckpt.report(nn.Linear(2, 2))).startswith("pyckpt: 0 swapped")


def test_report_of_foreign_classes_names_both_sides():
    report = pyckpt.report(pyckpt.convert(TanhOrScaled(1.0)))
    assert report.swapped == {"": f"{__name__}.TanhOrScaled -> pyckpt.nn.GELU(approximate='tanh')"}
    assert "(the model itself)" in str(report)


# ---- whole Hugging Face models --------------------------------------------------------------------------------------------------

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
WORDS = {"vocab_size": 50}
MODELS = {
    "bert": (SMALL | WORDS, {"GELU": 2, "LayerNorm": 5, "Dropout": 7}, {}),
    "roberta": (SMALL | WORDS, {"GELU": 2, "LayerNorm": 5, "Dropout": 7}, {}),
    "gpt2": ({"n_embd": 32, "n_layer": 2, "n_head": 2} | WORDS, {"GELU": 2, "LayerNorm": 5, "Dropout": 7}, {}),
    "vit": (SMALL | {"image_size": 16, "patch_size": 8}, {"GELU": 2, "LayerNorm": 5, "Dropout": 5}, {}),
    "llama": (SMALL | WORDS, {"SiLU": 2}, {"LlamaRMSNorm": 5}),
    "opt": (SMALL | WORDS | {"ffn_dim": 64, "word_embed_proj_dim": 32}, {"ReLU": 2, "LayerNorm": 5}, {}),
}


@pytest.mark.parametrize("name", MODELS)
def test_hugging_face_models(name):
    transformers = pytest.importorskip("transformers")
    settings, swapped, left = MODELS[name]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **settings)
    model = transformers.AutoModel.from_config(config, attn_implementation="eager").eval()
    original, types = copy.deepcopy(model), [type(m) for m in model.modules()]
    pyckpt.convert(model, verify=True)
    report = pyckpt.report(model)
    counted = [text.split("-> pyckpt.nn.")[1].split("(")[0] for text in report.swapped.values()]
    assert {cls: counted.count(cls) for cls in set(counted)} == swapped
    for cls, count in left.items():
        assert sum(cls in reason for reason in report.left.values()) == count
    if name == "vit":
        assert_equivalent(model, original, randn(2, 3, 16, 16))
    else:
        embedded = {"inputs_embeds": randn(2, 9, 32)}
        assert_equivalent(Embedded(model), Embedded(original), embedded["inputs_embeds"])
    pyckpt.revert(model)
    assert [type(m) for m in model.modules()] == types


class Embedded(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(inputs_embeds=x, **({"use_cache": False} if hasattr(self.model.config, "use_cache") else {}))[0]
