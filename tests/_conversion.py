"""A model with every kind of module that conversion meets, and what must hold before and after."""

import copy
import functools
import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

import pyckpt

NAMES = ("GELU", "SiLU", "ReLU", "LayerNorm", "RMSNorm", "Dropout", "Softmax")
FUSED = {name: getattr(pyckpt.nn, name) for name in NAMES}


class Block(nn.Module):
    """Every swapped type, one that is not, and a norm without parameters; dropout 0, to compare outputs."""

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


class Widened(TorchFunctionMode):
    """Whoever asks for float32 gets float64: models that compute in float32, in all but exact arithmetic."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        def wide(value):
            return torch.float64 if value is torch.float32 else value

        func = torch.Tensor.double if func is torch.Tensor.float else func
        return func(*map(wide, args), **{name: wide(value) for name, value in (kwargs or {}).items()})


def run(module, x):
    """Output and the gradients of input and parameters, of a fixed weighted sum."""
    leaf = x.clone().requires_grad_()
    output = module(leaf * 1.0)
    output = output if isinstance(output, torch.Tensor) else output[0]
    weights = torch.linspace(0, 9, output.numel(), dtype=torch.float64).cos().reshape(output.shape).to(output)
    parameters = [p for p in module.parameters() if p.requires_grad]
    return [output.detach(), *torch.autograd.grad(output, [leaf, *parameters], weights, allow_unused=True)]


def assert_equivalent(converted, original, x, ulps=4, common_scale=False):
    """Output and all gradients are as near to float64 as the original's: 1.1 times its error plus ``ulps``.

    An ulp is that of the tensor's largest value; with ``common_scale`` of the largest among all gradients,
    for models in which some gradient is zero but for rounding, as that of a key's bias.
    """
    with Widened():
        exact = run(copy.deepcopy(original).double(), x.double())
    peaks = [0.0 if want is None else float(want.abs().max()) for want in exact]
    if common_scale:
        peaks[1:] = [max(peaks[1:])] * len(peaks[1:])
    for got, eager, want, peak in zip(run(converted, x), run(original, x), exact, peaks, strict=True):
        if want is None:
            assert got is None and eager is None
            continue
        assert got.dtype == eager.dtype
        allowed = 1.1 * (eager - want).abs().max() + ulps * torch.finfo(got.dtype).eps * peak
        assert (got - want).abs().max() <= allowed


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


class Gelu3(nn.GELU):
    def forward(self, x):
        return 3 * super().forward(x)


WIDTH = 12


class Norm(nn.Module):
    """Parameters of a norm whose weight was trained: far from 1, of both signs."""

    def __init__(self, eps=1e-3):
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(randn(WIDTH, seed=5)), eps


class GemmaNorm(Norm):
    def _norm(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    def forward(self, x):
        output = self._norm(x.float())
        output = output * (1.0 + self.weight.float())
        return output.type_as(x)


# Activation classes of other libraries. Their names mislead on purpose: what counts is what they compute.


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


class KeepsMethod(nn.Module):
    """Holds a method of its own as attribute, as Hugging Face's GELUActivation(use_gelu_python=True) does."""

    def __init__(self, python):
        super().__init__()
        self.act = self._python if python else F.gelu

    def _python(self, x):
        return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))

    def forward(self, x):
        return self.act(x)


def mixed_model():
    foreign = [TanhOrScaled(1.0), ElsewhereGelu(), KeepsMethod(True)]
    return nn.Sequential(Block(), nn.Linear(12, 12), *foreign, pyckpt.nn.LayerNorm(12), GemmaNorm()).eval()
