"""LayerNorm and RMSNorm in plain differentiable PyTorch: what the ops of norm.py mean, and their reference backend."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ._registry import DTYPES

LAYER, RMS = 0, 1
STATISTICS = {LAYER: 3, RMS: 1}  # numbers a row


def _dims(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(range(-len(shape), 0))


def rows_and_columns(x: Tensor, shape: Sequence[int]) -> tuple[int, int]:
    columns = math.prod(shape)
    return x.numel() // columns if columns else math.prod(x.shape[: x.dim() - len(shape)]), columns


def _centred(x: Tensor, dims: tuple[int, ...], kind: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
    if kind == RMS:
        return x, None, None
    mean = x.mean(dims, keepdim=True)
    residual = (x - mean).mean(dims, keepdim=True)  # what rounding took from the mean
    return (x - mean) - residual, mean, residual


def reference_fwd(
    kind: int, x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> Any:
    dtype, dims = DTYPES[x.dtype][1], _dims(shape)
    centred, mean, residual = _centred(x.to(dtype), dims, kind)
    rstd = torch.rsqrt(centred.square().mean(dims, keepdim=True) + eps)
    statistics = [rstd] if mean is None or residual is None else [mean, residual, rstd]
    rows, _ = rows_and_columns(x, shape)
    y = _affine(centred * rstd, weight, bias, dtype).to(x.dtype).contiguous()
    return y, torch.stack([s.reshape(rows) for s in statistics]).detach()


def _affine(h: Tensor, weight: Tensor | None, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    h = h if weight is None else h * weight.to(dtype)
    return h if bias is None else h + bias.to(dtype)


def reference_recompute(
    kind: int, x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, statistics: Tensor
) -> Tensor:
    dtype = DTYPES[x.dtype][1]
    per_row = (*x.shape[: x.dim() - len(shape)], *(1 for _ in shape))
    parts = [s.reshape(per_row) for s in statistics]
    h = x.to(dtype) * parts[0] if kind == RMS else ((x.to(dtype) - parts[0]) - parts[1]) * parts[2]
    return _affine(h, weight, bias, dtype).to(x.dtype).contiguous()


def reference_bwd(
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
    """Differentiable: statistics are formed anew from `x`, so that second derivatives see them change."""
    dtype, dims = DTYPES[x.dtype][1], _dims(shape)
    rows = tuple(range(x.dim() - len(shape)))
    g = grad.to(dtype)
    centred, _, _ = _centred(x.to(dtype), dims, kind)
    rstd = torch.rsqrt(centred.square().mean(dims, keepdim=True) + eps)
    h = centred * rstd
    parameter_dtype = torch.float32 if float32_parameters else x.dtype
    dx = torch.empty(0, dtype=x.dtype, device=x.device)
    dweight, dbias = (torch.empty(0, dtype=parameter_dtype, device=x.device) for _ in range(2))
    if wanted[0]:
        v = g if weight is None else g * weight.to(dtype)
        level = v.mean(dims, keepdim=True) if kind == LAYER else 0.0
        if kind == RMS and math.prod(shape) == 1:  # v (1 - h^2), without the cancellation
            dx = (v * eps * rstd**3).to(x.dtype)
        else:
            dx = (rstd * (v - level - h * (v * h).mean(dims, keepdim=True))).to(x.dtype)
    if wanted[1]:
        dweight = _sum_rows(g * h, rows).to(parameter_dtype)
    if wanted[2]:
        dbias = _sum_rows(g, rows).to(parameter_dtype)
    return dx, dweight, dbias


def _sum_rows(t: Tensor, rows: tuple[int, ...]) -> Tensor:
    return t.sum(rows) if rows else t  # sum(()) would sum over everything
