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
from . import _attention_triton, activation, attention, dropout, norm, softmax
from ._kernels import RowView
from ._native import columns_adjacent
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
        mask = mask.expand(x.shape)
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


class Triton:
    """The Triton kernels on one backend."""

    def __init__(self, backend: str) -> None:
        self.backend = backend

    def activation_forward(self, *arguments: Any) -> None:
        kernels("activation").forward(*arguments)

    def activation_backward(self, *arguments: Any) -> None:
        kernels("activation").backward(*arguments)

    def dropout(self, x: Tensor, y: Tensor, view: Sequence[int], p: float, seed: Tensor) -> None:
        kernels("dropout").forward(x, y, seed, p, view)

    def norm_forward(self, kind: int, x: Tensor, view: RowView, columns: int, *rest: Any) -> None:
        kernels("norm").forward(kind, x, view, *rest)

    def norm_backward(
        self, kind: int, grad: Tensor, grad_view: RowView, x: Tensor, view: RowView, columns: int, *rest: Any
    ) -> None:
        kernels("norm").backward(kind, grad, grad_view, x, view, *rest)

    def softmax_forward(
        self, x: Tensor, mask: Tensor | None, options: Options, y: Tensor, statistics: Tensor, recompute: bool
    ) -> None:
        kernels("softmax").forward(_scores(x, mask, options)[0], y, statistics, recompute)

    def softmax_backward(self, grad: Tensor, y: Tensor, dx: Tensor, masked: bool, scale: float) -> None:
        scores = _scores(grad, None, Options())[0]
        kernels("softmax").backward(scores, scores.x, y, dx, masked, scale)

    def softmax_dropout_backward(
        self,
        grad: Tensor,
        x: Tensor,
        mask: Tensor | None,
        options: Options,
        statistics: Tensor,
        dx: Tensor,
        grad_scale: float,
    ) -> None:
        scores, grad, grad_strides = _scores(x, mask, options, grad)
        kernels("softmax").dropout_backward(scores, grad, grad_strides, dx, statistics, grad_scale)


def _attention_forward(*arguments: Any) -> Any:
    return _attention_triton.forward(kernels("attention"), *arguments)


def _attention_backward(*arguments: Any) -> Any:
    return _attention_triton.backward(kernels("attention_backward"), *arguments)


def register(backend: str) -> None:
    """Makes these the kernels of every op on `backend`."""
    for family in (activation, dropout, norm, softmax):
        family.register(Triton(backend))
    attention.register(backend, _attention_forward, _attention_backward)


register("triton")
