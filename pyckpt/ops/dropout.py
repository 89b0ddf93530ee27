"""Dropout by Philox4x32-10 (Salmon et al., SC'11).

Saved for backward: nothing but the seed, as an attribute of the node; the mask is generated anew in backward. (A saved tensor
would make torch.utils.checkpoint run a block to its end to get it back; an attribute does not.) The seed is one int64 drawn
from torch's generator of the device, so torch.manual_seed and the RNG handling of checkpoint govern it.

Element i in row-major order, whatever the strides, is kept where word i % 4 of the Philox block with counter i // 4 and the seed
as key is at least p * 2**32. Every backend gives this mask.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ._kernels import Kernels
from ._native import CPU, elementwise_view, fake_like, resolved, strided
from ._registry import (
    DTYPES,
    Function,
    Op,
    backend_of,
    by_torch,
    describe,
    dtype_problem,
    is_sharded,
    lowered,
    needs_grad,
    refused,
)

_WORD = 0xFFFFFFFF


def philox_words(seed: Tensor, count: int) -> Tensor:
    """The first `count` words of the stream with key `seed` (int64, one element), as int64 in [0, 2**32).

    Products of two 32-bit words wrap in int64; their bits are right all the same, and masking restores the sign-extended half.
    """
    counter = torch.arange((count + 3) // 4, dtype=torch.int64, device=seed.device)
    key = seed.reshape(())
    k0, k1 = key & _WORD, (key >> 32) & _WORD
    c0, c1 = counter & _WORD, counter >> 32
    c2 = c3 = torch.zeros_like(counter)
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = ((b >> 32) & _WORD) ^ c1 ^ k0, b & _WORD, ((a >> 32) & _WORD) ^ c3 ^ k1, a & _WORD
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return torch.stack([c0, c1, c2, c3], -1).reshape(-1)[:count]


def dropout_factors(like: Tensor, seed: Tensor, p: float) -> Tensor:
    """1 / (1 - p) where an element of a tensor shaped like `like` is kept, 0 where it is dropped."""
    if p >= 1:
        return torch.zeros_like(like)
    kept = philox_words(seed, like.numel()) >= int(p * 2**32)
    return kept.reshape(like.shape).to(like.dtype) * (1 / (1 - p))


def new_seed(device: torch.device) -> Tensor:
    """A seed of shape (1,), int64, from torch's generator of `device`."""
    return torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=device)


def _reference(x: Tensor, seed: Tensor, p: float) -> Tensor:
    wide = x if x.dtype == torch.float64 else x.float()
    return (wide * dropout_factors(wide, seed, p)).to(x.dtype)


# Backward applies the same factors to the gradient: one op serves forward, recompute and every order of derivative.
dropout_op = Op("dropout(Tensor x, Tensor seed, float p) -> Tensor", fake=fake_like, reference=_reference)


class DropoutFunction(Function):
    """Saves no tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seed: Tensor, p: float, inplace: bool = False) -> Tensor:
        ctx.backend = backend_of(x, dropout_op)
        ctx.seed, ctx.p = seed, p
        y = dropout_op(ctx.backend, x, seed, p)
        if inplace:
            ctx.mark_dirty(x)
            x.data.copy_(y)  # mark_dirty counts the change
            return x
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return dropout_op.in_backward(ctx.backend, grad, ctx.seed, ctx.p), None, None, None

    @staticmethod
    def recompute(ctx: Any, x: Tensor) -> Tensor:
        """The forward's output, bit for bit, from its input."""
        return dropout_op(ctx.backend, x, ctx.seed, ctx.p)


dropout_op.differentiable(lambda x, seed, p: DropoutFunction.apply(x, seed, p))


def check_random(x: Tensor, seed: Tensor | None, p: float) -> None:
    """For raw calls, which no public function has checked."""
    if x.dtype not in DTYPES:
        raise refused(f"no kernel for {describe('x', x)}")
    if not 0.0 <= p <= 1.0:
        raise refused(f"dropout probability has to be between 0 and 1, but got {p}")
    if seed is None:
        if p:
            raise refused("dropout needs a seed")
    elif seed.dtype is not torch.int64 or seed.numel() != 1 or seed.device != x.device:
        raise refused(f"{describe('seed', seed)} must be one int64 on the device of {describe('x', x)}")


dropout_op.guard = check_random


def _dropout(kernels: Kernels, x: Tensor, seed: Tensor, p: float) -> Tensor:
    x = resolved(strided(x))
    if x.dim() and x.stride(-1) != 1 and not x.is_contiguous():
        # Masks count elements in logical order, in which these lie far apart: torch's copies into contiguous memory go by tiles.
        y = torch.empty_like(x)
        order = sorted(range(x.dim()), key=lambda d: -y.stride()[d])
        y.permute(order).copy_(_dropout(kernels, x.contiguous(), seed, p).permute(order))
        return y
    y = torch.empty_like(x)
    view = [] if x.is_contiguous() else elementwise_view(x, y, ordered=True)
    kernels.dropout(x, y, view, p, seed)
    return y


def register(kernels: Kernels) -> None:
    """Lets `kernels` compute this op on its backend."""
    dropout_op.kernel(kernels.backend)(lambda x, seed, p: _dropout(kernels, x, seed, p))


register(CPU)


def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Zeroes elements with probability `p` and scales the others by 1 / (1 - p), as :func:`torch.nn.functional.dropout`.

    Keeps nothing for backward but a seed of 8 bytes. The random elements differ from torch's for the same manual seed.

    Args:
        input: any shape; float32, bfloat16, float16 or float64.
        p: probability, in [0, 1].
        training: False: returns `input` as it is.
        inplace: write the result into `input`.

    Raises:
        ValueError: p outside [0, 1].
    """
    if p < 0.0 or p > 1.0:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
    if not isinstance(input, Tensor) or p != p:
        return by_torch(dtype_problem("dropout", input), F.dropout, input, p, training, inplace)
    if not training or p == 0.0:
        return input
    if lowered(input):
        if (
            input.dtype not in DTYPES
            or is_sharded(input)
            or input.is_nested
            or input.layout is not torch.strided
        ):
            # The elements of a shard have no index here: torch's own mask.
            return by_torch(dtype_problem("dropout", input), F.dropout, input, p, training, inplace)
        seed = new_seed(input.device)
        # The compiler gets one opaque op (torch's own random numbers would be another mask); everyone else the expression.
        y = (
            dropout_op.overload(input, seed, p)
            if torch.compiler.is_compiling()
            else _reference(input, seed, p)
        )
        return input.copy_(y) if inplace else y
    if inplace and needs_grad(input) and input.is_leaf:
        raise RuntimeError(
            "a leaf Variable that requires grad is being used in an in-place operation: dropout(inplace=True) on "
            f"{describe('input', input)}; use inplace=False, or torch.no_grad()"
        )
    seed = new_seed(input.device)
    if needs_grad(input):
        return DropoutFunction.apply(input, seed, p, inplace)
    y = dropout_op(backend_of(input, dropout_op), input, seed, p)
    return input.copy_(y) if inplace else y
