"""Every op as this package's function, torch's eager equivalent and the oracle, for tests that run over all of them."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as TF

import pyckpt.functional as F
from tests import _oracle as oracle

COLUMNS = 24
EPS = 1e-5


@dataclass(frozen=True)
class Case:
    """call and eager take (x, *parameters); exact takes wide arrays (x, grad, *parameters) and the dtype and returns
    (y, dx, *dparameters). masked: some elements are hidden whatever their value; causal: needs two dimensions."""

    name: str
    call: Callable
    eager: Callable
    exact: Callable
    parameters: tuple = field(default=())  # shapes
    masked: bool = False
    causal: bool = False

    def make_parameters(self, dtype, columns=COLUMNS):
        return [
            (torch.randn(columns, dtype=torch.float64) * 0.3 + (1 - i)).to(dtype).requires_grad_()
            for i, _ in enumerate(self.parameters)
        ]


def _elementwise(name, call, eager, exact):
    return Case(name, call, eager, lambda x, grad, dtype: exact(x, grad, dtype))


def _layer_norm(x, *parameters):
    return F.layer_norm(x, x.shape[-1:], *parameters, eps=EPS)


def _eager_layer_norm(x, *parameters):
    return TF.layer_norm(x, x.shape[-1:], *parameters, eps=EPS)


def _exact_norm(centred, count):
    def exact(x, grad, dtype, *parameters):
        weight, bias = (*parameters, None, None)[:2]
        return oracle.norm(x, weight, bias, grad, EPS, centred)[: 2 + count]

    return exact


def seeded(random, shape, seed):
    """The same numbers whichever device the test runs on."""
    return random(shape, generator=torch.Generator().manual_seed(seed), device="cpu")


def keep_mask(x):
    """A boolean mask for the last two dimensions of x (one row where x has one dimension), with an empty row."""
    shape = x.shape[-2:]
    keep = seeded(torch.rand, shape, 3).to(x.device) > 0.3
    if len(shape) == 2 and shape[0] > 1:
        keep[1] = False
    return keep


def bias_mask(x):
    bias = seeded(torch.randn, x.shape[-1:], 4).to(x)
    if bias.numel() > 1:
        bias[0] = float("-inf")
    return bias


def _composed(x, scale, keep=None, add=None):
    """What a user of torch writes."""
    s = x * scale
    s = s if add is None else s + add
    if keep is None:
        return torch.softmax(s, -1)
    none = ~keep.any(-1, keepdim=True)
    s = s.masked_fill(~keep, float("-inf")).masked_fill(none, 0.0)
    return torch.softmax(s, -1).masked_fill(none, 0.0)


def _causal(x, offset=0):
    return torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).tril(offset)


def _bottom_right(x):
    return _causal(x, x.shape[-1] - x.shape[-2])


def _numpy(mask):
    return mask.cpu().numpy() if mask.dtype == torch.bool else oracle.wide(mask)


def _softmax_case(name, call, eager, keep=None, add=None, scale=1.0):
    def exact(x, grad, dtype):
        like = torch.empty(x.shape, dtype=dtype)
        return oracle.softmax(
            x,
            grad,
            scale,
            keep=None if keep is None else _numpy(keep(like)),
            add=None if add is None else _numpy(add(like)),
        )

    masked = keep is not None or add is not None
    return Case(name, call, eager, exact, masked=masked, causal=keep in (_causal, _bottom_right))


CASES = [
    _elementwise("gelu", F.gelu, TF.gelu, oracle.gelu),
    _elementwise(
        "gelu_tanh",
        lambda x: F.gelu(x, approximate="tanh"),
        lambda x: TF.gelu(x, approximate="tanh"),
        oracle.gelu_tanh,
    ),
    _elementwise(
        "gelu_sigmoid",
        lambda x: F.gelu(x, approximate="sigmoid"),
        lambda x: x * torch.sigmoid(1.702 * x),
        oracle.gelu_sigmoid,
    ),
    _elementwise("silu", F.silu, TF.silu, oracle.silu),
    _elementwise("relu", F.relu, TF.relu, oracle.relu),
    Case("layer_norm", _layer_norm, _eager_layer_norm, _exact_norm(True, 2), (1, 1)),
    Case("layer_norm_no_bias", _layer_norm, _eager_layer_norm, _exact_norm(True, 1), (1,)),
    Case("layer_norm_plain", _layer_norm, _eager_layer_norm, _exact_norm(True, 0)),
    Case(
        "rms_norm",
        lambda x, w: F.rms_norm(x, x.shape[-1:], w, EPS),
        lambda x, w: TF.rms_norm(x, x.shape[-1:], w, EPS),
        _exact_norm(False, 1),
        (1,),
    ),
    Case(
        "rms_norm_plain",
        lambda x: F.rms_norm(x, x.shape[-1:], eps=EPS),
        lambda x: TF.rms_norm(x, x.shape[-1:], eps=EPS),
        _exact_norm(False, 0),
    ),
    _softmax_case("softmax", F.softmax, lambda x: torch.softmax(x, -1)),
    _softmax_case(
        "softmax_causal",
        lambda x: F.softmax(x, scale=0.5, is_causal=True),
        lambda x: _composed(x, 0.5, _causal(x)),
        keep=_causal,
        scale=0.5,
    ),
    _softmax_case(
        "softmax_bottom_right",
        lambda x: F.softmax(x, is_causal=True, causal_alignment="bottom_right"),
        lambda x: _composed(x, 1.0, _bottom_right(x)),
        keep=_bottom_right,
    ),
    _softmax_case(
        "softmax_keep",
        lambda x: F.softmax(x, mask=keep_mask(x), scale=0.7),
        lambda x: _composed(x, 0.7, keep_mask(x)),
        keep=keep_mask,
        scale=0.7,
    ),
    _softmax_case(
        "softmax_bias",
        lambda x: F.softmax(x, mask=bias_mask(x), scale=2.0),
        lambda x: _composed(x, 2.0, add=bias_mask(x)),
        add=bias_mask,
        scale=2.0,
    ),
]
BY_NAME = {case.name: case for case in CASES}

INPUTS = {
    "normal": lambda shape: torch.randn(shape, dtype=torch.float64),
    "tiny": lambda shape: torch.randn(shape, dtype=torch.float64) * 1e-3,
    "large": lambda shape: torch.randn(shape, dtype=torch.float64) * 20,
    "negative": lambda shape: -torch.rand(shape, dtype=torch.float64) * 4 - 2,
    "far from zero": lambda shape: torch.randn(shape, dtype=torch.float64) + 1e4,
}


def run(function, x, parameters, grad):
    """(y, dx, *dparameters) of `function` on fresh leaves."""
    leaves = [t.detach().clone().requires_grad_() for t in (x, *parameters)]
    y = function(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, grad)]


def compare(case, make, dtype, draws=10, what=""):
    """The case's outputs and gradients against oracle and eager, for `draws` inputs that make() gives in float64."""
    oracle.require_wide(dtype)
    actual, eager, exact = [], [], []
    for _ in range(draws):
        x = make().to(dtype)
        grad = torch.randn(x.shape, dtype=torch.float64).to(dtype)
        parameters = case.make_parameters(dtype, x.shape[-1])
        actual.append(run(case.call, x, parameters, grad))
        eager.append(run(case.eager, x, parameters, grad))
        right = case.exact(oracle.wide(x), oracle.wide(grad), dtype, *(oracle.wide(p) for p in parameters))
        exact.append([np.asarray(r) for r in right])
    names = ["y", "dx", *(f"dparameter{i}" for i in range(len(case.parameters)))]
    for i, name in enumerate(names):
        oracle.check(
            [a[i] for a in actual], [e[i] for e in eager], [r[i] for r in exact], f"{case.name} {what} {name}"
        )
