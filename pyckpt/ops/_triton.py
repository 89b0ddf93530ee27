"""The ops on backend ``triton``: from tensors to what pyckpt.triton_kernels takes. The first call imports Triton."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .. import backends
from . import activation, dropout, norm, softmax
from ._native import (
    as_rows,
    check_grad,
    columns_adjacent,
    contiguous_like,
    dense,
    elementwise_view,
    resolved,
    strided,
)
from ._norm_checks import check_arguments, check_backward, check_statistics
from ._norm_definition import rows_and_columns
from ._softmax_checks import check_arguments as check_scores
from ._softmax_checks import check_statistics as check_rows
from ._softmax_definition import Options


@functools.cache
def kernels(family: str) -> ModuleType:
    """The module of a family's kernels. RuntimeError, with the versions, where Triton is missing or does not do."""
    if problem := backends.triton_problem():
        raise RuntimeError(f"pyckpt's Triton kernels: {problem}")
    try:
        module = importlib.import_module(f"pyckpt.triton_kernels.{family}")
    except (ImportError, AttributeError) as error:
        version = getattr(sys.modules.get("triton"), "__version__", "of unknown version")
        raise RuntimeError(
            f"pyckpt's Triton kernels could not be loaded: Triton {version} is installed, and they need "
            f"{backends.supported_triton()} ({error})"
        ) from error
    common: Any = importlib.import_module("pyckpt.triton_kernels._common")
    common.autotune = backends.triton_autotune()
    return module


def _ordered_view(x: Tensor, y: Tensor) -> list[int]:
    return [] if x.is_contiguous() and y.is_contiguous() else elementwise_view(x, y, ordered=True)


def _activation_forward(op: int, x: Tensor) -> Tensor:
    x = resolved(x)
    y = torch.empty_like(x)
    view = [] if x.is_contiguous() else elementwise_view(x, y)
    kernels("activation").forward(op, x, y, view)
    return y


def _activation_backward(op: int, grad: Tensor, x: Tensor) -> Tensor:
    grad = strided(grad)
    check_grad(grad, x)
    grad, x = resolved(grad), resolved(x)
    dx = torch.empty_like(x)
    view = [] if grad.is_contiguous() and x.is_contiguous() else elementwise_view(grad, x, dx)
    kernels("activation").backward(op, grad, x, dx, view)
    return dx


def _dropout(x: Tensor, seed: Tensor, p: float) -> Tensor:
    x = resolved(strided(x))
    y = torch.empty_like(x)
    kernels("dropout").forward(x, y, seed, p, _ordered_view(x, y))
    return y


def _norm_forward(
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
        statistics = norm._new_statistics(kind, x, rows)
    y = contiguous_like(x)
    rows_of_x, view = as_rows(x, len(shape), columns)
    kernels("norm").forward(kind, rows_of_x, view, dense(weight), dense(bias), eps, y, statistics, recompute)
    return y, statistics


def _norm_recompute(
    kind: int, x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, statistics: Tensor
) -> Tensor:
    check_arguments(x, shape, weight, bias)
    check_statistics(kind, x, rows_and_columns(x, shape)[0], statistics)
    return _norm_forward(kind, x, shape, weight, bias, 0.0, statistics.contiguous())[0]


def _norm_backward(
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
    gradients = norm._new_gradients(x, shape, weight, parameter_dtype, wanted)
    kernels("norm").backward(
        kind, rows_of_grad, grad_view, rows_of_x, view, weight, eps, statistics.contiguous(),
        *(t if wants else None for t, wants in zip(gradients, wanted, strict=True)),
    )  # fmt: skip
    return gradients


def _leading(
    x: Tensor, others: Sequence[Tensor], keep_last: bool
) -> tuple[Sequence[int], list[Sequence[int]]] | None:
    """((n1, n2), three strides of each tensor) of the leading dimensions, merged where all tensors allow, padded to three; the
    last of them stays a dimension of its own where asked. None: there are more than three.
    """
    tensors = (x, *others)
    dims: list[list[int]] = []  # [size, stride of each tensor]
    last = x.dim() - 2
    for d in range(x.dim() - 1):
        if x.shape[d] == 1 and not (keep_last and d == last):
            continue
        step = [t.stride(d) for t in tensors]
        if (
            dims
            and not (keep_last and d == last)
            and all(outer == inner * x.shape[d] for outer, inner in zip(dims[-1][1:], step, strict=True))
        ):
            dims[-1] = [dims[-1][0] * x.shape[d], *step]
        else:
            dims.append([x.shape[d], *step])
    if len(dims) > 3:
        return None
    none = [[1] + [0] * len(tensors)] * (3 - len(dims))
    dims = none + dims if keep_last else dims + none  # sizes of 1 inside cost no division
    return (dims[1][0], dims[2][0]), [tuple(d[i] for d in dims) for i in range(1, len(tensors) + 1)]


def _scores(
    x: Tensor, mask: Tensor | None, options: Options, grad: Tensor | None = None
) -> tuple[Any, Any, Any]:
    """The Scores of triton_kernels.softmax, and the gradient as it is to be read: a copy where strides do not allow."""
    scale, causal, dropout_p, seed = options
    x = columns_adjacent(x)
    grad = None if grad is None else columns_adjacent(grad)
    if mask is not None:
        mask = resolved(mask).expand(x.shape)
        mask = mask.view(torch.uint8) if mask.dtype == torch.bool else mask
    given = [t for t in (mask, grad) if t is not None]
    found = _leading(x, given, keep_last=causal is not None)
    if found is None:  # copies of one order merge
        x, given = x.contiguous(), [t.contiguous() for t in given]
        mask, grad = given[0] if mask is not None else None, given[-1] if grad is not None else None
        found = _leading(x, given, keep_last=causal is not None)
        assert found is not None
    sizes, strides = found
    scores = kernels("softmax").Scores(
        x, sizes, strides[0], mask, strides[1] if mask is not None else (0, 0, 0),
        0 if mask is None else mask.stride(-1), scale, causal, dropout_p if seed is not None else 0.0, seed,
    )  # fmt: skip
    return scores, grad, strides[-1]


def _softmax_forward(
    x: Tensor, mask: Tensor | None, options: Options, statistics: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(y, statistics), or y again from the statistics given."""
    recompute = statistics is not None
    if statistics is None:
        statistics = softmax._new_statistics(x)
    y = contiguous_like(x)
    kernels("softmax").forward(_scores(x, mask, options)[0], y, statistics, recompute)
    return y, statistics


def _softmax_recompute(x: Tensor, mask: Tensor | None, *rest: Any) -> Tensor:
    *values, statistics = rest
    options = Options(*values)
    check_scores(x, mask, options)
    check_rows(x, statistics)
    return _softmax_forward(x, mask, options, statistics.contiguous())[0]


def _softmax_backward(grad: Tensor, y: Tensor, masked: bool, scale: float) -> Tensor:
    grad = strided(grad)
    check_grad(grad, y)
    dx, y = contiguous_like(y), resolved(y).contiguous()
    scores = _scores(grad, None, Options())[0]
    kernels("softmax").backward(scores, scores.x, y, dx, masked, scale)
    return dx


def _softmax_dropout_backward(grad: Tensor, x: Tensor, mask: Tensor | None, *rest: Any) -> Tensor:
    *values, statistics, grad_scale = rest
    options, grad = Options(*values), strided(grad)
    check_scores(x, mask, options)
    check_rows(x, statistics)
    check_grad(grad, x)
    dx = contiguous_like(x)
    scores, grad, grad_strides = _scores(x, mask, options, grad)
    kernels("softmax").dropout_backward(scores, grad, grad_strides, dx, statistics.contiguous(), grad_scale)
    return dx


def register(backend: str) -> None:
    """Makes these the ops' kernels on `backend`."""
    activation.gelu_fwd.kernel(backend)(
        lambda x, approximate: _activation_forward(activation._GELU_CODES[approximate], x)
    )
    activation.gelu_bwd.kernel(backend)(
        lambda grad, x, approximate: _activation_backward(activation._GELU_CODES[approximate], grad, x)
    )
    for code, fwd, bwd in (
        (2, activation.silu_fwd, activation.silu_bwd),
        (3, activation.relu_fwd, activation.relu_bwd),
    ):
        fwd.kernel(backend)(functools.partial(_activation_forward, code))
        bwd.kernel(backend)(functools.partial(_activation_backward, code))
    dropout.dropout_op.kernel(backend)(_dropout)
    for of in (norm._layer_norm, norm._rms_norm):
        of.fwd.kernel(backend)(of._with_bias(_norm_forward))
        of.bwd.kernel(backend)(functools.partial(_norm_backward, of.kind))
        of.recompute.kernel(backend)(of._with_bias(_norm_recompute))
    softmax.softmax_fwd.kernel(backend)(
        lambda x, mask, *options: _softmax_forward(x, mask, Options(*options))
    )
    softmax.softmax_recompute.kernel(backend)(_softmax_recompute)
    softmax.softmax_bwd.kernel(backend)(_softmax_backward)
    softmax.softmax_dropout_bwd.kernel(backend)(_softmax_dropout_backward)


register("triton")
