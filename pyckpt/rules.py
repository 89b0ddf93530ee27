"""Recompute rules: how the output of an autograd node is rebuilt from what the node keeps.

A rule is looked up by the node's type. In forward its `capture` names a function and that function's operands: what the node
saved, outputs of the nodes before it, or constants. PyTorch's nodes keep what their own backward needs, under attributes
(``_saved_*``) that are not documented and differ between versions; :func:`saved` reads them without unpacking, which in forward
would rebuild and hold what was meant to be let go.

Rules for PyTorch's nodes are in _rules_torch.py and _rules_matrix.py. For an autograd Function of your own::

    @pyckpt.register_rule(MyFunction)
    def rebuild(ctx, *saved):        # ctx as in backward, saved as ctx.saved_tensors
        return forward_kernel(*saved, ctx.option)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ._records import unpack
from .ops.activation import ActivationFunction
from .ops.attention import AttentionFunction
from .ops.dropout import DropoutFunction
from .ops.norm import NormFunction
from .ops.softmax import SoftmaxFunction

__all__ = ["Output", "Rule", "Unavailable", "register_rule"]

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


class Unavailable(Exception):
    """The output of a node cannot be rebuilt. ``str()`` says why, for explain(); it is rarely asked for, so made only then."""

    def __str__(self) -> str:
        reason, *node = self.args
        return reason.format(*(n.name() for n in node))


class Output(NamedTuple):
    """What is known of a node's output when a rule captures."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    number: int


# edge(index) -> record of the node's input number `index`, for what the node does not keep itself.
Edge = Callable[[int], Any]
# (node, output, edge) -> (function, its operands)
Capture = Callable[[Any, Output, Edge], tuple[Callable[..., Tensor], tuple[Any, ...]]]
# (node, operands) -> floating-point operations
Flops = Callable[[Any, tuple[Any, ...]], int]


@dataclass(frozen=True, eq=False)
class Rule:
    """How to rebuild the outputs of one type of node.

    Attributes:
        name: of the node.
        capture: see the module's docstring. Raises :class:`Unavailable` where the node keeps too little.
        flops: floating-point operations of rebuilding the output, from the node and the operands.
        matrix: a matrix product or convolution: rebuilt only where a policy asks for it.
        linear: a matrix product as linear layers are made of: two factors, the last two operands.
        view: a view or copy of its input.
        pointwise: a cheap function of single elements or pairs: policy "mlp" rebuilds products that only such nodes read.
        elementwise: each element of the output comes from the same element of every operand.
        same_call: the function is the very call that made the output, so that it can be trusted where a check is not possible.
        unsure: whether what the node reads may change without a trace, or its kernel may round otherwise, so that each rebuild
            has to be compared.
        built_in: shipped here: on a difference the output is kept with a warning, where a user's rule raises.
    """

    name: str
    capture: Capture
    flops: Flops
    matrix: bool = False
    linear: bool = False
    pointwise: bool = False
    view: bool = False
    elementwise: bool = False
    same_call: bool = True
    unsure: Callable[[Any], bool] | None = None
    built_in: bool = True


#: The node of DTensor.from_local.
FROM_LOCAL = "_FromTorchTensorBackward"

RULES: dict[str, Rule] = {}  # by name of the node's type
# Nodes that keep their own output: attribute that holds it. A consumer that saves such an output shares its storage with the
# node, so there is nothing to gain from a rule; but other rules may start from it.
OWN_OUTPUT: dict[str, str] = {}
_FUNCTIONS: dict[type, Rule] = {}  # by subclass of torch.autograd.Function
USERS: set[type] = set()  # of these, by :func:`register_rule`


def rule_of(node: Any) -> Rule | None:
    kind = type(node)
    rule = RULES.get(kind.__name__)
    if rule is not None or not _FUNCTIONS:
        return rule
    return _FUNCTIONS.get(getattr(kind, "_forward_cls", None))  # type: ignore[arg-type]


def is_users(node: Any) -> bool:
    return bool(USERS) and getattr(type(node), "_forward_cls", None) in USERS


def saved(node: Any, name: str) -> Any:
    """The record of what `node` keeps as `name`; None if it keeps nothing there."""
    return record(getattr(node, "_raw_saved_" + name))


def record(raw: Any) -> Any:
    """The record behind one of a node's raw saved tensors."""
    if raw.unpack_hook is unpack:
        return raw.data
    value = raw.data
    if value is None:
        return None
    if isinstance(value, Tensor) and value.dim() == 0:
        # A Python number, which passes no hooks, or a tensor from outside.
        try:
            return raw.unpack(), value._version
        except RuntimeError:
            raise Unavailable("what it reads has changed since") from None
    # Packed by others, who may hand it out only once; or before the region began.
    raise Unavailable("its producer ran outside the region, or under hooks of its own")


def records_of(node: Any) -> list[Any]:
    """Of what an autograd Function has saved."""
    if node._sequence_nr() + 1 == torch._C._autograd._get_sequence_nr():
        # The newest node: it is itself that saves, not all of it yet, and its own output is among it.
        raise Unavailable("{} keeps its output itself", node)
    return [record(raw) for raw in node._raw_saved_tensors]


def elements(node: Any) -> int:
    return sum(math.prod(meta.shape) for meta in node._input_metadata)


def register_rule(
    function: type[torch.autograd.Function],
    *,
    inputs: tuple[int, ...] = (),
    flops: Callable[[Any], int] = elements,
) -> Callable[[FunctionT], FunctionT]:
    """Decorator: the decorated function rebuilds the output of an autograd Function inside :func:`pyckpt.recompute`.

    It is called in backward, without grad, as ``rebuild(ctx, *saved, *values)`` and returns the forward's output, bit for bit
    (all of them, as a tuple, if there are several): same shape, dtype and arithmetic in the same order. `ctx` is the Function's
    own; read its attributes, but not ``ctx.saved_tensors``: they are `saved`.

    Args:
        function: the Function. A second registration replaces the first.
        inputs: numbers of those tensor arguments of ``forward`` whose values are needed though the Function does not save them
            (`values`). They must be outputs that can be rebuilt, or leaves, and require grad; else the output is kept.
        flops: cost of rebuilding, from the node; one operation an element of the output by default.

    Raises:
        TypeError: `function` is no subclass of torch.autograd.Function.
    """
    if not (isinstance(function, type) and issubclass(function, torch.autograd.Function)):
        raise TypeError(f"register_rule: expected a subclass of torch.autograd.Function, got {function!r}")

    def register(rebuild: FunctionT) -> FunctionT:
        USERS.add(function)
        count: Flops = lambda node, operands: flops(node)  # noqa: E731
        _register(function, rebuild, inputs=inputs, flops=count, same_call=False, built_in=False)
        return rebuild

    return register


def _register(
    function: type[torch.autograd.Function],
    rebuild: Callable[..., Any],
    *,
    inputs: tuple[int, ...] = (),
    only_if: Callable[[Any], bool] = lambda node: True,
    **options: Any,
) -> None:
    def capture(node: Any, output: Output, edge: Edge) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
        if not only_if(node):
            raise Unavailable("its producer keeps it, or too little to rebuild it")
        operands = [*records_of(node), *map(edge, inputs)]
        if len(node._input_metadata) == 1:
            return partial(rebuild, node), tuple(operands)
        return (lambda *values: rebuild(node, *values)[output.number]), tuple(operands)

    _FUNCTIONS[function] = Rule(function.__name__, capture, **options)


def _register_ours(function: Any, flops: int, **options: Any) -> None:
    _register(
        function,
        function.recompute,
        flops=lambda node, operands: flops * elements(node),
        **options,
    )


_register_ours(ActivationFunction, 20, pointwise=True, only_if=lambda node: not node.saves_output)
_register_ours(NormFunction, 4, only_if=lambda node: node._raw_saved_tensors)
_register_ours(SoftmaxFunction, 20, only_if=lambda node: node.options.seed is not None)
_register_ours(DropoutFunction, 30, pointwise=True, inputs=(0,))


def _kept_output(node: Any, output: Output, edge: Edge) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
    """Of a node that keeps its output itself: that, so that what saves the output or a copy of it keeps nothing."""
    if output.number:
        raise Unavailable("only the first output can be rebuilt")
    return partial(AttentionFunction.recompute, node), (records_of(node)[AttentionFunction.OUTPUT],)


_FUNCTIONS[AttentionFunction] = Rule("AttentionFunction", _kept_output, lambda node, operands: 0)
