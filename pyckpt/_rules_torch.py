"""Recompute rules for PyTorch's own nodes.

Each repeats the call that made the output, with what the node keeps (derivatives.yaml of PyTorch says what that is). Those that
cannot are layer_norm and group_norm, whose nodes keep no eps: their formulas are written out, and the bits checked at first use.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ._records import shape_of
from .rules import (
    FROM_LOCAL,
    OWN_OUTPUT,
    RULES,
    Capture,
    Edge,
    Flops,
    Output,
    Rule,
    Unavailable,
    elements,
    record,
    saved,
)

aten = torch.ops.aten
#: Function and operands.
Captured = tuple[Callable[..., Tensor], tuple[Any, ...]]


def rule(name: str, flops: int | Flops = 1, **options: Any) -> Callable[[Capture], Capture]:
    """Registers a rule; `flops` as a number is that of an element of the output."""
    count = flops if callable(flops) else lambda node, operands: flops * elements(node)

    def register(capture: Capture) -> Capture:
        RULES[name] = Rule(name, capture, flops=count, **options)
        return capture

    return register


def _integer(value: int) -> int:
    """Nodes show negative dimensions as unsigned."""
    return value - (1 << 64) if value >= 1 << 63 else value


def _unary(name: str, function: Callable[..., Tensor], *options: str, flops: int = 1) -> None:
    """The node keeps `self`, and the other arguments under the names `options`."""

    @rule(name, flops, elementwise=True, pointwise=True)
    def capture(node: Any, output: Output, edge: Edge) -> Captured:
        arguments = {option: getattr(node, "_saved_" + option) for option in options}
        return (partial(function, **arguments) if arguments else function), (saved(node, "self"),)


_unary("GeluBackward0", F.gelu, "approximate", flops=20)
_unary("SiluBackward0", F.silu, flops=12)
_unary("MishBackward0", F.mish, flops=25)
_unary("SoftplusBackward0", aten.softplus, "beta", "threshold", flops=20)
_unary("LogSigmoidBackward0", F.logsigmoid, flops=20)
_unary("EluBackward0", aten.elu, "alpha", "scale", "input_scale", flops=12)
_unary("CeluBackward0", torch.celu, "alpha", flops=12)
_unary("LeakyReluBackward0", F.leaky_relu, "negative_slope")
_unary("HardswishBackward0", F.hardswish, flops=4)
_unary("HardsigmoidBackward0", F.hardsigmoid, flops=4)
_unary("HardtanhBackward0", F.hardtanh, "min_val", "max_val")
_unary("HardshrinkBackward0", F.hardshrink, "lambd")
_unary("SoftshrinkBackward0", F.softshrink, "lambd")
_unary("ClampBackward1", torch.clamp, "min", "max")
_unary("AbsBackward0", torch.abs)
_unary("SinBackward0", torch.sin, flops=15)
_unary("CosBackward0", torch.cos, flops=15)
_unary("ErfBackward0", torch.erf, flops=20)
_unary("LogBackward0", torch.log, flops=15)
_unary("Log1PBackward0", torch.log1p, flops=15)
_unary("PowBackward0", torch.pow, "exponent")


@rule("GluBackward0", 12, pointwise=True)
def _glu(node: Any, output: Output, edge: Edge) -> Captured:
    return partial(F.glu, dim=_integer(node._saved_dim)), (saved(node, "self"),)


_unary(
    "MaxPool2DWithIndicesBackward0",
    lambda x, **options: aten.max_pool2d_with_indices(x, **options)[0],
    *("kernel_size", "stride", "padding", "dilation", "ceil_mode"),
    flops=9,
)


@rule("PreluKernelBackward0", pointwise=True)
def _prelu(node: Any, output: Output, edge: Edge) -> Captured:
    return torch._prelu_kernel, (saved(node, "self"), saved(node, "weight"))


def _binary(name: str, function: Callable[..., Tensor]) -> None:
    """The node keeps each operand that the other's gradient needs; one that it does not keep may be had from its producer."""

    @rule(name, elementwise=True, pointwise=True)
    def capture(node: Any, output: Output, edge: Edge) -> Captured:
        first, second = saved(node, "self"), saved(node, "other")
        return function, (edge(0) if first is None else first, edge(1) if second is None else second)


def _by_number(name: str, function: Callable[..., Tensor]) -> None:
    @rule(name, elementwise=True, pointwise=True)
    def capture(node: Any, output: Output, edge: Edge) -> Captured:
        return function, (edge(0), node._saved_other)


_binary("MulBackward0", torch.mul)
_binary("DivBackward0", torch.div)
_by_number("MulBackward1", torch.mul)
_by_number("DivBackward1", torch.div)
_binary("MinimumBackward0", torch.minimum)
_binary("MaximumBackward0", torch.maximum)


# Nodes that keep no operand. In a residual connection the second is the branch, which ends in a matrix product: asked for first,
# it ends the search.


@rule("AddBackward0", elementwise=True, pointwise=True)
def _add(node: Any, output: Output, edge: Edge) -> Captured:
    second = edge(1)
    return partial(torch.add, alpha=node._saved_alpha), (edge(0), second)


@rule("SubBackward0", elementwise=True, pointwise=True)
def _subtract(node: Any, output: Output, edge: Edge) -> Captured:
    second = edge(1)
    return partial(torch.sub, alpha=node._saved_alpha), (edge(0), second)


@rule("NegBackward0", elementwise=True, pointwise=True)
def _negate(node: Any, output: Output, edge: Edge) -> Captured:
    return torch.neg, (edge(0),)


def _joined(name: str, function: Callable[..., Tensor]) -> None:
    @rule(name)
    def capture(node: Any, output: Output, edge: Edge) -> Captured:
        dim = _integer(node._saved_dim)
        return (lambda *x: function(x, dim)), tuple(edge(i) for i in range(len(node.next_functions)))


_joined("CatBackward0", torch.cat)
_joined("StackBackward0", torch.stack)


@rule("ToCopyBackward0", elementwise=True, pointwise=True)
def _cast(node: Any, output: Output, edge: Edge) -> Captured:
    return partial(Tensor.to, device=output.device, dtype=output.dtype), (edge(0),)


@rule("EmbeddingBackward0")
def _embedding(node: Any, output: Output, edge: Edge) -> Captured:
    return F.embedding, (saved(node, "indices"), edge(0))


@rule("IndexBackward0")
def _index(node: Any, output: Output, edge: Edge) -> Captured:
    indices = [record(raw) for raw in node._raw_saved_indices]  # None: the whole dimension
    return (lambda x, *indices: aten.index(x, indices)), (edge(0), *indices)


@rule("SumBackward1", lambda node, operands: math.prod(shape_of(operands[0])))
def _sum(node: Any, output: Output, edge: Edge) -> Captured:
    dims = None if node._saved_dim is None else [_integer(d) for d in node._saved_dim]
    return partial(torch.sum, dim=dims, keepdim=node._saved_keepdim, dtype=output.dtype), (edge(0),)


# Norms


def _layer_norm_formula(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, rstd: Tensor
) -> Tensor:
    y = torch.sub(x, mean).mul_(rstd)
    if weight is not None:
        y = torch.addcmul(bias, y, weight) if bias is not None else y.mul_(weight)
    elif bias is not None:
        y = y.add_(bias)
    return y.to(x.dtype)


def _in_16_bits(node: Any) -> bool:
    """Whether a norm's output, computed in float32 by a kernel in another order, is rounded: seldom to other bits."""
    return node._input_metadata[0].dtype in (torch.bfloat16, torch.float16)


@rule("NativeLayerNormBackward0", 6, same_call=False, unsure=_in_16_bits)
def _layer_norm(node: Any, output: Output, edge: Edge) -> Captured:
    _first_output(output)
    return _layer_norm_formula, (
        saved(node, "input"),
        saved(node, "weight"),
        saved(node, "bias"),
        *_statistics(node),
    )


def _statistics(node: Any) -> tuple[Any, Any]:
    """Mean and rstd."""
    mean, rstd = saved(node, "result1"), saved(node, "result2")
    if type(mean) is tuple and mean[0].dtype in (torch.bfloat16, torch.float16):
        raise Unavailable(
            "{} keeps its statistics in 16 bits here; for some, pyckpt.convert swaps in one that does not",
            node,
        )
    return mean, rstd


def _first_output(output: Output) -> None:
    if output.number:
        raise Unavailable("only the first output can be rebuilt")


def _affine(node: Any, edge: Edge) -> tuple[Any, Any]:
    """Weight and bias of a norm whose node keeps the weight only."""
    weight = saved(node, "weight")
    has_bias = node.next_functions[2][0] is not None
    if weight is not None and not has_bias:
        raise Unavailable("its frozen bias is kept nowhere")
    return weight, edge(2) if has_bias else None


@rule("NativeGroupNormBackward0", 8, same_call=False, unsure=_in_16_bits)
def _group_norm(node: Any, output: Output, edge: Edge) -> Captured:
    _first_output(output)
    x, (weight, bias) = saved(node, "input"), _affine(node, edge)
    sizes = node._saved_N, node._saved_C, node._saved_HxW, node._saved_group
    if hasattr(node, "_saved_eps"):  # until PyTorch 2.13

        def function(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
            return torch.native_group_norm(x, weight, bias, *sizes, node._saved_eps)[0]

        return function, (x, weight, bias)
    return partial(_group_norm_formula, sizes), (x, weight, bias, *_statistics(node))


def _group_norm_formula(
    sizes: tuple[int, ...], x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, rstd: Tensor
) -> Tensor:
    batch, channels, _, groups = sizes
    mean, rstd = (
        t.unsqueeze(-1).expand(batch, groups, channels // groups).reshape(batch, channels)
        for t in (mean, rstd)
    )
    scale = rstd if weight is None else rstd * weight
    shift = -scale * mean if bias is None else torch.addcmul(bias.expand_as(mean), -scale, mean)
    shape = (batch, channels, *[1] * (x.dim() - 2))
    return torch.addcmul(shift.view(shape), x, scale.view(shape)).to(x.dtype)


@rule("NativeBatchNormBackward0", 8, unsure=lambda node: not node._saved_training)
def _batch_norm(node: Any, output: Output, edge: Edge) -> Captured:
    _first_output(output)
    eps = node._saved_eps
    x, (weight, bias) = saved(node, "input"), _affine(node, edge)
    if node._saved_training:  # without the running statistics, which the forward has already moved

        def function(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
            return torch.native_batch_norm(x, weight, bias, None, None, True, 0.0, eps)[0]

        return function, (x, weight, bias)
    statistics = saved(node, "running_mean"), saved(node, "running_var")
    if any(type(record) is not tuple for record in statistics):
        raise Unavailable("its running statistics are not kept, or held by other hooks")
    # Copies, of one number a channel: training moves these buffers without counting a new version. It may have done so already,
    # which is why such an output is compared each time.
    mean, variance = (record[0].clone() for record in statistics)

    def frozen(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        return torch.native_batch_norm(x, weight, bias, mean, variance, False, 0.0, eps)[0]

    return frozen, (x, weight, bias)


# Views, and copies, as steps on the way to another node's output


def _view(name: str, function: Callable[[Any, Output], Callable[[Tensor], Tensor]]) -> None:
    @rule(name, 0, view=True)
    def capture(node: Any, output: Output, edge: Edge) -> Captured:
        return function(node, output), (edge(0),)


for _name in ("View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze", "Alias"):
    for _number in (0, 1, 2):
        _view(f"{_name}Backward{_number}", lambda node, output: lambda x: x.reshape(output.shape))
_view("ExpandBackward0", lambda node, output: lambda x: x.expand(output.shape))
_view("TBackward0", lambda node, output: torch.t)
# By contiguous() and reshape() mostly; a saver shows whether it was a clone() that kept another layout.
_view("CloneBackward0", lambda node, output: partial(torch.clone, memory_format=torch.contiguous_format))
_view(
    "TransposeBackward0",
    lambda node, output: partial(
        torch.transpose, dim0=_integer(node._saved_dim0), dim1=_integer(node._saved_dim1)
    ),
)
_view(
    "PermuteBackward0",
    lambda node, output: partial(torch.permute, dims=[_integer(d) for d in node._saved_dims]),
)
_view(
    "SliceBackward0",
    lambda node, output: (
        lambda x: aten.slice(
            x,
            _integer(node._saved_dim),
            _integer(node._saved_start),
            _integer(node._saved_end),
            node._saved_step,
        )
    ),
)
_view(
    "SelectBackward0",
    lambda node, output: partial(
        torch.select, dim=_integer(node._saved_dim), index=_integer(node._saved_index)
    ),
)
_view(
    "SplitBackward0",
    lambda node, output: lambda x: x.split(node._saved_split_size, _integer(node._saved_dim))[output.number],
)
_view(
    "SplitWithSizesBackward0",
    lambda node, output: (
        lambda x: x.split(list(node._saved_split_sizes), _integer(node._saved_dim))[output.number]
    ),
)
_view("UnbindBackward0", lambda node, output: lambda x: x.unbind(_integer(node._saved_dim))[output.number])


@rule("BackwardHookFunctionBackward", 0, view=True, elementwise=True)
def _full_backward_hook(node: Any, output: Output, edge: Edge) -> Captured:
    return torch.ops.aten.alias, (edge(output.number),)


# From a process' own part to a DTensor, as at the layers of tensor parallel models. Where the part is to be the same everywhere,
# run_check, of which the node knows nothing, may have overwritten it with another process' one.
@rule(
    FROM_LOCAL,
    view=True,
    unsure=lambda node: any(p.is_replicate() for p in node.forward_input_placements),
)
def _from_local(node: Any, output: Output, edge: Edge) -> Captured:
    mesh, placements = node.forward_input_device_mesh, node.forward_input_placements

    def function(local: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(local, mesh, placements, run_check=False)

    return function, (edge(0),)


OWN_OUTPUT.update(
    {
        f"{name}Backward0": "result"
        for name in (
            *("Sigmoid", "Tanh", "Relu", "Exp", "Expm1", "Sqrt", "Rsqrt", "Reciprocal"),
            *("Softmax", "SafeSoftmax", "LogSoftmax"),
        )
    },
    PowBackward1="result",
    ScaledDotProductFlashAttentionForCpuBackward0="output",
    ScaledDotProductFlashAttentionBackward0="output",
    ScaledDotProductEfficientAttentionBackward0="output",
    ScaledDotProductCudnnAttentionBackward0="output",
)
