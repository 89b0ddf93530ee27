"""This package behind a small uniform interface, for running collections of fault reports against it."""

from torch import nn as torch_nn

import pyckpt
from pyckpt import functional as F
from pyckpt import nn
from pyckpt.checkpointing._solver import Chain, Option

ACTIVATIONS = {"gelu": nn.GELU, "gelu_tanh": lambda: nn.GELU("tanh"), "silu": nn.SiLU}


class MLP(torch_nn.Module):
    """fc2(activation(fc1(x)))."""

    def __init__(self, dim, hidden, activation="gelu", bias=True):
        super().__init__()
        self.fc1, self.fc2 = torch_nn.Linear(dim, hidden, bias=bias), torch_nn.Linear(hidden, dim, bias=bias)
        self.activation = ACTIVATIONS[activation]()

    def forward(self, x):
        return self.fc2(self.activation(self.fc1(x)))


class GatedMLP(torch_nn.Module):
    """down_proj(activation(gate_proj(x)) * up_proj(x))."""

    def __init__(self, dim, hidden, activation="silu", bias=False):
        super().__init__()
        self.gate_proj, self.up_proj = (torch_nn.Linear(dim, hidden, bias=bias) for _ in range(2))
        self.down_proj = torch_nn.Linear(hidden, dim, bias=bias)
        self.activation = ACTIVATIONS[activation]()

    def forward(self, x):
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


class SelfAttention(nn.MultiheadAttention):
    def __init__(self, dim, heads, dropout=0.0):
        super().__init__(dim, heads, dropout, batch_first=True)

    def forward(self, x):
        return super().forward(x, x, x, need_weights=False)[0]


class Adapter:
    name, device, causal_alignment = "pyckpt", "cpu", "top-left"
    LayerNorm, RMSNorm, GELU, SiLU, Dropout = nn.LayerNorm, nn.RMSNorm, nn.GELU, nn.SiLU, nn.Dropout
    MLP, GatedMLP, SelfAttention = MLP, GatedMLP, SelfAttention
    convert, checkpoint = staticmethod(pyckpt.convert), staticmethod(pyckpt.checkpoint)
    checkpoint_wrapper = staticmethod(pyckpt.checkpoint_wrapper)

    @staticmethod
    def checkpoint_sequential(functions, segments, x):
        return pyckpt.checkpoint_sequential(functions, x, segments=segments)

    @staticmethod
    def plan(sizes, costs, budget):
        """Which to keep, by the solver of plans: one option for each, in whole units of 1e-9."""
        options = [
            (Option("keep", 1, size, 0, 0), Option("drop", 1, 0, 0, round(cost * 1e9)))
            for size, cost in zip(sizes, costs, strict=True)
        ]
        chosen = Chain(options, [0] * len(options), 0).solve(budget)
        return [option.name == "keep" for option in chosen]

    @staticmethod
    def softmax(x, dim=-1, mask=None, scale=1.0):
        return F.softmax(x, dim, mask=mask, scale=scale)

    @staticmethod
    def attention(q, k, v, **kwargs):
        return F.attention(q, k, v, **kwargs)
