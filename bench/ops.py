"""The table of subjects: what is compared with what, on which input, and how many bytes it must move.

The bytes are the least a fused kernel can do with: every tensor that must be read or written once, each
counted once, for all implementations alike. In forward that is input and output; in backward the incoming
gradient, the one tensor kept for backward and the gradient of the input. Parameters, statistics and seeds are
left out: they are small beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from pyckpt import functional as PF
from pyckpt import nn as pnn

DROP = 0.1

#: Accepted spellings of dtypes; rows carry the first one of each.
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
DTYPE_ALIASES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float64": "fp64"}

#: contiguous; the last two axes swapped in memory; every row half of a row twice as long (one half of a fused
#: projection).
LAYOUTS = ("contiguous", "transposed", "sliced")


@dataclass(frozen=True)
class Case:
    """One subject on one input. All callables take `inputs`; the first is the activation, the others
    parameters."""

    inputs: Sequence[Tensor]
    eager: Callable[..., Tensor]
    pyckpt: Callable[..., Tensor]
    #: Deterministic expression in any dtype; for a random op, made from the mask of kept elements.
    reference: Callable[..., Tensor] | None
    forward_bytes: int
    step_bytes: int
    with_mask: Callable[[Tensor], Callable[..., Tensor]] | None = None
    #: The output of an implementation in which a dropped element is a zero; None: its output on `inputs`.
    shows_mask: Callable[[Callable[..., Tensor]], Tensor] | None = None
    #: Other ways to write it in PyTorch, by name: timed as they are, and under torch.compile.
    peers: Mapping[str, Callable[..., Tensor]] = field(default_factory=dict)
    compiled_peers: Mapping[str, Callable[..., Tensor]] = field(default_factory=dict)


def make_input(shape: Sequence[int], dtype: torch.dtype, device: torch.device, layout: str) -> Tensor:
    """Standard normal values in `layout`, a leaf that requires grad.

    Raises:
        ValueError: unknown layout.
    """
    shape = tuple(shape)
    if layout == "contiguous":
        data = torch.randn(shape, device=device).to(dtype)
    elif layout == "transposed":
        data = torch.randn((*shape[:-2], shape[-1], shape[-2]), device=device).to(dtype).transpose(-1, -2)
    elif layout == "sliced":
        data = torch.randn((*shape[:-1], 2 * shape[-1]), device=device).to(dtype)[..., : shape[-1]]
    else:
        raise ValueError(f"unknown layout {layout!r}; known: {', '.join(LAYOUTS)}")
    return data.detach().requires_grad_()


def scores_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Attention scores of about the same size: rows x columns becomes (rows / columns, columns, columns)
    where that divides."""
    rows, columns = math.prod(shape[:-1]), shape[-1]
    return (rows // columns, columns, columns) if rows % columns == 0 else (1, rows, columns)


def _modules(
    ours: nn.Module, theirs: nn.Module
) -> tuple[Callable[..., Tensor], Callable[..., Tensor], list[Tensor]]:
    """Callables of two modules that share their parameters, and those parameters."""
    for name, parameter in theirs.named_parameters():
        setattr(ours, name, parameter)
    return (lambda x, *_: ours(x)), (lambda x, *_: theirs(x)), list(theirs.parameters())


def _elementwise(ours: nn.Module, theirs: nn.Module, x: Tensor) -> Case:
    fused, eager, _ = _modules(ours, theirs)
    size = x.numel() * x.element_size()
    return Case([x], eager, fused, eager, 2 * size, 5 * size)


def _gelu(approximate: str) -> Callable[[Tensor], Case]:
    return lambda x: _elementwise(pnn.GELU(approximate), nn.GELU(approximate), x)


class _QuickGELU(nn.Module):
    """As models write it."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


def _quick_gelu(x: Tensor) -> Case:
    return _elementwise(pnn.GELU("sigmoid"), _QuickGELU(), x)


def _silu(x: Tensor) -> Case:
    return _elementwise(pnn.SiLU(), nn.SiLU(), x)


def _relu(x: Tensor) -> Case:
    return _elementwise(pnn.ReLU(), nn.ReLU(), x)


def _norm(ours: Any, theirs: Any, reference: Callable[..., Tensor], x: Tensor) -> Case:
    width = x.shape[-1]
    with torch.no_grad():
        eager_module = theirs(width, device=x.device, dtype=x.dtype)
        for parameter in eager_module.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    fused, eager, parameters = _modules(ours(width, device=x.device, dtype=x.dtype), eager_module)
    size = x.numel() * x.element_size()
    return Case([x, *parameters], eager, fused, reference, 2 * size, 5 * size)


def _layer_norm(x: Tensor) -> Case:
    return _norm(pnn.LayerNorm, nn.LayerNorm, lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b), x)


def _rms_norm(x: Tensor) -> Case:
    eps = 1e-6  # given, since the default depends on the dtype and the float64 oracle must use the same
    return _norm(
        partial(pnn.RMSNorm, eps=eps),
        partial(nn.RMSNorm, eps=eps),
        lambda x, w: F.rms_norm(x, x.shape[-1:], w, eps),
        x,
    )


def _dropout(x: Tensor) -> Case:
    fused, eager, _ = _modules(pnn.Dropout(DROP), nn.Dropout(DROP))
    size = x.numel() * x.element_size()

    def with_mask(mask: Tensor) -> Callable[..., Tensor]:
        return lambda x: x * mask.to(x.dtype).div(1 - DROP)

    return Case([x], eager, fused, None, 2 * size, 4 * size, with_mask)


def _softmax(x: Tensor) -> Case:
    return _elementwise(pnn.Softmax(dim=-1), nn.Softmax(dim=-1), x)


def _softmax_causal(x: Tensor) -> Case:
    queries, keys = x.shape[-2:]
    scale = 0.125
    hidden = torch.ones(queries, keys, dtype=torch.bool, device=x.device).triu(1)

    def eager(x: Tensor) -> Tensor:
        return F.softmax((x * scale).masked_fill(hidden, -torch.inf), dim=-1)

    def fused(x: Tensor) -> Tensor:
        return PF.softmax(x, -1, scale=scale, is_causal=True)

    size = x.numel() * x.element_size()
    seen = 1.0 - float(hidden.float().mean())  # only the part on and below the diagonal has to be read
    return Case([x], eager, fused, eager, int((seen + 1) * size), int((seen + 1 + 2 * seen + 1) * size))


def _softmax_mask_dropout(x: Tensor) -> Case:
    scale = 0.125
    keep = (
        torch.rand(x.shape[0], 1, x.shape[-1], device=x.device) < 0.8
    )  # padding, one mask for each sequence
    keep[..., 0] = True
    masked = ~keep

    def probabilities(x: Tensor) -> Tensor:
        return F.softmax((x * scale).masked_fill(masked, -torch.inf), dim=-1)

    def eager(x: Tensor) -> Tensor:
        return F.dropout(probabilities(x), DROP)

    def fused(x: Tensor) -> Tensor:
        return PF.softmax(x, -1, mask=keep, scale=scale, dropout_p=DROP)

    def with_mask(mask: Tensor) -> Callable[..., Tensor]:
        return lambda x: probabilities(x) * mask.to(x.dtype).div(1 - DROP)

    size = x.numel() * x.element_size()
    return Case([x], eager, fused, None, 2 * size + keep.numel(), 5 * size + 2 * keep.numel(), with_mask)


SEQUENCE, HEAD = 512, 64


def _heads(x: Tensor) -> list[Tensor]:
    """q, k and v of x's size, (batch, heads, queries, width): sequences of 512 and heads of 64 where those divide."""
    rows, columns = math.prod(x.shape[:-1]), x.shape[-1]
    length = SEQUENCE if rows % SEQUENCE == 0 else rows
    width = HEAD if columns % HEAD == 0 else columns
    shape = (rows // length, columns // width, length, width)
    return [torch.randn(shape, device=x.device).to(x.dtype).requires_grad_() for _ in range(3)]


def _attention_case(
    inputs: Sequence[Tensor],
    eager: Callable[..., Tensor],
    fused: Callable[..., Tensor],
    bias_bytes: int = 0,
    **rest: Any,
) -> Case:
    # Forward reads q, k, v and writes the output; backward reads these and the gradient, and writes three.
    size = inputs[0].numel() * inputs[0].element_size()
    return Case(
        inputs,
        eager,
        fused,
        forward_bytes=4 * size + bias_bytes,
        step_bytes=12 * size + 3 * bias_bytes,
        **rest,
    )


def _by_backend(backend: SDPBackend, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def restricted(*inputs: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return function(*inputs)

    return restricted


def _attention(is_causal: bool) -> Callable[[Tensor], Case]:
    """Eager is scaled_dot_product_attention with the backend that torch chooses. Errors are bounded by those of the composition,
    whose roundings pyckpt shares: the scores' in 16 bits is one that torch's flash kernel does not have."""

    def build(x: Tensor) -> Case:
        def composition(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            scores = q @ k.mT * q.shape[-1] ** -0.5
            if is_causal:
                hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
                scores = scores.masked_fill(hidden, -torch.inf)
            return F.softmax(scores, dim=-1) @ v

        def eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)

        def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return PF.attention(q, k, v, is_causal=is_causal)

        inputs = _heads(x)
        length = inputs[0].shape[2]
        blocks = None
        if is_causal:
            blocks = create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length, device=x.device)

        def flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return flex_attention(q, k, v, block_mask=blocks)

        backends = [SDPBackend.MATH]
        if x.is_cuda:
            backends += [
                SDPBackend.FLASH_ATTENTION,
                SDPBackend.EFFICIENT_ATTENTION,
                SDPBackend.CUDNN_ATTENTION,
            ]
        peers = {
            f"sdpa {backend.name.split('_')[0].lower()}": _by_backend(backend, eager) for backend in backends
        }
        return _attention_case(
            inputs, eager, fused, reference=composition,
            peers={**peers, "composition": composition}, compiled_peers={"flex_attention": flex},
        )  # fmt: skip

    return build


def _attention_bias(x: Tensor) -> Case:
    """A bias of all heads and places, with gradient, and a softcap; eager is the composition that users have to write."""
    q, k, v = _heads(x)
    bias = torch.randn(q.shape[1], q.shape[2], k.shape[2], device=x.device).to(x.dtype).requires_grad_()
    cap, scale = 20.0, q.shape[-1] ** -0.5

    def eager(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return F.softmax(torch.tanh(q @ k.mT * (scale / cap)) * cap + bias, dim=-1) @ v

    def fused(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return PF.attention(q, k, v, bias, softcap=cap)

    def flex(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return flex_attention(
            q, k, v, lambda score, b, h, i, j: torch.tanh(score / cap) * cap + bias[h, i, j]
        )

    bias_bytes = bias.numel() * bias.element_size()
    peers = {"flex_attention": flex}
    return _attention_case([q, k, v, bias], eager, fused, bias_bytes, reference=eager, compiled_peers=peers)


def _attention_dropout(x: Tensor) -> Case:
    """Eager is scaled_dot_product_attention, which then keeps the weights on a CPU. Values that are the identity show them."""
    q, k, v = _heads(x)
    identity = torch.eye(k.shape[2], device=x.device, dtype=x.dtype).expand(*k.shape[:3], k.shape[2])

    def eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=DROP)

    def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return PF.attention(q, k, v, dropout_p=DROP)

    def with_mask(mask: Tensor) -> Callable[..., Tensor]:
        def composition(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            weights = F.softmax(q @ k.mT * q.shape[-1] ** -0.5, dim=-1)
            return (weights * mask.to(weights.dtype).div(1 - DROP)) @ v

        return composition

    return _attention_case(
        [q, k, v], eager, fused, reference=None, with_mask=with_mask, shows_mask=lambda fn: fn(q, k, identity)
    )


@dataclass(frozen=True)
class Subject:
    """A row of the table: how to build the case from its input, whether that input is attention scores, and whether the time
    goes into matrix products."""

    build: Callable[[Tensor], Case]
    scores: bool = False
    products: bool = False

    def case(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, layout: str) -> Case:
        """The case on a fresh input; `shape` is (..., columns), folded to scores where the subject needs
        queries and keys."""
        return self.build(make_input(scores_shape(shape) if self.scores else shape, dtype, device, layout))


SUBJECTS: dict[str, Subject] = {
    "gelu_tanh": Subject(_gelu("tanh")),
    "gelu_erf": Subject(_gelu("none")),
    "gelu_sigmoid": Subject(_quick_gelu),
    "silu": Subject(_silu),
    "relu": Subject(_relu),
    "layer_norm": Subject(_layer_norm),
    "rms_norm": Subject(_rms_norm),
    "dropout": Subject(_dropout),
    "softmax": Subject(_softmax),
    "softmax_causal": Subject(_softmax_causal, scores=True),
    "softmax_mask_dropout": Subject(_softmax_mask_dropout, scores=True),
    "attention": Subject(_attention(False), products=True),
    "attention_causal": Subject(_attention(True), products=True),
    "attention_bias": Subject(_attention_bias, products=True),
    "attention_dropout": Subject(_attention_dropout, products=True),
}
