"""What the engine is measured on: a stack of GPT-2-like blocks, and the ways of training it. See engine.py."""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pyckpt

#: "amp": float32 parameters under bfloat16 autocast.
PRECISIONS = ("fp32", "bf16", "amp")
BUDGETS = (1.0, 0.8, 0.6, 0.4)
#: All ways, in the order of the table; "eager" is what the others are compared with.
WAYS = (
    *("eager", "engine", "converted", "pyckpt", "pyckpt mlp", "pyckpt linear", "plan 0.6", "checkpoint"),
    *(f"compile {b}" for b in BUDGETS),
    "liger",
)


@dataclass(frozen=True)
class Sizes:
    """Of the stack and its input, (batch, sequence, hidden)."""

    batch: int = 4
    sequence: int = 512
    hidden: int = 768
    heads: int = 12
    layers: int = 3

    def __str__(self) -> str:
        return f"{self.batch}x{self.sequence}x{self.hidden}, {self.heads} heads, {self.layers} layers"


class Block(nn.Module):
    """Pre-norm block of GPT-2 (Radford et al. 2019) without dropout, its attention by SDPA."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1 = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.proj = nn.Linear(hidden, hidden)
        self.ln_2 = nn.LayerNorm(hidden)
        self.fc1 = nn.Linear(hidden, 4 * hidden)
        self.act = nn.GELU(approximate="tanh")
        self.fc2 = nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        heads = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.ln_1(x)).chunk(3, -1)
        )
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).flatten(2))
        return x + self.fc2(self.act(self.fc1(self.ln_2(x))))


class Stack(nn.Module):
    """Blocks in a row; `call` runs one of them, which is where a checkpoint goes."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(sizes.hidden, sizes.heads) for _ in range(sizes.layers))

    def forward(self, x: Tensor, call: Callable[[nn.Module, Tensor], Tensor] | None = None) -> Tensor:
        for block in self.blocks:
            x = block(x) if call is None else call(block, x)
        return x


class _Fresh(torch.autograd.Function):
    """A copy made by a node that nobody can recompute, as if a matrix product had made it.

    A leaf would be alive anyway, and a clone of it could be made again; either would hide what the first block keeps.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


@dataclass(frozen=True)
class Way:
    """One way of training the stack: `model` holds the parameters, `call` runs its forward."""

    model: nn.Module
    call: Callable[[Tensor], Tensor]
    amp: bool

    def forward(self, x: Tensor) -> Tensor:
        x = _Fresh.apply(x)
        amp = torch.autocast(x.device.type, torch.bfloat16) if self.amp else contextlib.nullcontext()
        with amp:
            return self.call(x)

    def gradients(self, x: Tensor, grad_output: Tensor) -> tuple[Tensor, ...]:
        """Forward and backward: the gradients of the input and of every parameter."""
        output = self.forward(x)
        return torch.autograd.grad(output, [x, *self.model.parameters()], grad_output.to(output.dtype))


def at_budget(budget: float) -> Callable[..., Any]:
    """Inductor, told to keep no more than this share of what it would keep for backward (1.0: its default).

    A backend of its own for each budget: torch.compile reuses code that the same backend has compiled.
    """

    def backend(graph: Any, inputs: Any) -> Any:
        import torch._functorch.config as functorch
        from torch._inductor.compile_fx import compile_fx

        with functorch.patch(activation_memory_budget=budget):
            return compile_fx(graph, inputs)

    return backend


def _liger(model: Stack, device: torch.device) -> Stack:
    """`model` with Liger's LayerNorm; its GELU comes only inside a gated MLP, which GPT-2 has not.

    Raises:
        RuntimeError: why it cannot be had here.
    """
    if importlib.util.find_spec("liger_kernel") is None:
        raise RuntimeError("liger_kernel is not installed (pip install liger-kernel)")
    if device.type == "cpu":
        raise RuntimeError("Liger's kernels are written in Triton and need a GPU")
    from liger_kernel.transformers import LigerLayerNorm

    model = copy.deepcopy(model)
    for block in model.blocks:
        for name in ("ln_1", "ln_2"):
            norm = getattr(block, name)
            fused = LigerLayerNorm(norm.normalized_shape[0], eps=norm.eps, bias=True).to(norm.weight)
            fused.load_state_dict(norm.state_dict())
            setattr(block, name, fused)
    return model


def named(text: str) -> str:
    """`text`, an argument, if it is one of `WAYS`, or "plan" or "compile" with another share in (0, 1]."""
    if text in WAYS or re.fullmatch(r"(plan|compile) (1(\.0*)?|0?\.\d*[1-9]\d*)", text):
        return text
    raise argparse.ArgumentTypeError(f"no way {text!r}: they are {', '.join(map(repr, WAYS))}")


def build(name: str, model: Stack, x: Tensor, amp: bool) -> Way:
    """The way called `name` (see :func:`named`; not torch.compile's) to train `model` or a copy of it on batches like `x`.

    Raises:
        RuntimeError: it does not exist here; the message says why.
    """
    if name == "engine":
        return Way(model, pyckpt.recompute()(model.__call__), amp)
    if name == "checkpoint":
        return Way(model, partial(model, call=partial(checkpoint, use_reentrant=False)), amp)
    if name.startswith("plan"):
        model = pyckpt.convert(copy.deepcopy(model), recompute=False)
        with torch.autocast(x.device.type, torch.bfloat16, enabled=amp):
            pyckpt.plan(model, x, budget=float(name.split()[1]), blocks=[*model.blocks]).apply(model)
    elif name == "converted" or name.startswith("pyckpt"):
        level = name.removeprefix("pyckpt").strip() or "pointwise"
        model = pyckpt.convert(copy.deepcopy(model), recompute=False if name == "converted" else level)
    elif name == "liger":
        model = _liger(model, x.device)
    return Way(model, model, amp)
