"""Recompute rules for PyTorch's matrix products and convolutions: for policies that ask for them."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ._records import shape_of
from ._rules_torch import Captured, rule
from .rules import Edge, Output, Unavailable, elements, saved


def _product(node: Any, operands: tuple[Any, ...]) -> int:
    """2 m n k: the elements of the output, times the common dimension of the two factors, the last two operands."""
    return 2 * elements(node) * shape_of(operands[-2])[-1]


@rule("MmBackward0", _product, matrix=True, linear=True)
def _mm(node: Any, output: Output, edge: Edge) -> Captured:
    return torch.mm, _factors(node, edge, "self", "mat2", 0)


@rule("BmmBackward0", _product, matrix=True)
def _bmm(node: Any, output: Output, edge: Edge) -> Captured:
    return torch.bmm, _factors(node, edge, "self", "mat2", 0)


@rule("AddmmBackward0", _product, matrix=True, linear=True)
def _addmm(node: Any, output: Output, edge: Edge) -> Captured:
    function = partial(torch.addmm, alpha=node._saved_alpha, beta=node._saved_beta)
    return function, (edge(0), *_factors(node, edge, "mat1", "mat2", 1))


@rule("BaddbmmBackward0", _product, matrix=True)
def _baddbmm(node: Any, output: Output, edge: Edge) -> Captured:
    function = partial(torch.baddbmm, alpha=node._saved_alpha, beta=node._saved_beta)
    return function, (edge(0), *_factors(node, edge, "batch1", "batch2", 1))


def _factors(node: Any, edge: Edge, first: str, second: str, index: int) -> tuple[Any, Any]:
    """The node keeps each factor that the other's gradient needs."""
    a, b = saved(node, first), saved(node, second)
    return edge(index) if a is None else a, edge(index + 1) if b is None else b


def _convolution_flops(node: Any, operands: tuple[Any, ...]) -> int:
    x, weight = shape_of(operands[0]), shape_of(operands[1])
    return 2 * (math.prod(x) if node._saved_transposed else elements(node)) * math.prod(weight[1:])


@rule("ConvolutionBackward0", _convolution_flops, matrix=True)
def _convolution(node: Any, output: Output, edge: Edge) -> Captured:
    names = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")
    options = [getattr(node, "_saved_" + name) for name in names]
    x, weight = saved(node, "input"), saved(node, "weight")
    bias = None
    if node._saved_bias_sym_sizes_opt is not None:
        if node.next_functions[2][0] is None:
            raise Unavailable("its frozen bias is kept nowhere")
        bias = edge(2)

    def function(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.convolution(x, weight, bias, *options)

    return function, (edge(0) if x is None else x, edge(1) if weight is None else weight, bias)
