"""LayerNorm (Ba et al., 2016, https://arxiv.org/abs/1607.06450) and RMSNorm (Zhang & Sennrich, 2019,
https://arxiv.org/abs/1910.07467).

Saved for backward: the input and, per row, float32 statistics (float64 for double): LayerNorm 3 (mean, the part of the mean
lost to rounding, rstd), RMSNorm 1 (rstd). The output is recomputed from these by the forward's last pass, bit for bit.
Parameter gradients are summed in a fixed order, by blocks of rows; blocks are added in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ._kernels import Kernels
from ._native import CPU, as_rows, check_grad, contiguous_like, dense, strided
from ._norm_checks import check_arguments, check_backward, check_statistics, lowered_problem, problem
from ._norm_definition import (
    LAYER,
    RMS,
    STATISTICS,
    reference_bwd,
    reference_fwd,
    reference_recompute,
    rows_and_columns,
)
from ._registry import (
    DTYPES,
    Function,
    Op,
    autocast_to_float32,
    backend_of,
    by_torch,
    lowered,
    needs_grad,
    not_differentiable,
    refused,
)


def _fake_fwd(kind: int, x: Tensor, shape: Sequence[int], *rest: Any) -> tuple[Tensor, Tensor]:
    for t in rest:
        if isinstance(t, Tensor) and t.device != x.device:
            raise refused("weight and bias must be on the device of x")
    return contiguous_like(x), _new_statistics(kind, x, rows_and_columns(x, shape)[0])


def _new_statistics(kind: int, x: Tensor, rows: int) -> Tensor:
    return x.new_empty((STATISTICS[kind], rows), dtype=DTYPES[x.dtype][1])


def _new_gradients(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, dtype: torch.dtype, wanted: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dweight and dbias to be filled; of size 0 where not wanted. `weight`, where there is one, is contiguous."""
    dx = contiguous_like(x) if wanted[0] else x.new_empty(0)
    if weight is not None and wanted[1]:
        dweight = torch.empty_like(weight)
    else:
        dweight = x.new_empty(shape if wanted[1] else 0, dtype=dtype)
    dbias = (
        torch.empty_like(dweight)
        if wanted[1] == wanted[2]
        else x.new_empty(shape if wanted[2] else 0, dtype=dtype)
    )
    return dx, dweight, dbias


def _forward(
    kernels: Kernels,
    kind: int,
    x: Tensor,
    shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    statistics: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(y, statistics), or y again from the statistics given."""
    recompute = statistics is not None
    rows, columns = rows_and_columns(x, shape)
    if statistics is None:
        statistics = _new_statistics(kind, x, rows)
    y = contiguous_like(x)
    rows_of_x, view = as_rows(x, len(shape), columns)
    parameters = dense(weight), dense(bias)
    kernels.norm_forward(kind, rows_of_x, view, columns, *parameters, eps, y, statistics, recompute)
    return y, statistics


def _recompute(
    kernels: Kernels,
    kind: int,
    x: Tensor,
    shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    statistics: Tensor,
) -> Tensor:
    check_arguments(x, shape, weight, bias)
    check_statistics(kind, x, rows_and_columns(x, shape)[0], statistics)
    return _forward(kernels, kind, x, shape, weight, bias, 0.0, statistics.contiguous())[0]


def _bwd(
    kernels: Kernels,
    kind: int,
    grad: Tensor,
    x: Tensor,
    shape: Sequence[int],
    weight: Tensor | None,
    statistics: Tensor,
    eps: float,
    float32_parameters: bool,
    wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    rows, columns = rows_and_columns(x, shape)
    parameter_dtype = torch.float32 if float32_parameters else x.dtype
    grad = strided(grad)
    check_backward(grad, x, shape, weight, parameter_dtype)
    check_statistics(kind, x, rows, statistics)
    rows_of_x, view = as_rows(x, len(shape), columns)
    rows_of_grad, grad_view = as_rows(grad, len(shape), columns)
    weight = dense(weight)
    gradients = _new_gradients(x, shape, weight, parameter_dtype, wanted)
    kernels.norm_backward(
        kind, rows_of_grad, grad_view, rows_of_x, view, columns, weight, eps, statistics.contiguous(),
        *(t if w else None for t, w in zip(gradients, wanted, strict=True)),
    )  # fmt: skip
    return gradients


def _bwd_guard(grad: Tensor, x: Tensor, shape: Sequence[int], weight: Tensor | None, *_: Any) -> None:
    check_arguments(x, shape, weight, None)
    check_grad(grad, x)


class _Norm:
    """The three ops of one norm. Only LayerNorm has a bias, in its schemas too."""

    def __init__(self, name: str, kind: int, of_torch: Callable[..., Tensor]) -> None:
        self.name, self.kind, self.of_torch = name, kind, of_torch
        bias = "Tensor? bias, " if kind == LAYER else ""
        inputs = "Tensor x, SymInt[] normalized_shape, Tensor? weight, "
        self.fwd = Op(
            f"{name}_fwd({inputs}{bias}float eps) -> (Tensor, Tensor)",
            fake=partial(_fake_fwd, kind),
            reference=self._with_bias(reference_fwd),
        )
        self.bwd = Op(
            f"{name}_bwd(Tensor grad, {inputs}Tensor statistics, float eps, bool float32_parameters, bool[] wanted)"
            " -> (Tensor, Tensor, Tensor)",
            fake=lambda grad, x, shape, weight, statistics, eps, float32_parameters, wanted: _new_gradients(
                x, shape, None, torch.float32 if float32_parameters else x.dtype, wanted
            ),
            reference=partial(reference_bwd, kind),
        )
        self.recompute = Op(
            f"{name}_recompute({inputs}{bias}Tensor statistics) -> Tensor",
            fake=contiguous_like,
            reference=self._with_bias(reference_recompute),
        )
        self.fwd.differentiable(self._apply)
        self.fwd.guard = self._with_bias(
            lambda kind, x, shape, weight, bias, eps: check_arguments(x, shape, weight, bias)
        )
        self.bwd.guard = _bwd_guard
        self.recompute.differentiable(partial(not_differentiable, self.recompute.name, f"{name}_fwd"))

    def register(self, kernels: Kernels) -> None:
        self.fwd.kernel(kernels.backend)(self._with_bias(partial(_forward, kernels)))
        self.bwd.kernel(kernels.backend)(partial(_bwd, kernels, self.kind))
        self.recompute.kernel(kernels.backend)(self._with_bias(partial(_recompute, kernels)))

    def _with_bias(self, function: Callable[..., Any]) -> Callable[..., Any]:
        if self.kind == LAYER:
            return partial(function, self.kind)
        return lambda x, shape, weight, *rest: function(self.kind, x, shape, weight, None, *rest)

    def _apply(
        self, x: Tensor, shape: Sequence[int], weight: Tensor | None, *rest: Any
    ) -> tuple[Tensor, Tensor]:
        bias, eps = rest if self.kind == LAYER else (None, *rest)
        return NormFunction.apply(x, weight, bias, tuple(shape), eps, self, True)

    def arguments(
        self, x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None
    ) -> tuple[Any, ...]:
        """The leading arguments of fwd, of recompute and of torch's own function."""
        return (x, shape, weight, bias) if self.kind == LAYER else (x, shape, weight)


class NormFunction(Function):
    """Saves x, the parameters and the statistics; nothing if only the bias needs a gradient.

    Returns y, or (y, statistics) for the raw op.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        shape: tuple[int, ...],
        eps: float,
        norm: _Norm,
        with_statistics: bool = False,
    ) -> Any:
        ctx.backend = backend_of(x, norm.fwd)
        ctx.norm, ctx.shape, ctx.eps = norm, shape, eps
        y, statistics = norm.fwd(ctx.backend, *norm.arguments(x, shape, weight, bias), eps)
        parameter = weight if weight is not None else bias
        ctx.float32_parameters = parameter is not None and parameter.dtype == torch.float32
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
            ctx.save_for_backward(x, weight, bias, statistics)
        if not with_statistics:
            return y
        ctx.mark_non_differentiable(statistics)
        return y, statistics

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Any, ...]:
        wanted = ctx.needs_input_grad[:3]
        if wanted[0] or wanted[1]:
            x, weight, _, statistics = ctx.saved_tensors
        else:  # the bias's gradient is a sum over grad alone: anything serves as x
            x, weight = grad, None
            statistics = _new_statistics(ctx.norm.kind, x, rows_and_columns(x, ctx.shape)[0]).zero_()
        dx, dweight, dbias = ctx.norm.bwd.in_backward(
            ctx.backend, grad, x, ctx.shape, weight, statistics, ctx.eps, ctx.float32_parameters, wanted
        )
        return (
            dx if wanted[0] else None,
            dweight if wanted[1] else None,
            dbias if wanted[2] else None,
            None, None, None, None,
        )  # fmt: skip

    @staticmethod
    def recompute(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, statistics: Tensor
    ) -> Tensor:
        """The forward's output, bit for bit, from what the node keeps."""
        return ctx.norm.recompute(ctx.backend, *ctx.norm.arguments(x, ctx.shape, weight, bias), statistics)


_layer_norm, _rms_norm = _Norm("layer_norm", LAYER, F.layer_norm), _Norm("rms_norm", RMS, F.rms_norm)


def register(kernels: Kernels) -> None:
    """Lets `kernels` compute these ops on its backend."""
    for norm in (_layer_norm, _rms_norm):
        norm.register(kernels)


register(CPU)

# What rms_norm adds where eps is not given, as torch.
_EPS = {dtype: torch.finfo(arithmetic).eps for dtype, (_, arithmetic) in DTYPES.items()}


def _normalise(
    norm: _Norm,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float | None,
) -> Tensor:
    if isinstance(eps, str):
        raise TypeError(f"{norm.name}: eps must be a float, got {eps!r}")
    if eps is not None and eps < 0:
        raise ValueError(
            f"{norm.name}: eps must not be negative, got {eps}: the square root of a negative number is NaN"
        )
    shape = tuple(normalized_shape) if isinstance(normalized_shape, (tuple, list)) else ()
    if lowered(input):
        wrong = lowered_problem(norm.name, input, shape, weight, bias)
    else:
        input, weight, bias = autocast_to_float32(input, weight, bias)  # type: ignore[assignment]
        wrong = problem(norm.name, input, shape, weight, bias)
        # An inference tensor cannot be saved; torch's composition of rms_norm saves what it makes of it.
        if not wrong and not (input.is_inference() and needs_grad(weight, bias)):
            if eps is None and norm.kind == RMS:
                eps = _EPS[input.dtype]
            if needs_grad(input, weight, bias):
                return NormFunction.apply(input, weight, bias, shape, eps, norm)
            return norm.fwd(backend_of(input, norm.fwd), *norm.arguments(input, shape, weight, bias), eps)[0]
    if isinstance(normalized_shape, (int, str)):
        wrong = f"{norm.name}: normalized_shape must be a sequence of ints, got {normalized_shape!r}"
    return by_torch(wrong, norm.of_torch, *norm.arguments(input, normalized_shape, weight, bias), eps)


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Layer normalisation, as :func:`torch.nn.functional.layer_norm`.

    Keeps the input and three float32 numbers per row (three float64 for double) for backward.

    Args:
        input: shape (..., *normalized_shape); float32, bfloat16, float16 or float64.
        normalized_shape: the dimensions to normalise over, as a sequence of ints.
        weight, bias: shape `normalized_shape`, of the input's dtype, or float32 beside a 16-bit input.
        eps: added to the variance.

    Returns:
        A contiguous tensor of the input's shape and dtype. Sums are float32 (float64 for double) whatever the dtype.

    Raises:
        RuntimeError: shapes, dtypes or devices that do not fit.
        ValueError: negative eps.
    """
    return _normalise(_layer_norm, input, normalized_shape, weight, bias, eps)


def rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """Root-mean-square normalisation, as :func:`torch.nn.functional.rms_norm`.

    Keeps the input and one float32 number per row (float64 for double) for backward.

    Args:
        input: shape (..., *normalized_shape); float32, bfloat16, float16 or float64.
        normalized_shape: the dimensions to normalise over, as a sequence of ints.
        weight: shape `normalized_shape`, of the input's dtype, or float32 beside a 16-bit input.
        eps: added to the mean square; None: the machine epsilon of the arithmetic, as torch (float32's for 16-bit inputs).

    Returns:
        A contiguous tensor of the input's shape and dtype.

    Raises:
        RuntimeError: shapes, dtypes or devices that do not fit.
        ValueError: negative eps.
    """
    return _normalise(_rms_norm, input, normalized_shape, weight, None, eps)
