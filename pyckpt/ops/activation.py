"""GELU, SiLU and ReLU.

Saved for backward: the input (ReLU: the output, as torch). The output is recomputed by the forward kernel.
Double backward differentiates the reference of the backward op: torch's own formula or, for SiLU and GELU by a sigmoid, one
written out here.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .._records import regions
from ._kernels import Kernels
from ._native import CPU, check_grad, elementwise_view, fake_like, resolved, strided
from ._registry import (
    DTYPES,
    Function,
    Op,
    backend_of,
    by_torch,
    describe,
    dtype_problem,
    lowered,
    needs_grad,
    refused,
    small,
)

aten = torch.ops.aten


def _wide(x: Tensor) -> Tensor:
    return x.to(DTYPES[x.dtype][1])


def _like_second(grad: Tensor, x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x)


_SIGMOID_SCALE = 1.702  # of the sigmoid that is nearest to the normal distribution's cdf


def _gelu(x: Tensor, approximate: str) -> Tensor:
    wide = _wide(x)
    if approximate == "sigmoid":
        return (wide * torch.sigmoid(_SIGMOID_SCALE * wide)).to(x.dtype)
    return F.gelu(wide, approximate=approximate).to(x.dtype)


def _gelu_backward(grad: Tensor, x: Tensor, approximate: str) -> Tensor:
    if approximate == "sigmoid":
        return _sigmoid_backward(grad, x, _SIGMOID_SCALE)
    return aten.gelu_backward(_wide(grad), _wide(x), approximate=approximate).to(x.dtype)


def _sigmoid_backward(grad: Tensor, x: Tensor, scale: float) -> Tensor:
    """The backward of x sigmoid(scale x). It can be differentiated, as aten's silu_backward cannot."""
    scaled = _wide(x) * scale
    s = torch.sigmoid(scaled)
    return (_wide(grad) * (s + scaled * (s * (1 - s)))).to(x.dtype)


gelu_fwd = Op("gelu_fwd(Tensor x, str approximate) -> Tensor", fake=fake_like, reference=_gelu)
gelu_bwd = Op(
    "gelu_bwd(Tensor grad, Tensor x, str approximate) -> Tensor", fake=_like_second, reference=_gelu_backward
)
silu_fwd = Op(
    "silu_fwd(Tensor x) -> Tensor", fake=fake_like, reference=lambda x: F.silu(_wide(x)).to(x.dtype)
)
silu_bwd = Op(
    "silu_bwd(Tensor grad, Tensor x) -> Tensor",
    fake=_like_second,
    reference=lambda grad, x: _sigmoid_backward(grad, x, 1.0),
)
relu_fwd = Op("relu_fwd(Tensor x) -> Tensor", fake=fake_like, reference=lambda x: torch.relu(x))
relu_bwd = Op(
    "relu_bwd(Tensor grad, Tensor y) -> Tensor",
    fake=_like_second,
    reference=lambda grad, y: aten.threshold_backward(grad, y, 0),
)


class _Activation(NamedTuple):
    fwd: Op
    bwd: Op
    arguments: tuple[str, ...]
    saves_output: bool


_GELU = {
    approximate: _Activation(gelu_fwd, gelu_bwd, (approximate,), saves_output=False)
    for approximate in ("none", "tanh", "sigmoid")
}
_SILU = _Activation(silu_fwd, silu_bwd, (), saves_output=False)
_RELU = _Activation(relu_fwd, relu_bwd, (), saves_output=True)


class ActivationFunction(Function):
    """Saves its input, or its output where the derivative can be read off it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, activation: _Activation) -> Tensor:
        fwd = activation.fwd
        ctx.backend = backend_of(x, fwd)
        ctx.activation = activation
        # In a recompute region that rebuilds the input too, the input: a chain of cheap ops then keeps one tensor, not two.
        ctx.saves_output = activation.saves_output and not (
            regions.stack and regions.stack[-1][1].can_rebuild(x)
        )
        y = fwd(ctx.backend, x, *activation.arguments)
        ctx.save_for_backward(y if ctx.saves_output else x)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (saved,) = ctx.saved_tensors
        activation = ctx.activation
        return activation.bwd.in_backward(ctx.backend, grad, saved, *activation.arguments), None

    @staticmethod
    def recompute(ctx: Any, x: Tensor) -> Tensor:
        """The forward's output, bit for bit, from what the node keeps."""
        return ctx.activation.fwd(ctx.backend, x, *ctx.activation.arguments)


gelu_fwd.differentiable(lambda x, approximate: ActivationFunction.apply(x, _GELU[approximate]))
silu_fwd.differentiable(lambda x: ActivationFunction.apply(x, _SILU))
relu_fwd.differentiable(lambda x: ActivationFunction.apply(x, _RELU))


def _forward(kernels: Kernels, op: int, x: Tensor) -> Tensor:
    x = resolved(x)
    y = torch.empty_like(x)
    view = [] if x.is_contiguous() else elementwise_view(x, y)
    kernels.activation_forward(op, x, y, view)
    return y


def _backward(kernels: Kernels, op: int, grad: Tensor, x: Tensor) -> Tensor:
    grad = strided(grad)
    check_grad(grad, x)
    grad, x = resolved(grad), resolved(x)
    dx = torch.empty_like(x)
    view = [] if grad.is_contiguous() and x.is_contiguous() else elementwise_view(grad, x, dx)
    kernels.activation_backward(op, grad, x, dx, view)
    return dx


_GELU_CODES = {"none": 0, "tanh": 1, "sigmoid": 4}


def register(kernels: Kernels) -> None:
    """Lets `kernels` compute these ops on its backend."""
    name = kernels.backend
    gelu_fwd.kernel(name)(lambda x, approximate: _forward(kernels, _GELU_CODES[approximate], x))
    gelu_bwd.kernel(name)(lambda grad, x, approximate: _backward(kernels, _GELU_CODES[approximate], grad, x))
    silu_fwd.kernel(name)(lambda x: _forward(kernels, 2, x))
    silu_bwd.kernel(name)(lambda grad, x: _backward(kernels, 2, grad, x))
    relu_fwd.kernel(name)(lambda x: _forward(kernels, 3, x))
    relu_bwd.kernel(name)(lambda grad, y: _backward(kernels, 3, grad, y))


register(CPU)


def _guard(x: Tensor, approximate: str = "none") -> None:
    if x.dtype not in DTYPES:
        raise refused(f"no kernel for {describe('x', x)}")
    if approximate not in _GELU:
        raise refused(f"approximate must be 'none', 'tanh' or 'sigmoid', got {approximate!r}")


def _bwd_guard(grad: Tensor, x: Tensor, approximate: str = "none") -> None:
    _guard(x, approximate)
    check_grad(grad, x)


for _activation in (_GELU["none"], _SILU, _RELU):
    _activation.fwd.guard = _guard
    _activation.bwd.guard = _bwd_guard


def _apply(input: Tensor, activation: _Activation) -> Tensor:
    if needs_grad(input):
        return ActivationFunction.apply(input, activation)
    return activation.fwd(backend_of(input, activation.fwd), input, *activation.arguments)


def gelu(input: Tensor, approximate: str = "none") -> Tensor:
    """Gaussian error linear unit, as :func:`torch.nn.functional.gelu`; keeps its input only.

    Args:
        input: any shape; float32, bfloat16, float16 or float64. 16-bit types are computed in float32.
        approximate: "none": x * cdf(x) of the normal distribution; "tanh": its tanh approximation
            (Hendrycks & Gimpel, 2016, https://arxiv.org/abs/1606.08415); "sigmoid", which torch does not have: their
            x * sigmoid(1.702 x), known as QuickGELU.

    Raises:
        RuntimeError: another value of `approximate`; an integer input (NotImplementedError, as torch).
    """
    activation = _GELU.get(approximate)
    if activation is None or lowered(input):
        problem = (
            dtype_problem("gelu", input)
            if activation
            else f"gelu: approximate must be 'none', 'tanh' or 'sigmoid', got {approximate!r}"
        )
        if approximate == "sigmoid":
            return by_torch(problem, lambda x: x * torch.sigmoid(_SIGMOID_SCALE * x), input)
        return by_torch(problem, F.gelu, input, approximate=approximate)
    return _apply(input, activation)


def silu(input: Tensor, inplace: bool = False) -> Tensor:
    """Sigmoid linear unit x * sigmoid(x), as :func:`torch.nn.functional.silu`; keeps its input only.

    Args:
        input: any shape; float32, bfloat16, float16 or float64. 16-bit types are computed in float32.
        inplace: write the result into `input`; autograd then has to keep a copy of it, so this is torch's own function.
    """
    if inplace or lowered(input) or small(input, 2**17):
        return by_torch(dtype_problem("silu", input), F.silu, input, inplace=inplace)
    return _apply(input, _SILU)


def relu(input: Tensor, inplace: bool = False) -> Tensor:
    """max(x, 0), as :func:`torch.nn.functional.relu`; keeps its output only. NaN stays NaN.

    Args:
        input: any shape; float32, bfloat16, float16 or float64.
        inplace: write the result into `input`.
    """
    if inplace or lowered(input):
        return by_torch(dtype_problem("relu", input), F.relu, input, inplace=inplace)
    # In 32 and 64 bits both are copies, whatever the size. The bits are the same: a region, where ours may keep less, can choose.
    if not regions.stack and small(input, 2**17 if input.dtype.itemsize == 2 else sys.maxsize):
        return F.relu(input)
    return _apply(input, _RELU)
