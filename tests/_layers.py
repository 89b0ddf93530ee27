"""Every layer beside what plain torch offers for the same function, for tests that run over all of them."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import pyckpt.functional as F
import pyckpt.nn as fused

COLUMNS = 12


class ScaledSoftmax(nn.Module):
    """functional.softmax with its options as a module; `keep` is a boolean mask, `bias` an additive one that is trained."""

    def __init__(self, keep=None, bias=None, **options):
        super().__init__()
        device = torch.get_default_device()
        self.register_buffer("keep", None if keep is None else keep.to(device))
        self.bias = None if bias is None else nn.Parameter(bias.clone().to(device))
        self.options = options

    def forward(self, x):
        return F.softmax(x, mask=self.keep if self.bias is None else self.bias, **self.options)


class ComposedSoftmax(ScaledSoftmax):
    """The same in what a user of torch writes."""

    def forward(self, x):
        scores = x * self.options.get("scale", 1.0)
        if self.bias is not None:
            scores = scores + self.bias
        keep = self.keep
        if self.options.get("is_causal"):
            offset = (
                x.shape[-1] - x.shape[-2] if self.options.get("causal_alignment") == "bottom_right" else 0
            )
            causal = torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).tril(offset)
            keep = causal if keep is None else keep & causal
        if keep is not None:
            scores = scores.masked_fill(~keep, float("-inf"))
        return torch.softmax(scores, -1)


class QuickGELU(nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(1.702 * x)


def _keep_mask():
    keep = torch.rand(COLUMNS, generator=torch.Generator().manual_seed(3)) > 0.4
    keep[0] = True
    return keep


def _bias_mask():
    return torch.randn(COLUMNS, generator=torch.Generator().manual_seed(4))


@dataclass(frozen=True)
class Layer:
    """ours and torchs make the module; random: its output depends on torch's generator, and torch's own mask differs."""

    name: str
    ours: Callable[[], nn.Module]
    torchs: Callable[[], nn.Module] | None
    random: bool = False

    def pair(self):
        """Our module and torch's with equal parameters that are not the initial ones."""
        ours = perturb(self.ours())
        theirs = self.torchs()
        theirs.load_state_dict(ours.state_dict())
        return ours, theirs


def perturb(module):
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype) * 0.3)
    return module


def _same(name, *args, **kwargs):
    return lambda: getattr(fused, name)(*args, **kwargs), lambda: getattr(nn, name)(*args, **kwargs)


def _softmax(**options):
    return lambda: ScaledSoftmax(**options), lambda: ComposedSoftmax(**options)


LAYERS = [
    Layer("gelu", *_same("GELU")),
    Layer("gelu_tanh", *_same("GELU", "tanh")),
    Layer("gelu_sigmoid", lambda: fused.GELU("sigmoid"), QuickGELU),
    Layer("silu", *_same("SiLU")),
    Layer("relu", *_same("ReLU")),
    Layer("layer_norm", *_same("LayerNorm", COLUMNS)),
    Layer("layer_norm_no_bias", *_same("LayerNorm", COLUMNS, bias=False)),
    Layer("layer_norm_plain", *_same("LayerNorm", COLUMNS, elementwise_affine=False)),
    Layer("rms_norm", *_same("RMSNorm", COLUMNS)),
    Layer("rms_norm_plain", *_same("RMSNorm", COLUMNS, eps=1e-6, elementwise_affine=False)),
    Layer("softmax", *_same("Softmax", -1)),
    Layer("softmax_keep", *_softmax(keep=_keep_mask(), scale=0.5)),
    Layer("softmax_bias", *_softmax(bias=_bias_mask(), scale=0.7)),
    Layer("softmax_causal", *_softmax(is_causal=True)),
    Layer("softmax_bottom_right", *_softmax(is_causal=True, causal_alignment="bottom_right", scale=2.0)),
    Layer("dropout", *_same("Dropout", 0.4), random=True),
    Layer("softmax_dropout", lambda: ScaledSoftmax(keep=_keep_mask(), dropout_p=0.3), None, random=True),
]
EXACT = [layer for layer in LAYERS if not layer.random]
RANDOM = [layer for layer in LAYERS if layer.random]


# One layer for each way into the package: enough for the quick run of what costs a compilation per layer.
QUICK = {"gelu", "layer_norm", "rms_norm", "softmax_bias", "softmax_causal", "dropout", "softmax_dropout"}


def by_name(layers, costly=False):
    """Arguments of parametrize; with `costly` most layers are left to the slow run."""
    marks = [() if not costly or layer.name in QUICK else pytest.mark.slow for layer in layers]
    params = [pytest.param(layer, id=layer.name, marks=m) for layer, m in zip(layers, marks, strict=True)]
    return {"argvalues": params}


def gradients(module, x, grad=None, seed=0):
    """(output, dx, *dparameters) of module(x) from fresh leaves, with torch's generator at `seed`."""
    x = x.detach().clone().requires_grad_()
    torch.manual_seed(seed)
    y = module(x)
    grad = torch.linspace(-1, 2, y.numel(), dtype=y.dtype).reshape(y.shape) if grad is None else grad
    return [y.detach(), *torch.autograd.grad(y, [x, *module.parameters()], grad)]


def assert_close(actual, expected, what="", rtol=2e-5, atol=2e-6):
    assert len(actual) == len(expected)
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        torch.testing.assert_close(a, e, rtol=rtol, atol=atol, msg=lambda m, i=i: f"{what} [{i}]: {m}")


def assert_equal(actual, expected, what=""):
    assert_close(actual, expected, what, rtol=0, atol=0)
