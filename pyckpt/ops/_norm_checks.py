"""What the norms ask of their arguments: messages for the public functions, errors for calls of the raw ops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ._native import check_grad, together
from ._norm_definition import STATISTICS
from ._registry import DTYPES, describe, dtype_problem, is_plain, refused


def _alike(p: Tensor | None, x: Tensor, shape: tuple[int, ...]) -> bool:
    return p is None or (
        is_plain(p)
        and p.dtype is x.dtype
        and p.shape == shape
        and p.layout is torch.strided
        and p.device == x.device
    )


def problem(name: str, x: Tensor, shape: tuple[int, ...], weight: Tensor | None, bias: Tensor | None) -> str:
    """What is wrong with arguments that are not served; empty if nothing is."""
    if not shape or x.shape[-len(shape) :] != shape:
        return (
            f"{name}: normalized_shape {list(shape)} must be the last dimensions of {describe('input', x)}; pass "
            "normalized_shape=input.shape[-1:] to normalise the last dimension"
        )
    if _alike(weight, x, shape) and _alike(bias, x, shape):
        return ""  # the usual case
    given = {key: p for key, p in (("weight", weight), ("bias", bias)) if p is not None}
    for key, p in given.items():
        if not is_plain(p) or p.layout is not torch.strided:
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


def lowered_problem(
    name: str, x: Any, shape: tuple[int, ...], weight: Tensor | None, bias: Tensor | None
) -> str:
    """The same for an input of any kind."""
    # Under jit.trace a size is a tensor, and to compare it would be recorded.
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return ""
    if text := dtype_problem(name, x):
        return text
    return "" if x.is_nested or not is_plain(x) else problem(name, x, shape, weight, bias)


def check_arguments(x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None) -> None:
    """For raw calls, which no public function has checked, and for what saved-tensor hooks may have changed."""
    if x.dtype not in DTYPES:
        raise refused(f"no kernel for {describe('x', x)}")
    if wrong := problem("norm", x, tuple(shape), weight, bias):
        raise refused(wrong)


def check_statistics(kind: int, x: Tensor, rows: int, statistics: Tensor) -> None:
    if (
        statistics.shape != (STATISTICS[kind], rows)
        or statistics.dtype is not DTYPES[x.dtype][1]
        or not together(statistics, x)
    ):
        raise refused(f"{describe('statistics', statistics)} are not those of {describe('x', x)}")


def check_backward(
    grad: Tensor, x: Tensor, shape: Sequence[int], weight: Tensor | None, parameter_dtype: torch.dtype
) -> None:
    check_grad(grad, x)
    if weight is not None and (
        weight.dtype is not parameter_dtype or weight.shape != tuple(shape) or not together(weight, x)
    ):
        raise refused(f"{describe('weight', weight)} does not fit {describe('x', x)}")
