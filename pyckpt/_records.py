"""What autograd holds in place of the tensors that a forward saved, and how backward gets them back.

A record is one of

- ``(tensor, version)``: kept. PyTorch does not check versions of tensors that pass through hooks, so we do;
- :class:`Recipe`: rebuilt by a :class:`Source`, from the records of what the producing node itself saved;
- :class:`Leaf`: a parameter or input that the producing node read without saving it; only sources hold these;
- :class:`Outer`: kept by the saved-tensor hooks below ours (a checkpoint, an offloader), which PyTorch would not call.

References point upstream only, from a saver to the source and from there to the producer's records. Nothing points back, so a
dropped graph is freed without the garbage collector, and a source still works after a backward through another branch has
released its producer.
"""

from __future__ import annotations

import re
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_task_id = torch._C._current_graph_task_id
_keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph


class RecomputeError(RuntimeError):
    """A tensor cannot be rebuilt in backward, or a recompute rule is wrong."""


class _Regions(threading.local):
    """This thread's active recompute regions, innermost last, each with what began it."""

    def __init__(self) -> None:
        self.stack: list[tuple[Any, Any]] = []
        self.suspended = False  # explain() compares with a forward without any
        self.place = 0  # recipes that the outermost region has made


regions = _Regions()

#: Active monitors (monitoring.py).
watchers: list[Any] = []


class Source:
    """How to rebuild one output of a node, and in backward the rebuilt tensor for as long as savers need it."""

    __slots__ = (
        "__weakref__", "chain", "dtype", "function", "held", "key", "needs_check", "node", "operands", "outer", "products",
        "readers", "rule", "saved", "shape", "stream", "stride", "unsure", "value", "waiting",
    )  # fmt: skip

    # (id of node, number of output) -> source, so that all savers of one tensor share it. A source holds its node, which keeps
    # the id from being given to another.
    known: dict[tuple[int, int], weakref.ref[Source]] = {}  # noqa: RUF012

    def __init__(
        self, node: Any, output: Any, rule: Any, function: Callable[..., Tensor], operands: tuple[Any, ...]
    ):
        self.node = node
        self.shape: tuple[int, ...] = output.shape
        self.dtype: torch.dtype = output.dtype
        self.rule = rule
        self.function = function
        self.operands = operands  # records, or constants
        self.stride: tuple[int, ...] | None = None  # of the original, once a saver has shown it
        self.saved = False  # whether a node saves it; what only other sources read is not cached
        self.value: Tensor | None = None
        self.stream: Any = None
        # A matrix product's record as it is, while not all of the `waiting` records of it are known to be a pointwise node's.
        self.held: Any = None
        self.waiting = 0
        self.key = (id(node), output.number)
        Source.known[self.key] = weakref.ref(self)
        self.readers = 0  # other sources
        self.chain = 1  # of sources, each read by the next
        # Unpack functions of the hooks that hold operands (an Outer's), which must not be asked before backward.
        self.outer: frozenset[Any] = frozenset()
        # Whether only its bits can tell that it is right: else it is the very call that was made, of what was kept.
        self.needs_check = not rule.same_call
        # Whether it may read what has changed since the forward read it.
        self.unsure = rule.unsure is not None and rule.unsure(node)
        # Keys of the matrix products that rebuilding it takes.
        self.products: frozenset[Any] = frozenset((self.key,)) if rule.matrix else frozenset()
        for record in operands:
            kind = type(record)
            if kind is Recipe:
                source = record.source
                source.readers += 1
                if source.products:
                    self.products |= source.products
                self.chain = max(self.chain, source.chain + 1)
                if source.outer:
                    self.outer |= source.outer
                if not source.saved:  # else it has been checked itself
                    self.needs_check = self.needs_check or source.needs_check
                    self.unsure = self.unsure or source.unsure
            elif kind is Outer:
                self.outer |= {record.unpack}
            elif kind is Leaf:
                self.needs_check = True
                self.unsure = self.unsure or not record.as_read

    def __del__(self, forget: Callable[..., Any] = known.pop) -> None:
        forget(self.key, None)

    @staticmethod
    def find(node: Any, number: int) -> Source | None:
        reference = Source.known.get((id(node), number))
        return None if reference is None else reference()

    def get(self, memo: dict[Any, Tensor] | None = None) -> Tensor:
        """The tensor, rebuilt at the first call of a backward. Two threads may both rebuild it, to the same bits. What several
        sources read on the way, and no node saves, is rebuilt once and held in `memo`."""
        held = self.held
        if held is not None:
            return held.lend() if type(held) is Outer else unpack(held)
        value = self.value
        if value is not None:
            return _on_this_stream(value, self.stream)
        if memo is None:
            memo = {}
        elif self.key in memo:
            return memo[self.key]
        operands = [self._operand(record, memo) for record in self.operands]
        start = time.perf_counter() if watchers else 0.0
        value = _quietly(self.function, operands)
        # Not of the first use's check, which is in forward.
        for watcher in watchers if watchers and self.saved and _task_id() >= 0 else ():
            watcher.rebuilt(self, value.nbytes, time.perf_counter() - start)
        if self.rule.built_in and value.dtype is not self.dtype:
            value = value.to(self.dtype)  # computed in place, in a tensor narrower than an operand
        stride = self.stride
        if stride is not None and value.stride() != stride:
            value = value.new_empty_strided(value.shape, stride).copy_(value)
        if not self.saved and not (self.rule.matrix and self.readers > 1):
            if self.readers > 1:
                memo[self.key] = value
        elif _drop_after_backward(self):
            self.stream = _mark(value)
            self.value = value
        return value

    def _operand(self, record: Any, memo: dict[Any, Tensor]) -> Any:
        kind = type(record)
        if kind is Recipe:
            return record.get(memo)
        if kind is Outer:
            return record.lend()
        if kind is Leaf:
            if _storage(record.tensor) != record.storage:
                raise RecomputeError(
                    f"a {_described(record.tensor)} was given other data after {self.node.name()} had read it, and backward "
                    "needs it as it was to rebuild that node's output. Change it after backward, or let the output be kept: "
                    "convert(model, recompute=False), or a policy that saves this node"
                )
            record = record.tensor, record.version
        elif kind is not tuple:
            return record
        tensor, version = record
        if tensor._version != version:
            raise RecomputeError(
                f"a {_described(tensor)} was changed in place after {self.node.name()} had read it (version {tensor._version}, "
                f"expected {version}), and backward needs it as it was to rebuild that node's output. Change a copy, or change "
                "it after backward; or let the output be kept: convert(model, recompute=False), or a policy that saves this node"
            )
        if tensor.is_leaf and is_freed(tensor):
            raise RecomputeError(
                f"the output of {self.node.name()} cannot be rebuilt: the storage of a {_described(tensor)} that it reads has "
                "been freed (a parameter resharded by FSDP?). Let the output be kept, by a policy that saves this node"
            )
        return tensor

    def drop(self) -> None:
        self.value = self.stream = None

    def flops(self) -> int:
        """Of one rebuild, with those of nested sources that are not cached."""
        total, waiting, seen = 0, [self], {self.key}
        while waiting:
            source = waiting.pop()
            total += int(source.rule.flops(source.node, source.operands))
            for record in source.operands:
                if type(record) is Recipe and not record.source.saved and record.source.key not in seen:
                    seen.add(record.source.key)
                    waiting.append(record.source)
        return total


def _mark(value: Tensor) -> Any:
    """The stream that made a value which others may ask for, and the event that says when; None on a CPU."""
    if not value.is_cuda:
        return None
    stream = torch.cuda.current_stream(value.device)
    return stream, stream.record_event()


def _on_this_stream(value: Tensor, mark: Any) -> Tensor:
    if mark is not None:
        (stream, made), current = mark, torch.cuda.current_stream(value.device)
        if current != stream:
            current.wait_event(made)
            value.record_stream(current)
    return value


class Recipe:
    """The record of one saved tensor that is rebuilt: a source, and which view of its result was saved."""

    __slots__ = ("awaits", "geometry", "original", "source")

    def __init__(self, source: Source, original: Tensor | None, geometry: Any):
        self.source = source
        self.awaits = False  # of a product that is held: it is not known whose this record is
        self.geometry = geometry  # (shape, stride, offset) within the source's tensor; None: all of it
        # To change a tensor after it was saved is an error in PyTorch, and no less one here: the rebuilt tensor would be right,
        # but the same code without the engine would raise. Only unchanged tensors (version 0) are rebuilt.
        self.original = None if original is None else weakref.ref(original)

    def get(self, memo: dict[Any, Tensor] | None = None) -> Tensor:
        original = None if self.original is None else self.original()
        if original is not None and original._version:
            raise RuntimeError(_modified(original, 0))
        value = self.source.get(memo)
        if self.geometry is None:
            return value
        shape, stride, offset = self.geometry
        return value.as_strided(shape, stride, value.storage_offset() + offset)


class Leaf:
    """The record of a parameter or input that a node read without saving it."""

    __slots__ = ("as_read", "storage", "tensor", "version")

    def __init__(self, tensor: Tensor, as_read: bool):
        self.tensor = tensor
        self.version = tensor._version
        # The bytes of FSDP's parameters come and go in one storage; assigning .data brings another.
        self.storage = _storage(tensor)
        self.as_read = as_read  # whether it is known to be as that node saw it
        key = id(tensor)
        if key not in _leaves:
            _leaves[key] = weakref.ref(tensor, lambda _: _leaves.pop(key, None))


_leaves: dict[int, weakref.ref[Tensor]] = {}


def leaf_versions() -> dict[int, int]:
    """By id, of leaves that a recipe reads or has read."""
    # Of a copy: a garbage collection may take some away meanwhile, which a list of pairs would be no safeguard against.
    return {key: leaf._version for key, weak in _leaves.copy().items() if (leaf := weak()) is not None}


class Outer:
    """A tensor packed by the hooks below ours. They are asked for it once a backward, whoever needs it first: a checkpoint gives
    each tensor once only."""

    __slots__ = ("__weakref__", "lock", "packed", "shape", "stream", "unpack", "value")

    def __init__(self, shape: tuple[int, ...], packed: Any, unpack: Callable[[Any], Tensor]):
        self.shape = shape
        self.packed = packed
        self.unpack = unpack
        self.lock = threading.Lock()
        self.value: Tensor | None = None
        self.stream: Any = None

    def lend(self) -> Tensor:
        """To a source; the node that saved the tensor will want it too."""
        with self.lock:
            value = self._held()
            if value is None:
                value = self.unpack(self.packed)
                if _drop_after_backward(self):
                    self.stream = _mark(value)
                    self.value = value
            return value

    def take(self) -> Tensor:
        """To the node that saved the tensor, which runs after all readers of its output: the last to ask."""
        with self.lock:
            value = self._held()
            self.drop()
            return self.unpack(self.packed) if value is None else value

    def _held(self) -> Tensor | None:
        return None if self.value is None else _on_this_stream(self.value, self.stream)

    def drop(self) -> None:
        self.value = self.stream = None


def unpack(record: Any) -> Tensor:
    """The unpack hook of every region: a record says all that is needed."""
    kind = type(record)
    if kind is tuple:
        tensor, version = record
        if tensor._version != version:
            raise RuntimeError(_modified(tensor, version))
        return tensor
    return record.get() if kind is Recipe else record.take()


def shape_of(record: Any) -> tuple[int, ...]:
    if type(record) is Recipe:
        return record.source.shape if record.geometry is None else record.geometry[0]
    if type(record) is Leaf:
        return record.tensor.shape
    return record.shape if type(record) is Outer else record[0].shape


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else 0


def is_freed(tensor: Tensor) -> bool:
    """Whether the tensor has lost its storage, as FSDP's resharded parameters have."""
    dense = tensor.layout is torch.strided and not tensor.is_nested
    return dense and tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0


def _described(tensor: Tensor) -> str:
    kind = "parameter" if tensor.is_leaf and tensor.requires_grad else "tensor"
    return f"{kind} of shape {tuple(tensor.shape)}, {str(tensor.dtype).removeprefix('torch.')}"


def _modified(tensor: Tensor, version: int) -> str:
    """PyTorch's own text."""
    node = tensor.grad_fn
    name = "" if node is None else re.sub(r"Backward\d*$", "", node.name())
    made = "" if node is None else f", which is output {tensor.output_nr} of {name},"
    return (
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{tensor.type()} {list(tensor.shape)}]{made} is at version {tensor._version}; expected version {version} instead. "
        "Hint: enable anomaly detection to find the operation that failed to compute its gradient, with "
        "torch.autograd.set_detect_anomaly(True, check_nan=False)."
    )


def _quietly(function: Callable[..., Tensor], operands: list[Any]) -> Tensor:
    """Without autograd, and in the operands' dtypes whatever autocast would say: what was saved has been cast already."""
    if not torch.is_grad_enabled() and not torch._C._is_any_autocast_enabled():
        return function(*operands)
    device = next((a.device.type for a in operands if isinstance(a, Tensor)), "cpu")
    with torch.no_grad(), torch.autocast(device, enabled=False):
        return function(*operands)


# Rebuilt tensors die with their savers. Where a saver outlives the backward (retain_graph, the gradient of a part of the graph),
# they are dropped at the end of the backward, and under retain_graph as soon as the producer has run.
_cached: dict[int, list[weakref.ref[Any]]] = {}


class _EndOfBackward:
    """Called at the end of a backward; of one that raises, the engine only lets go of it."""

    __slots__ = ("task",)

    def __init__(self, task: int):
        self.task = task

    def __call__(self) -> None:
        for reference in _cached.pop(self.task, ()):
            holder = reference()
            if holder is not None:
                holder.drop()

    __del__ = __call__


def _drop_after_backward(holder: Source | Outer) -> bool:
    """Whether the holder may keep its value until then: not outside of a backward, nor in a compiled one."""
    task = _task_id()
    if task < 0 or torch.compiler.is_compiling():
        return False
    holders = _cached.get(task)
    if holders is None:
        torch.autograd.Variable._execution_engine.queue_callback(_EndOfBackward(task))
        holders = _cached[task] = []
    holders.append(weakref.ref(holder))
    if type(holder) is Source and _keeps_graph():
        reference = weakref.ref(holder)

        def producer_ran(*_: Any) -> None:
            handle.remove()
            source = reference()
            if source is not None:
                source.drop()

        handle = holder.node.register_hook(producer_ran)
    return True
