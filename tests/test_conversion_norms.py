"""Norm classes judged by what they compute: which are converted, to what, and which are left."""

import copy
import itertools
import pickle
import random
import sys

import pytest
import torch
import torch.nn.functional as F
from _conversion import WIDTH, GemmaNorm, Norm, Widened, assert_equivalent, randn, run
from torch import nn

import pyckpt
from pyckpt.nn import ConvertedLayerNorm, ConvertedNorm


class LlamaLike(Norm):
    def forward(self, hidden_states):
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(input_dtype)


class T5Like(Norm):
    def forward(self, hidden_states):
        variance = hidden_states.to(torch.float32).pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        if self.weight.dtype in [torch.float16, torch.bfloat16]:
            hidden_states = hidden_states.to(self.weight.dtype)
        return self.weight * hidden_states


class Bare(nn.Module):  # without parameters, for any width; eps written in the code
    def forward(self, x):
        wide = x.float()
        return (wide / (wide * wide).mean(-1, keepdim=True).add(1e-2).sqrt()).type_as(x)


class Shifting(
    nn.Module
):  # the bias is registered first, eps is named otherwise, and another number looks like it
    def __init__(self):
        super().__init__()
        self.beta, self.gamma = nn.Parameter(randn(WIDTH, seed=1)), nn.Parameter(randn(WIDTH, seed=2))
        self.other, self.tiny = 1e-3, 1e-3

    def forward(self, x):
        centred = x - x.mean(-1, keepdim=True)
        return (
            self.gamma * centred / torch.sqrt(centred.pow(2).mean(-1, keepdim=True) + self.tiny) + self.beta
        )


class LlamaRMSNorm(Norm):  # a LayerNorm under another's name
    def forward(self, x):
        x = x - x.mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))


class Planes(nn.Module):  # dimension 1 of four
    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(randn(WIDTH, seed=1)), nn.Parameter(randn(WIDTH, seed=2))
        self.eps = 1e-3

    def forward(self, x):
        u = x.mean(1, keepdim=True)
        s = (x - u).pow(2).mean(1, keepdim=True)
        return self.weight[:, None, None] * ((x - u) / torch.sqrt(s + self.eps)) + self.bias[:, None, None]


class OfTorch(nn.LayerNorm):
    def __init__(self, width=WIDTH, **options):
        super().__init__(width, eps=1e-3, **options)
        for seed, parameter in enumerate(self.parameters()):
            parameter.data = randn(*parameter.shape, seed=seed)


class Permuting(OfTorch):
    def forward(self, x):
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Moving(OfTorch):
    def forward(self, x):
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


class Float32(OfTorch):
    def forward(self, x):
        weight = self.weight.float() if self.weight is not None else None
        bias = self.bias.float() if self.bias is not None else None
        return F.layer_norm(x.float(), self.normalized_shape, weight, bias, self.eps).to(x.dtype)


class OnePlus(OfTorch):
    def forward(self, x):
        return F.layer_norm(x, self.normalized_shape, self.weight + 1.0, self.bias, self.eps)


class Constant(OfTorch):  # has an eps, but does not use it
    def forward(self, x):
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, eps=0.25)


class SameRMSNorm(nn.RMSNorm):
    pass


# class -> (what it becomes, part of the report, shape of an input)
NORMS = [
    (LlamaLike, ConvertedNorm, "(rms_norm, dtype='promoted')", (3, 4, WIDTH)),
    (GemmaNorm, ConvertedNorm, "(rms_norm, offset=1.0, dtype='input')", (3, 4, WIDTH)),
    (T5Like, ConvertedNorm, "(rms_norm, dtype='weight')", (3, 4, WIDTH)),
    (Bare, ConvertedNorm, "(rms_norm, dtype='input')", (3, 7)),
    (Shifting, ConvertedNorm, "(layer_norm, dtype='promoted')", (12, WIDTH)),
    (LlamaRMSNorm, ConvertedNorm, "(layer_norm, dtype='promoted')", (WIDTH,)),
    (Planes, ConvertedNorm, "(layer_norm, channels_first=True, dtype='promoted')", (2, WIDTH, 3, 5)),
    (OfTorch, pyckpt.nn.LayerNorm, "", (3, WIDTH)),
    (lambda: OfTorch((3, 4), bias=False), pyckpt.nn.LayerNorm, "", (5, 3, 4)),
    (Permuting, ConvertedLayerNorm, "(layer_norm, channels_first=True)", (2, WIDTH, 3, 5)),
    (Moving, ConvertedLayerNorm, "(layer_norm, channels_first=True)", (2, WIDTH, 6)),
    (lambda: Moving(elementwise_affine=False), ConvertedLayerNorm, "(layer_norm, channels_first=True)", (2, WIDTH)),
    (Float32, ConvertedLayerNorm, "(layer_norm, dtype='input')", (3, WIDTH)),
    (lambda: Float32(bias=False), ConvertedLayerNorm, "(layer_norm, dtype='input')", (3, WIDTH)),
    (OnePlus, ConvertedLayerNorm, "(layer_norm, offset=1.0)", (3, WIDTH)),
    (Constant, ConvertedLayerNorm, "(layer_norm)", (3, WIDTH)),
    (lambda: SameRMSNorm(WIDTH), pyckpt.nn.RMSNorm, "", (3, WIDTH)),
]  # fmt: skip
each_norm = pytest.mark.parametrize(
    ("make", "cls", "text", "shape"),
    NORMS,
    ids=[f"{n}-{type(make()).__name__}" for n, (make, *_) in enumerate(NORMS)],
)


@each_norm
def test_norms_are_converted_by_what_they_compute(make, cls, text, shape):
    norm = make()
    original, attributes = copy.deepcopy(norm), dict(vars(norm))
    names = list(norm.state_dict())
    assert pyckpt.convert(norm, verify=True) is norm
    assert type(norm) is cls and isinstance(norm, nn.LayerNorm) == isinstance(original, nn.LayerNorm)
    (row,) = pyckpt.report(norm).swapped.values()
    assert row.endswith(f"-> pyckpt.nn.{cls.__name__}{text}"), row
    assert list(norm.state_dict()) == names
    scales = torch.tensor([1.0, 1e-2, 1e3])[: shape[0] if len(shape) > 1 else 1]
    x = randn(*shape) * (
        scales.repeat(4)[: shape[0]].reshape(-1, *(1,) * (len(shape) - 1)) if len(shape) > 1 else 1
    )
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert_equivalent(copy.deepcopy(norm).to(dtype), copy.deepcopy(original).to(dtype), x.to(dtype))
    pyckpt.revert(norm)
    assert type(norm) is type(original) and dict(vars(norm)) == attributes


@each_norm
def test_in_exact_arithmetic_nothing_changes(make, cls, text, shape):
    original = make().double()
    x = randn(*shape, dtype=torch.float64)
    with Widened():
        want = run(original, x)
        got = run(pyckpt.convert(copy.deepcopy(original)), x)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@each_norm
def test_mixed_dtypes_give_the_dtype_that_the_original_gives(make, cls, text, shape):
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    for of_input, of_parameters in itertools.product(dtypes, dtypes):
        original, x = make().to(of_parameters), randn(*shape).to(of_input)
        converted = pyckpt.convert(copy.deepcopy(original))
        try:
            want = run(original, x)
        except RuntimeError:
            continue  # torch's own layer_norm takes few mixtures; the fused one may take more
        got = run(converted, x)
        with Widened():
            truth = run(copy.deepcopy(original).double(), x.double())
        assert [t.dtype for t in got] == [t.dtype for t in want], (of_input, of_parameters)
        for ours, theirs, exact in zip(got, want, truth, strict=True):
            ulps = 4 * max(torch.finfo(d).eps for d in (ours.dtype, want[0].dtype)) * float(exact.abs().max())
            assert (ours - exact).abs().max() <= 1.1 * (theirs - exact).abs().max() + ulps, (
                of_input,
                of_parameters,
            )


def test_eps_is_read_where_the_original_reads_it():
    x = randn(3, WIDTH)
    for norm, name in ((LlamaLike(), "variance_epsilon"), (Shifting(), "tiny"), (Permuting(), "eps")):
        original = copy.deepcopy(norm)
        pyckpt.convert(norm)
        for module in (norm, original):
            setattr(module, name, 3.0)
        input = x if name != "eps" else randn(2, WIDTH, 3, 4)
        torch.testing.assert_close(norm(input), original(input), rtol=1e-5, atol=1e-6)
    constant = pyckpt.convert(Constant())
    want = constant(x)
    constant.eps = 3.0
    assert torch.equal(constant(x), want)


def test_converted_norms_are_copied_pickled_compiled_and_reset():
    model = nn.Sequential(LlamaLike(), GemmaNorm(), Shifting(), OnePlus())
    want = run(pyckpt.convert(model), randn(4, WIDTH))
    for clone in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert all(torch.equal(a, b) for a, b in zip(run(clone, randn(4, WIDTH)), want, strict=True))
        assert [type(m) for m in pyckpt.revert(clone)] == [LlamaLike, GemmaNorm, Shifting, OnePlus]
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(randn(4, WIDTH)), want[0], rtol=1e-5, atol=1e-5)
    torch._dynamo.reset()
    assert "rms_norm, (12,), eps=0.001" in repr(model[0])
    model[1].reset_parameters()
    model[2].reset_parameters()
    assert not model[1].weight.any() and (model[2].gamma == 1).all() and not model[2].beta.any()


def test_the_number_of_dimensions_that_the_original_takes():
    planes, permuting, moving = Planes(), Permuting(), Moving()
    for norm in (planes, permuting, moving):
        pyckpt.convert(norm)
    for norm in (planes, permuting):
        with pytest.raises(RuntimeError, match="4 dimensions"):
            norm(randn(2, WIDTH, 3))
    assert moving(randn(2, WIDTH, 3)).shape == (2, WIDTH, 3)


@pytest.mark.parametrize("make", [LlamaLike, GemmaNorm, T5Like, Shifting, Float32])
def test_under_autocast_the_dtypes_stay(make):
    original, x = make(), randn(3, WIDTH)
    converted = pyckpt.convert(copy.deepcopy(original))
    for dtype in (torch.float32, torch.bfloat16):
        with torch.autocast("cpu", torch.bfloat16):
            got, want = converted(x.to(dtype)), original(x.to(dtype))
        assert got.dtype == want.dtype
        torch.testing.assert_close(got, want, rtol=0.02, atol=0.02)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*")  # by torch itself
def test_transforms_of_converted_norms():
    norm, original = pyckpt.convert(GemmaNorm()), GemmaNorm()
    x, tangent = randn(3, WIDTH), randn(3, WIDTH, seed=1)

    def loss(module, parameters, row):
        return torch.func.functional_call(module, parameters, (row,)).square().sum()

    for transform in (torch.func.grad, lambda f: torch.func.vmap(torch.func.grad(f), (None, 0))):
        rows = x if transform is not torch.func.grad else x[0]
        got, want = (
            transform(lambda p, row, m=m: loss(m, p, row))(dict(m.named_parameters()), rows)
            for m in (norm, original)
        )
        torch.testing.assert_close(got["weight"], want["weight"], rtol=1e-5, atol=1e-5)
    got, want = (torch.func.jvp(m, (x,), (tangent,)) for m in (norm, original))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_buffers_are_not_looked_at_and_stay():
    class Weightless(Bare):
        def __init__(self):
            super().__init__()
            self.register_buffer("weight", torch.ones(3), persistent=False)

    norm = Weightless()
    buffer = norm.weight
    assert type(pyckpt.convert(norm)) is ConvertedNorm and norm.weight is buffer


def test_a_changed_method_constant_or_size_is_proven_anew(monkeypatch):
    class Configured(GemmaNorm):
        factor = 1.0

        def forward(self, x):
            return self.factor * super().forward(x)

    assert type(pyckpt.convert(Configured())) is ConvertedNorm
    monkeypatch.setattr(Configured, "factor", 2.0)
    assert type(pyckpt.convert(Configured())) is Configured
    monkeypatch.setattr(Configured, "factor", 1.0)
    assert type(pyckpt.convert(Configured())) is ConvertedNorm
    monkeypatch.setattr(GemmaNorm, "_norm", lambda self, x: x)
    assert type(pyckpt.convert(Configured())) is Configured

    class ForTwelve(Norm):
        def forward(self, x):
            return self.weight * x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) / 12 + self.variance_epsilon)

    assert type(pyckpt.convert(ForTwelve())) is ConvertedNorm
    wider = ForTwelve()
    wider.weight = nn.Parameter(randn(13))
    assert type(pyckpt.convert(wider)) is ForTwelve


def test_a_profiler_goes_on_and_collections_do_no_harm():
    """Observing uses the profiler's hook; code that runs meanwhile on behalf of others is not held against the class."""
    seen = []

    class FirstSeenHere(GemmaNorm):
        pass

    class Finalized:
        def __del__(self):
            seen.append(random.random())

    def profiler(frame, event, argument):
        Finalized()

    sys.setprofile(profiler)
    try:
        converted = pyckpt.convert(FirstSeenHere())
        assert sys.getprofile() is profiler
    finally:
        sys.setprofile(None)
    assert type(converted) is ConvertedNorm and seen
