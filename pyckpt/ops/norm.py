"""LayerNorm (Ba et al., 2016, https://arxiv.org/abs/1607.06450) and RMSNorm (Zhang & Sennrich, 2019,
https://arxiv.org/abs/1910.07467).

Saved for backward: the input and, per row, float32 statistics (float64 for double): LayerNorm 3 (mean, the part of the mean
lost to rounding, rstd), RMSNorm 1 (rstd). The output is recomputed from these by the forward's last pass, bit for bit.
Parameter gradients are summed in a fixed order, by blocks of rows, in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import backends
from ._native import address, as_rows, code, dense, like, native, strided
from ._norm_definition import (
    LAYER,
    RMS,
    STATISTICS,
    reference_bwd,
    reference_fwd,
    reference_recompute,
    row_count,
)
from ._registry import (
    DTYPES,
    PLAIN,
    Op,
    autocast_to_float32,
    by_torch,
    describe,
    dtype_problem,
    expect,
    lowered,
    needs_grad,
    not_differentiable,
)


def _fake_fwd(kind: int, x: Tensor, shape: Sequence[int], *rest: Any) -> tuple[Tensor, Tensor]:
    for t in rest:
        expect(
            not isinstance(t, Tensor) or t.device == x.device, "weight and bias must be on the device of x"
        )
    statistics = torch.empty(
        (STATISTICS[kind], row_count(x, shape)), dtype=DTYPES[x.dtype][1], device=x.device
    )
    return _contiguous_like(x), statistics


def _contiguous_like(x: Tensor, *_: Any) -> Tensor:
    return (
        torch.empty_like(x)
        if x.is_contiguous()
        else torch.empty_like(x, memory_format=torch.contiguous_format)
    )


def _fake_bwd(
    x: Tensor, shape: Sequence[int], float32_parameters: bool, wanted: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dweight and dbias to be filled; of size 0 where not wanted."""
    dtype = torch.float32 if float32_parameters else x.dtype
    dx = _contiguous_like(x) if wanted[0] else torch.empty(0, dtype=x.dtype, device=x.device)
    dweight, dbias = [torch.empty(shape if want else 0, dtype=dtype, device=x.device) for want in wanted[1:]]
    return dx, dweight, dbias


def _cpu_write(
    kind: int,
    x: Tensor,
    shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    y: Tensor,
    statistics: Tensor,
    recompute: bool,
) -> None:
    rows_of_x, view = as_rows(x, len(shape))
    weight, bias = dense(weight), dense(bias)
    parameter = weight if weight is not None else bias if bias is not None else x
    native.norm_forward(
        kind, code(x), code(parameter), statistics.shape[1], math.prod(shape), eps, rows_of_x.data_ptr(), view,
        address(weight), address(bias), y.data_ptr(), statistics.data_ptr(), recompute, torch.get_num_threads(),
    )  # fmt: skip


def _check(
    kind: int,
    x: Tensor,
    shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    statistics: Tensor | None = None,
) -> None:
    expect(x.dtype in DTYPES, lambda: f"no kernel for {describe('x', x)}")
    expect(
        len(shape) > 0 and x.shape[-len(shape) :] == tuple(shape),
        lambda: f"{describe('x', x)} does not end in {list(shape)}",
    )
    if weight is not None or bias is not None:
        problem = _problem("norm", x, tuple(shape), {"weight": weight, "bias": bias})
        expect(not problem, problem)
    if statistics is not None:
        expect(
            statistics.shape == (STATISTICS[kind], row_count(x, shape))
            and statistics.dtype is DTYPES[x.dtype][1]
            and statistics.device == x.device,
            lambda: f"{describe('statistics', statistics)} are not those of {describe('x', x)}",
        )


def _cpu_fwd(
    kind: int, x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    y = _contiguous_like(x)
    statistics = torch.empty(STATISTICS[kind], row_count(x, shape), dtype=DTYPES[x.dtype][1], device=x.device)
    _cpu_write(kind, x, shape, weight, bias, eps, y, statistics, False)
    return y, statistics


def _cpu_recompute(
    kind: int, x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, statistics: Tensor
) -> Tensor:
    _check(kind, x, shape, weight, bias, statistics)
    y = _contiguous_like(x)
    _cpu_write(kind, x, shape, weight, bias, 0.0, y, statistics.contiguous(), True)
    return y


def _cpu_bwd(
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
    grad, statistics = strided(grad), statistics.contiguous()
    dtype = torch.float32 if float32_parameters else x.dtype
    fits = weight is None or (
        weight.shape == tuple(shape) and weight.device == x.device and weight.dtype is dtype
    )
    expect(fits, lambda: f"{describe('weight', weight)} does not fit {describe('x', x)}")
    _check(kind, x, shape, None, None, statistics)
    expect(like(grad, x), lambda: f"{describe('grad', grad)} does not fit {describe('x', x)}")
    rows_of_x, view = as_rows(x, len(shape))
    rows_of_grad, grad_view = as_rows(grad, len(shape))
    weight = dense(weight)
    rows, columns = statistics.shape[1], math.prod(shape)
    # An empty tensor's address is 0, which tells the kernel that a gradient is not wanted.
    dx, dweight, dbias = _fake_bwd(x, shape, float32_parameters, wanted)
    # Blocks depend on the number of rows alone, so that sums do not depend on the number of threads.
    blocks = max(1, min(64, rows // 64))
    sums = (
        torch.empty(blocks, 2, columns, dtype=torch.float64, device=x.device)
        if wanted[1] or wanted[2]
        else None
    )
    native.norm_backward(
        kind, code(x), DTYPES[dtype][0], rows, columns, eps, rows_of_x.data_ptr(), view, address(weight),
        rows_of_grad.data_ptr(), grad_view, statistics.data_ptr(), dx.data_ptr(),
        dweight.data_ptr(), dbias.data_ptr(), address(sums), blocks,
        torch.get_num_threads(),
    )  # fmt: skip
    return dx, dweight, dbias


class _Norm:
    """The three ops of one norm. Only LayerNorm has a bias, in its schemas too."""

    def __init__(self, name: str, kind: int) -> None:
        self.kind = kind
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
            fake=lambda grad, x, shape, weight, statistics, eps, float32_parameters, wanted: _fake_bwd(
                x, shape, float32_parameters, wanted
            ),
            reference=partial(reference_bwd, kind),
        )
        self.recompute = Op(
            f"{name}_recompute({inputs}{bias}Tensor statistics) -> Tensor",
            fake=_contiguous_like,
            reference=self._with_bias(reference_recompute),
        )
        self.fwd.kernel("cpu")(self._with_bias(_cpu_fwd))
        self.bwd.kernel("cpu")(partial(_cpu_bwd, kind))
        self.recompute.kernel("cpu")(self._with_bias(_cpu_recompute))
        self.fwd.differentiable(self._apply)
        self.fwd.guard = self._with_bias(
            lambda kind, x, shape, weight, bias, eps: _check(kind, x, shape, weight, bias)
        )
        self.recompute.differentiable(partial(not_differentiable, self.recompute.name, f"{name}_fwd"))

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
        """The leading arguments of fwd and recompute."""
        return (x, shape, weight, bias) if self.kind == LAYER else (x, shape, weight)


class NormFunction(torch.autograd.Function):
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
        ctx.backend = backends.select(x.device.type)
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
        wanted = list(ctx.needs_input_grad[:3])
        if wanted[0] or wanted[1]:
            x, weight, _, statistics = ctx.saved_tensors
        else:  # the bias's gradient is a sum over grad alone: anything serves as x
            x, weight, statistics = (
                grad,
                None,
                torch.zeros(
                    (STATISTICS[ctx.norm.kind], row_count(grad, ctx.shape)),
                    dtype=DTYPES[grad.dtype][1],
                    device=grad.device,
                ),
            )
        gradients = ctx.norm.bwd.in_backward(
            ctx.backend, grad, x, ctx.shape, weight, statistics, ctx.eps, ctx.float32_parameters, wanted
        )
        dx, dweight, dbias = [g if want else None for g, want in zip(gradients, wanted, strict=True)]
        return dx, dweight, dbias, None, None, None, None

    @staticmethod
    def recompute(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, statistics: Tensor
    ) -> Tensor:
        """The forward's output, bit for bit, from what the node keeps."""
        return ctx.norm.recompute(ctx.backend, *ctx.norm.arguments(x, ctx.shape, weight, bias), statistics)


_layer_norm, _rms_norm = _Norm("layer_norm", LAYER), _Norm("rms_norm", RMS)


def _alike(p: Tensor | None, x: Tensor, shape: tuple[int, ...]) -> bool:
    return p is None or (
        type(p) in PLAIN
        and p.dtype is x.dtype
        and p.shape == shape
        and p.device == x.device
        and p.layout is torch.strided
    )


def _problem(name: str, x: Tensor, shape: tuple[int, ...], parameters: dict[str, Tensor | None]) -> str:
    """What is wrong with arguments that are not served; empty if nothing is."""
    if shape and x.shape[-len(shape) :] == shape and all(_alike(p, x, shape) for p in parameters.values()):
        return ""  # the usual case, checked cheaply
    if not shape or x.shape[-len(shape) :] != shape:
        return (
            f"{name}: normalized_shape {list(shape)} must be the last dimensions of {describe('input', x)}; pass "
            "normalized_shape=input.shape[-1:] to normalise the last dimension"
        )
    given = {key: p for key, p in parameters.items() if p is not None}
    for key, p in given.items():
        if type(p) not in PLAIN or p.layout is not torch.strided:
            return f"{name}: {key} is a {type(p).__name__}, not a plain tensor"
        if p.shape != shape:
            return f"{name}: {describe(key, p)} must have the shape of normalized_shape {list(shape)}"
        if p.device != x.device:
            return f"{name}: {describe(key, p)} must be on the device of {describe('input', x)}; move one with .to()"
        allowed = {x.dtype, torch.float32} if x.dtype.itemsize == 2 else {x.dtype}
        if p.dtype not in allowed or p.dtype != next(iter(given.values())).dtype:
            kinds = " or ".join(sorted(str(d).removeprefix("torch.") for d in allowed))
            return (
                f"{name}: {describe(key, p)} must be {kinds} for {describe('input', x)}, all parameters alike"
            )
    return ""


def _lowered_problem(
    name: str, input: Any, normalized_shape: Any, parameters: dict[str, Tensor | None]
) -> str:
    if torch.compiler.is_compiling():
        return ""
    if problem := dtype_problem(name, input):
        return problem
    shape = tuple(normalized_shape) if isinstance(normalized_shape, (tuple, list)) else ()
    return "" if input.is_nested or type(input) not in PLAIN else _problem(name, input, shape, parameters)


def _normalise(
    norm: _Norm, input: Tensor, shape: tuple[int, ...], weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    if needs_grad(input, weight, bias):
        return NormFunction.apply(input, weight, bias, shape, eps, norm)
    return norm.fwd(backends.select(input.device.type), *norm.arguments(input, shape, weight, bias), eps)[0]


def _check_eps(name: str, eps: float | None) -> None:
    if eps is not None and eps < 0:
        raise ValueError(
            f"{name}: eps must not be negative, got {eps}: the square root of a negative number is NaN"
        )


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
    _check_eps("layer_norm", eps)
    if lowered(input):
        problem = _lowered_problem("layer_norm", input, normalized_shape, {"weight": weight, "bias": bias})
        return by_torch(problem, F.layer_norm, input, normalized_shape, weight, bias, eps)
    input, weight, bias = autocast_to_float32(input, weight, bias)  # type: ignore[assignment]
    shape = tuple(normalized_shape) if isinstance(normalized_shape, (tuple, list)) else ()
    if problem := _problem("layer_norm", input, shape, {"weight": weight, "bias": bias}):
        return by_torch(problem, F.layer_norm, input, normalized_shape, weight, bias, eps)
    return _normalise(_layer_norm, input, shape, weight, bias, eps)


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
    _check_eps("rms_norm", eps)
    if lowered(input):
        problem = _lowered_problem("rms_norm", input, normalized_shape, {"weight": weight})
        return by_torch(problem, F.rms_norm, input, normalized_shape, weight, eps)
    input, weight = autocast_to_float32(input, weight)  # type: ignore[assignment]
    shape = tuple(normalized_shape) if isinstance(normalized_shape, (tuple, list)) else ()
    if problem := _problem("rms_norm", input, shape, {"weight": weight}):
        return by_torch(problem, F.rms_norm, input, normalized_shape, weight, eps)
    if input.is_inference() and needs_grad(
        weight
    ):  # cannot be saved; torch's composition saves what it makes of it
        return F.rms_norm(input, normalized_shape, weight, eps)
    if eps is None:
        eps = torch.finfo(DTYPES[input.dtype][1]).eps
    return _normalise(_rms_norm, input, shape, weight, None, eps)
