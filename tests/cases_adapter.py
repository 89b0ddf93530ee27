"""This package behind a small uniform interface, for running collections of fault reports against it."""

from torch import nn as torch_nn

import pyckpt
from pyckpt import functional as F
from pyckpt import nn


class MLP(torch_nn.Module):
    """fc2(activation(fc1(x)))."""

    def __init__(self, dim, hidden, activation="gelu", bias=True):
        super().__init__()
        self.fc1, self.fc2 = torch_nn.Linear(dim, hidden, bias=bias), torch_nn.Linear(hidden, dim, bias=bias)
        self.activation = {"gelu": nn.GELU(), "gelu_tanh": nn.GELU("tanh"), "silu": nn.SiLU()}[activation]

    def forward(self, x):
        return self.fc2(self.activation(self.fc1(x)))


class Adapter:
    name, device, causal_alignment = "pyckpt", "cpu", "top-left"
    LayerNorm, RMSNorm, GELU, SiLU, Dropout = nn.LayerNorm, nn.RMSNorm, nn.GELU, nn.SiLU, nn.Dropout
    MLP = MLP
    convert = staticmethod(pyckpt.convert)

    @staticmethod
    def softmax(x, dim=-1, mask=None, scale=1.0):
        return F.softmax(x, dim, mask=mask, scale=scale)

    @staticmethod
    def attention(q, k, v, **kwargs):
        return F.attention(q, k, v, **kwargs)
