"""What softmax asks of its arguments, and the errors that say so."""

from __future__ import annotations

import torch
from torch import Tensor

from ._native import together
from ._registry import DTYPES, describe, refused
from ._softmax_definition import Options, statistics_shape
from .dropout import check_random


def check_options(
    input: Tensor, dim: int, scale: float, is_causal: bool, causal_alignment: str, dropout_p: float
) -> None:
    if not isinstance(scale, (int, float)) and not torch.compiler.is_compiling():
        raise TypeError(f"softmax: scale must be a float, got {type(scale).__name__}")
    if not 0.0 <= dropout_p <= 1.0:
        raise ValueError(f"softmax: dropout_p has to be between 0 and 1, but got {dropout_p}")
    if causal_alignment not in ("top_left", "bottom_right"):
        raise ValueError(
            f"softmax: causal_alignment must be 'top_left' or 'bottom_right', got {causal_alignment!r}"
        )
    if is_causal and (input.dim() < 2 or dim not in (-1, input.dim() - 1)):
        raise ValueError(
            f"softmax: is_causal needs queries and keys as the last two dimensions and dim=-1, got dim={dim} for "
            f"{describe('input', input)}"
        )


def check_mask(mask: Tensor, input: Tensor) -> None:
    if not isinstance(mask, Tensor):
        raise TypeError(f"softmax: mask must be a tensor, got {type(mask).__name__}; use torch.tensor(mask)")
    if mask.dtype not in (torch.bool, input.dtype):
        raise RuntimeError(
            f"softmax: {describe('mask', mask)} must be boolean (True = keep) or additive in the dtype of "
            f"{describe('input', input)}; convert it, e.g. mask.to(input.dtype)"
        )
    if mask.device != input.device:
        raise RuntimeError(
            f"softmax: {describe('mask', mask)} must be on the device of {describe('input', input)}; move it with .to()"
        )
    try:
        mask.expand(input.shape)
    except RuntimeError:
        raise RuntimeError(
            f"softmax: {describe('mask', mask)} cannot be broadcast to {describe('input', input)}; give every dimension "
            "the input's size or 1, e.g. with mask.unsqueeze()"
        ) from None


def check_arguments(x: Tensor, mask: Tensor | None, options: Options) -> None:
    """For raw calls, which no public function has checked, and for what saved-tensor hooks may have changed."""
    if x.dim() == 0:
        raise refused("x must have a dimension")
    if mask is not None:
        check_mask(mask, x)
    check_random(x, options.seed, options.dropout_p)


def check_statistics(x: Tensor, statistics: Tensor) -> None:
    if (
        statistics.shape != statistics_shape(x)
        or statistics.dtype is not DTYPES[x.dtype][1]
        or not together(statistics, x)
    ):
        raise refused(f"{describe('statistics', statistics)} are not those of {describe('x', x)}")
