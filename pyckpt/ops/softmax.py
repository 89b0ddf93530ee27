"""Softmax of scale * x + mask over the last dimension, with causal limit and dropout, in one pass.

Saved for backward: without dropout the output, as torch (a matrix product that follows keeps it anyway); with dropout the
input and two float32 numbers a row (maximum and sum of exponentials), from which backward, and the recompute of the output,
form the probabilities again. Neither the mask of dropout nor the scaled or masked scores are stored.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ._kernels import Kernels
from ._native import CPU, check_grad, contiguous_like, resolved, strided
from ._registry import (
    DTYPES,
    Function,
    Op,
    autocast_to_float32,
    backend_of,
    by_torch,
    describe,
    dtype_problem,
    is_plain,
    is_sharded,
    lowered,
    needs_grad,
    not_differentiable,
    refused,
    small,
)
from ._softmax_checks import check_arguments, check_mask, check_options, check_statistics
from ._softmax_definition import (
    Options,
    expression,
    reference_bwd,
    reference_dropout_bwd,
    reference_fwd,
    reference_recompute,
    statistics_shape,
)
from .dropout import dropout, new_seed

_PLAIN = Options()
_SMALL = 2**19


def _new_statistics(x: Tensor) -> Tensor:
    return x.new_empty(statistics_shape(x), dtype=DTYPES[x.dtype][1])


_ARGUMENTS = "Tensor x, Tensor? mask, float scale, SymInt? causal, float dropout_p, Tensor? seed"
softmax_fwd = Op(
    f"softmax_fwd({_ARGUMENTS}) -> (Tensor, Tensor)",
    fake=lambda x, *_: (contiguous_like(x), _new_statistics(x)),
    reference=reference_fwd,
)
softmax_recompute = Op(
    f"softmax_recompute({_ARGUMENTS}, Tensor statistics) -> Tensor",
    fake=contiguous_like,
    reference=reference_recompute,
)
softmax_recompute.differentiable(lambda *a: not_differentiable("softmax_recompute", "softmax_fwd", *a))
softmax_bwd = Op(
    "softmax_bwd(Tensor grad, Tensor y, bool masked, float scale) -> Tensor",
    fake=lambda grad, y, *_: contiguous_like(y),
    reference=reference_bwd,
)
softmax_dropout_bwd = Op(
    f"softmax_dropout_bwd(Tensor grad, {_ARGUMENTS}, Tensor statistics, float grad_scale) -> Tensor",
    fake=lambda grad, x, *_: contiguous_like(x),
    reference=reference_dropout_bwd,
)


class SoftmaxFunction(Function):
    """Saves y; with dropout x, the mask and the statistics (the seed is an attribute).

    Returns y, or (y, statistics) for the raw op.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, mask: Tensor | None, options: Options, with_statistics: bool = False
    ) -> Any:
        ctx.backend, ctx.options = backend_of(x, softmax_fwd), options
        ctx.masked = mask is not None or options.causal is not None
        ctx.mask_shape = None if mask is None else mask.shape
        y, statistics = softmax_fwd(ctx.backend, x, mask, *options)
        if options.seed is None:
            ctx.save_for_backward(y)
        else:
            ctx.save_for_backward(x, mask, statistics)
        if not with_statistics:
            return y
        ctx.mark_non_differentiable(statistics)
        return y, statistics

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Any, ...]:
        # An additive mask's gradient is that of the scores: the one of x before its scale.
        wants_mask = ctx.needs_input_grad[1]
        options = ctx.options
        grad_scale = 1.0 if wants_mask else options.scale
        if options.seed is None:
            (y,) = ctx.saved_tensors
            dx = softmax_bwd.in_backward(ctx.backend, grad, y, ctx.masked, grad_scale)
        else:
            x, mask, statistics = ctx.saved_tensors
            dx = softmax_dropout_bwd.in_backward(ctx.backend, grad, x, mask, *options, statistics, grad_scale)
        if not wants_mask:
            return dx, None, None, None
        return dx * options.scale, dx.sum_to_size(ctx.mask_shape), None, None

    @staticmethod
    def recompute(ctx: Any, x: Tensor, mask: Tensor | None, statistics: Tensor) -> Tensor:
        """The forward's output with dropout, bit for bit, from what the node keeps."""
        return softmax_recompute(ctx.backend, x, mask, *ctx.options, statistics)


softmax_fwd.differentiable(lambda x, mask, *options: SoftmaxFunction.apply(x, mask, Options(*options), True))
softmax_fwd.guard = lambda x, mask, *options: check_arguments(x, mask, Options(*options))


def _forward(
    kernels: Kernels, x: Tensor, mask: Tensor | None, options: Options, statistics: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(y, statistics), or y again from the statistics given."""
    recompute = statistics is not None
    if statistics is None:
        statistics = _new_statistics(x)
    y = contiguous_like(x)
    mask = mask if mask is None else resolved(mask)
    kernels.softmax_forward(resolved(x), mask, options, y, statistics, recompute)
    return y, statistics


def _recompute(kernels: Kernels, x: Tensor, mask: Tensor | None, *rest: Any) -> Tensor:
    *values, statistics = rest
    options = Options(*values)
    check_arguments(x, mask, options)
    check_statistics(x, statistics)
    return _forward(kernels, x, mask, options, statistics.contiguous())[0]


def _bwd_guard(grad: Tensor, y: Tensor, *_: Any) -> None:
    if y.dtype not in DTYPES or y.dim() == 0:
        raise refused(f"no kernel for {describe('y', y)}")
    check_grad(grad, y)


softmax_bwd.guard = _bwd_guard
softmax_dropout_bwd.guard = lambda grad, x, *_: check_grad(grad, x)


def _bwd(kernels: Kernels, grad: Tensor, y: Tensor, masked: bool, scale: float) -> Tensor:
    grad = strided(grad)
    check_grad(grad, y)
    dx = contiguous_like(y)
    kernels.softmax_backward(resolved(grad), resolved(y).contiguous(), dx, masked, scale)
    return dx


def _dropout_bwd(kernels: Kernels, grad: Tensor, x: Tensor, mask: Tensor | None, *rest: Any) -> Tensor:
    *values, statistics, grad_scale = rest
    options, grad = Options(*values), strided(grad)
    check_arguments(x, mask, options)
    check_statistics(x, statistics)
    check_grad(grad, x)
    dx, mask = contiguous_like(x), mask if mask is None else resolved(mask)
    kernels.softmax_dropout_backward(
        resolved(grad), resolved(x), mask, options, statistics.contiguous(), dx, grad_scale
    )
    return dx


def register(kernels: Kernels) -> None:
    """Lets `kernels` compute these ops on its backend."""
    name = kernels.backend
    softmax_fwd.kernel(name)(lambda x, mask, *options: _forward(kernels, x, mask, Options(*options)))
    softmax_recompute.kernel(name)(lambda *arguments: _recompute(kernels, *arguments))
    softmax_bwd.kernel(name)(lambda *arguments: _bwd(kernels, *arguments))
    softmax_dropout_bwd.kernel(name)(lambda *arguments: _dropout_bwd(kernels, *arguments))


register(CPU)


def softmax(
    input: Tensor,
    dim: int | None = -1,
    dtype: torch.dtype | None = None,
    *,
    mask: Tensor | None = None,
    scale: float = 1.0,
    is_causal: bool = False,
    causal_alignment: str = "top_left",
    dropout_p: float = 0.0,
    _stacklevel: int = 3,
) -> Tensor:
    """Softmax of ``scale * input + mask`` along `dim`, as :func:`torch.nn.functional.softmax` with what attention adds to it.

    Keeps the output for backward; with dropout the input and two float32 numbers per row instead.

    Args:
        input: any shape; float32, bfloat16, float16 or float64. 16-bit types are computed in float32.
        dim: dimension whose sums are 1; None: torch's deprecated implicit choice.
        dtype: convert the input to this dtype first.
        mask: broadcastable to `input`; boolean (True = keep) or additive, of the input's dtype. A row with nothing kept (all
            False, or all -inf) gives zeros and zero gradients. What is masked is not looked at and may hold NaN. An additive
            mask that requires grad receives its gradient.
        scale: factor on the input.
        is_causal: query i (dimension -2) sees keys (dimension -1) up to i.
        causal_alignment: "top_left", as torch's is_causal, or "bottom_right": the last query sees every key.
        dropout_p: probability of dropping an element of the result; see :func:`pyckpt.functional.dropout`. Unlike
            nn.Dropout this has no training flag: pass 0 in evaluation.

    Returns:
        A tensor of the input's shape, of its dtype or `dtype`.

    Raises:
        RuntimeError: a mask that does not fit; an integer input without `dtype` (NotImplementedError, as torch).
        IndexError: `dim` out of range.
        ValueError: dropout_p outside [0, 1], an unknown causal_alignment, is_causal with another `dim`.
    """
    plain = mask is None and type(scale) is float and scale == 1.0 and not is_causal and dropout_p == 0.0
    plain = plain and causal_alignment == "top_left"
    usual = plain and dtype is None and type(dim) is int and dim == -1
    if usual and not lowered(input) and input.is_cpu and input.dim():
        if small(input, _SMALL):
            return torch.softmax(input, -1)
        return _fused(input, None, _PLAIN)  # without further checks
    if not isinstance(input, Tensor) or (plain and lowered(input)):
        return by_torch(dtype_problem("softmax", input), F.softmax, input, dim=dim, dtype=dtype)
    if dim is None:
        dim = F._get_softmax_dim("softmax", input.dim(), _stacklevel)  # type: ignore[attr-defined]
    if not torch.compiler.is_compiling() and (
        isinstance(dim, float) or not isinstance(dtype, (torch.dtype, type(None)))
    ):
        return F.softmax(input, dim=dim, dtype=dtype)  # type: ignore[arg-type]  # torch's TypeError
    check_options(input, dim, scale, is_causal, causal_alignment, dropout_p)
    if not -max(1, input.dim()) <= dim < max(1, input.dim()):
        raise IndexError(f"softmax: dim={dim} is out of range for {describe('input', input)}")
    if dtype is not None:
        input = input.to(dtype)
    (input,) = autocast_to_float32(input)  # type: ignore[assignment]
    if input.dtype not in DTYPES:
        raise NotImplementedError(
            f"softmax: expected a floating-point tensor, got {describe('input', input)}; convert it or pass dtype"
        )
    if mask is not None:
        check_mask(mask, input)
    if input.dim() == 0:
        shaped = None if mask is None else mask.reshape(1)
        return softmax(input.reshape(1), mask=shaped, scale=scale, dropout_p=dropout_p).reshape(())
    if dim not in (-1, input.dim() - 1):
        moved = None if mask is None else mask.expand(input.shape).movedim(dim, -1)
        y = softmax(input.movedim(dim, -1), mask=moved, scale=scale).movedim(-1, dim)
        return dropout(y, dropout_p) if dropout_p else y
    causal = None
    if is_causal:
        causal = 0 if causal_alignment == "top_left" else input.shape[-1] - input.shape[-2]
    return _softmax(input, mask, float(scale), causal, dropout_p)


def _softmax(x: Tensor, mask: Tensor | None, scale: float, causal: int | None, dropout_p: float) -> Tensor:
    if dropout_p > 0 and is_sharded(x):
        return dropout(_softmax(x, mask, scale, causal, 0.0), dropout_p)
    options = Options(scale, causal, dropout_p, new_seed(x.device) if dropout_p > 0 else None)
    if not lowered(x) and (mask is None or is_plain(mask)):
        return _fused(x, mask, options)
    if options.seed is not None and torch.compiler.is_compiling():
        return softmax_fwd.overload(x, mask, *options)[
            0
        ]  # as for dropout: one opaque op, so that masks stay equal
    return expression(x, mask, options)


def _fused(x: Tensor, mask: Tensor | None, options: Options) -> Tensor:
    if needs_grad(x, mask):
        return SoftmaxFunction.apply(x, mask, options)
    return softmax_fwd(backend_of(x, softmax_fwd), x, mask, *options)[0]
