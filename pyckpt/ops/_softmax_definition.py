"""Masked softmax in plain differentiable PyTorch: what the ops of softmax.py mean, and their reference backend."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._registry import DTYPES, is_sharded
from .dropout import dropout_factors

MINUS_INFINITY = float("-inf")


class Options(NamedTuple):
    """What the ops take after x and mask, in the order of their schemas."""

    scale: float = 1.0
    causal: int | None = None  # query q sees keys up to q + causal; None: all
    dropout_p: float = 0.0
    seed: Tensor | None = None  # None: no dropout


def _scores(x: Tensor, mask: Tensor | None, options: Options) -> tuple[Tensor, Tensor | None]:
    """Masked scores in the arithmetic's dtype (-inf where masked), and where a row is kept at all (None: everywhere)."""
    scores = x.to(DTYPES[x.dtype][1]) * options.scale
    keep = None
    if mask is not None and mask.dtype == torch.bool:
        keep = mask
    elif mask is not None:
        keep = mask != MINUS_INFINITY
        scores = scores + mask.to(scores.dtype).masked_fill(~keep, 0.0)
    if options.causal is not None:
        # A DTensor does not mix with plain tensors: it gives its own.
        sharded = is_sharded(x)
        visible = (
            torch.ones_like(x, dtype=torch.bool) if sharded else x.new_ones(x.shape[-2:], dtype=torch.bool)
        )
        visible = visible.tril(options.causal)
        keep = visible if keep is None else keep & visible
    if keep is None:
        return scores, None
    keep = keep.expand(x.shape)
    return scores.masked_fill(~keep, MINUS_INFINITY), keep.any(-1, keepdim=True)


def _probabilities(x: Tensor, mask: Tensor | None, options: Options) -> tuple[Tensor, Tensor, Tensor]:
    """Probabilities in the arithmetic's dtype, and the statistics: per row the maximum and the sum (0 where nothing is kept)."""
    scores, kept = _scores(x, mask, options)
    if kept is not None:
        scores = scores.masked_fill(~kept, 0.0)
    if not x.shape[-1]:
        empty = scores.new_empty((*x.shape[:-1], 1))
        return scores, empty, empty
    p = torch.softmax(scores, -1)
    top = scores.amax(-1, keepdim=True)
    total = (scores - top).exp().sum(-1, keepdim=True)
    if kept is not None:
        p, total = p.masked_fill(~kept, 0.0), total.masked_fill(~kept, 0.0)
    return p, top.detach(), total.detach()


def _dropped(p: Tensor, x: Tensor, options: Options) -> Tensor:
    if options.seed is not None:
        p = p * dropout_factors(p, options.seed, options.dropout_p)
    return p.to(x.dtype).contiguous()


def expression(x: Tensor, mask: Tensor | None, options: Options) -> Tensor:
    return _dropped(_probabilities(x, mask, options)[0], x, options)


def statistics_shape(x: Tensor) -> tuple[int, int]:
    columns = x.shape[-1]
    return 2, x.numel() // columns if columns else math.prod(x.shape[:-1])


def reference_fwd(x: Tensor, mask: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
    options = Options(*rest)
    p, top, total = _probabilities(x, mask, options)
    return _dropped(p, x, options), torch.stack([top, total]).reshape(statistics_shape(x))


def reference_recompute(x: Tensor, mask: Tensor | None, *rest: Any) -> Tensor:
    *options, _ = rest
    return expression(x, mask, Options(*options))


def _masked_product(p: Tensor, g: Tensor) -> Tensor:
    """p * g, and 0 where p is 0: the gradient behind a mask may be NaN."""
    return (p * g).masked_fill(p == 0, 0.0)


def gradient(p: Tensor, g: Tensor, masked: bool, scale: float) -> Tensor:
    """scale * p * (g - sum(p g)); the sum in float64, since its rounding reaches every element."""
    product = _masked_product if masked else torch.mul
    dot = product(p.double(), g.double()).sum(-1, keepdim=True).to(p.dtype)
    return product(p, g - dot) * scale


def reference_bwd(grad: Tensor, y: Tensor, masked: bool, scale: float) -> Tensor:
    dtype = DTYPES[y.dtype][1]
    p, g = y.to(dtype), grad.to(dtype)
    return gradient(p, g, masked, scale).to(y.dtype).contiguous()


def reference_dropout_bwd(grad: Tensor, x: Tensor, mask: Tensor | None, *rest: Any) -> Tensor:
    """Differentiable: probabilities are formed anew from `x`."""
    *values, _, grad_scale = rest
    options = Options(*values)
    p = _probabilities(x, mask, options)[0]
    g = grad.to(p.dtype) * dropout_factors(p, options.seed, options.dropout_p)  # type: ignore[arg-type]
    return gradient(p, g, mask is not None or options.causal is not None, grad_scale).to(x.dtype).contiguous()
