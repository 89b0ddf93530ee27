"""Whole segments of a forward that backward runs again: torch.utils.checkpoint with the engine inside.

A segment keeps its input only. While backward replays it, the engine keeps of each block the cheap set (20 instead of 32 sbh), so
that segments can be longer: N blocks in segments of k peak at ``N / k`` inputs and ``k`` cheap sets, which is least at
``k = sqrt(N input / set)``. Chen et al. 2016, https://arxiv.org/abs/1604.06174, is the case of one input a block.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from .. import memory
from .._checks import warn_once
from ..engine import enter, leave
from ..explanation import undisturbed
from ._autocast import Autocast
from ._blocks import refuse_cache, with_tensors
from ._replay import modules_in, once

__all__ = ["checkpoint", "checkpoint_sequential", "checkpoint_wrapper", "unwrap"]

ModuleT = TypeVar("ModuleT", bound=nn.Module)


@contextmanager
def quiet_region(level: str = "pointwise") -> Iterator[None]:
    """A region that does not mind if there is nothing to rebuild."""
    owner = object()
    enter(level, False, owner)
    try:
        yield
    finally:
        leave(owner, failed=True)


def checkpoint(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``fn(*args, **kwargs)``, of which only the arguments are kept; backward runs it again.

    As :func:`torch.utils.checkpoint.checkpoint` (the kind that is not reentrant) with the recompute engine inside: nested, under
    autocast, with dropout (random numbers are replayed), with keyword arguments of any name, and None. Replays stop at the last
    tensor that backward needs, which with this package's dropout is before the product in front of it. Statistics of norms
    (BatchNorm, InstanceNorm) in `fn` are moved once, if it is a module, a method of one, or a function that holds it in its
    closure.

    Args:
        fn: runs a part of a forward; the same each time for the same arguments.
        args, kwargs: of `fn`, as they are.

    Warns:
        UserWarning: once, where no result requires a gradient: such a part needs no checkpoint, or cuts the graph.
    """
    if torch.compiler.is_compiling():
        return torch_checkpoint(lambda *a: fn(*a, **kwargs), *args, use_reentrant=False)
    return _checkpoint(fn, (fn,), args, kwargs)


def _checkpoint(
    fn: Callable[..., Any], holders: Sequence[Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    names, count = tuple(kwargs), len(args)

    def run(*values: Any) -> Any:
        with quiet_region():
            return fn(*values[:count], **dict(zip(names, values[count:], strict=True)))

    # Keyword arguments as positions: their names are fn's alone, and torch looks for devices among positions.
    values = (*args, *kwargs.values())
    if not torch.is_grad_enabled():
        return fn(*args, **kwargs)
    refuse_cache("pyckpt.checkpoint: what is to be checkpointed", values)
    result = torch_checkpoint(once(run, modules_in(holders)), *values, use_reentrant=False)
    if not any(t.requires_grad for t in memory.tensors(result)):
        warn_once(
            f"pyckpt.checkpoint: no result of {getattr(fn, '__qualname__', type(fn).__name__)} requires a gradient, so that "
            "backward will not reach what it reads: it is cut off inside (detach, no_grad), or needs no checkpoint"
        )
    return result


class Wrapped:
    """First base of the classes of wrapped modules; the last is the module's own class, under whose name they go."""

    _pyckpt_own: type[nn.Module]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        inner = self._pyckpt_own.forward.__get__(self)
        return self.around(inner, *args, **kwargs) if torch.is_grad_enabled() else inner(*args, **kwargs)

    def around(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def __reduce_ex__(self, protocol: Any) -> Any:
        # copy and pickle find the class by the own one.
        made = object.__new__(self._pyckpt_own)
        made.__dict__ = self.__dict__
        reduced: Any = made.__reduce_ex__(protocol)
        function, arguments, *rest = reduced
        kind = next(kind for kind in _KINDS if isinstance(self, kind))
        return _again, (_KINDS.index(kind), function, *arguments), *rest


class _Checkpointed(Wrapped):
    def around(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return checkpoint(inner, *args, **kwargs)


class Offloaded(Wrapped):
    """Keeps on the host what the engine cannot rebuild."""

    def around(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return offload(inner, *args, **kwargs)


class Segmented(Wrapped):
    """Of ``nn.Sequential``: `_pyckpt_segments` maps the number of a segment's first block to its length."""

    _pyckpt_segments: dict[int, int]

    def around(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        chain: list[Any] = list(self._modules.values())  # type: ignore[attr-defined]
        (x,) = args
        start = 0
        while start < len(chain):
            length = self._pyckpt_segments.get(start, 0)
            part = chain[start : start + max(length, 1)]
            x = segment(part, x) if length else _run(part, x)
            start += max(length, 1)
        return x


_KINDS = (_Checkpointed, Offloaded, Segmented)
_classes: dict[type, weakref.WeakKeyDictionary[type, type]] = {
    kind: weakref.WeakKeyDictionary() for kind in _KINDS
}


def _again(kind: int, function: Callable[..., nn.Module], *arguments: Any) -> nn.Module:
    return wrap(function(*arguments), _KINDS[kind])


def wrap(module: ModuleT, kind: type[Wrapped]) -> ModuleT:
    """Give the module a class of this kind, a subclass of its own. Raises TypeError where that would not reach its forward."""
    if "forward" in vars(module) or isinstance(module, (Wrapped, torch.jit.ScriptModule)):
        raise TypeError(
            f"pyckpt: the forward of this {type(module).__name__} is not its class's; call pyckpt.checkpoint(module, ...) where "
            "it is used instead"
        )
    own: Any = type(module)
    made = _classes[kind].get(own)
    if made is None:
        names = {name: getattr(own, name) for name in ("__module__", "__qualname__", "__doc__")}
        made = type(own)(own.__name__, (kind, own), {"_pyckpt_own": own, **names})
        _classes[kind][own] = made
    module.__class__ = made
    return module


def checkpoint_wrapper(module: ModuleT) -> ModuleT:
    """Make `module` checkpoint its forward, in place; returns it.

    The module's class becomes a subclass of its own, of the same name. Parameters, their names, state_dict keys, hooks and
    ``isinstance`` are as before, and deepcopy, pickle, DataParallel and FSDP take it. :func:`unwrap` undoes it.

    Raises:
        TypeError: no module; or one whose forward is not its class's (TorchScript, a patch on the instance).
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"checkpoint_wrapper: expected a torch.nn.Module, got {type(module).__name__}")
    return module if isinstance(module, Wrapped) else wrap(module, _Checkpointed)


def unwrap(module: ModuleT) -> ModuleT:
    """Undo :func:`checkpoint_wrapper`, and what a plan made of this module (offloading, segments); returns the module."""
    if isinstance(module, Wrapped):
        vars(module).pop("_pyckpt_segments", None)
        module.__class__ = module._pyckpt_own
    return module


def checkpoint_sequential(
    blocks: nn.Module | Sequence[Callable[..., Any]], *args: Any, segments: int | str = "auto", **kwargs: Any
) -> Any:
    """Run blocks one after another, in segments that are checkpointed; the result is the last one's.

    Each block is called as ``block(x, *args[1:], **kwargs)``, x being what the block before returned, and ``args[0]`` for the
    first. The last segment is not checkpointed: its backward comes first, and would replay at once what forward has just done.

    Args:
        blocks: ``nn.Sequential``, ``nn.ModuleList``, or a sequence of modules or functions.
        args, kwargs: of every block.
        segments: how many; more than there are blocks are one a block. None begins with a block that works in place
            (``nn.ReLU(inplace=True)``): it is the last of the one before. "auto": segments of ``sqrt(N input / set)`` blocks, N
            being the blocks, `input` the bytes of what a segment keeps, and `set` those that a block keeps for backward under
            the engine. Measured is the first block that keeps anything of floating-point input, at the first call with inputs of
            a shape (its forward, twice; random numbers and buffers are left as they were). Blocks before it (an embedding, a
            frozen body) are run as they are. Where that cannot be measured, segments are of ``sqrt(N)`` blocks.

    Warns:
        UserWarning: once, where "auto" cannot measure: no counter of memory (:func:`pyckpt.memory.allocated_bytes`), or no tensor
            that is found in what a block takes or returns.

    Raises:
        TypeError: no blocks, or no positional argument.
        ValueError: `segments` is neither "auto" nor positive.
    """
    chain: list[Any] = list(blocks.children() if isinstance(blocks, nn.Module) else blocks)
    if not chain or not args:
        raise TypeError("checkpoint_sequential: needs at least one block and one positional argument")
    if "segment" in kwargs:
        raise TypeError("checkpoint_sequential: got 'segment'; the number of segments is `segments`")
    if segments != "auto" and not (isinstance(segments, int) and segments > 0):
        raise ValueError(
            f"checkpoint_sequential: segments must be 'auto' or a positive number, got {segments!r}"
        )
    x, rest = args[0], args[1:]
    count = len(chain)
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        length = count
    elif segments == "auto":
        length = 0
        while chain and not (length := segment_length(chain[0], len(chain), (x, *rest), kwargs)):
            with quiet_region():
                x = chain.pop(0)(x, *rest, **kwargs)
        count = len(chain)
    else:
        length = math.ceil(count / int(segments))
    start = 0
    while start < count:
        end = start + length
        while end < count and _works_in_place(chain[end]):  # it would change what its segment keeps
            end += 1
        if end >= count:
            with quiet_region():
                x = _run(chain[start:], x, *rest, **kwargs)
        else:
            x = segment(chain[start:end], x, *rest, **kwargs)
        start = end
    return x


def _works_in_place(block: Any) -> bool:
    if isinstance(block, nn.Sequential) and len(block):
        return _works_in_place(block[0])
    return getattr(block, "inplace", False) is True


def segment(part: Sequence[Callable[..., Any]], *args: Any, **kwargs: Any) -> Any:
    """Blocks in a row as one checkpoint."""
    return _checkpoint(lambda *a, **k: _run(part, *a, **k), part, args, kwargs)


def offload(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``fn(*args, **kwargs)`` with what the engine cannot rebuild kept on the host."""
    device = next((t.device.type for t in memory.tensors([args, kwargs])), "cpu")
    with save_on_cpu(pin_memory=device == "cuda"), quiet_region():
        return fn(*args, **kwargs)


def _run(part: Sequence[Callable[..., Any]], x: Any, *rest: Any, **kwargs: Any) -> Any:
    for block in part:
        x = block(x, *rest, **kwargs)
    return x


# Of a block: signature of its arguments -> bytes that it keeps under the engine, None where they cannot be counted.
_kept: weakref.WeakKeyDictionary[Any, dict[Any, int | None]] = weakref.WeakKeyDictionary()


def segment_length(block: Callable[..., Any], count: int, args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    """Blocks a segment such that `count` of them, all like this one, peak lowest; 0: this one keeps next to nothing."""
    inputs = list(memory.tensors(args[0]))
    if inputs and not any(t.is_floating_point() or t.is_complex() for t in inputs):
        return 0
    size = sum(t.nbytes for t in inputs)
    kept = _bytes_kept(block, inputs[0].device, args, kwargs) if inputs else None
    if kept is None:
        warn_once(
            "checkpoint_sequential: what a block keeps cannot be counted here, so that segments are of sqrt(N) blocks; give "
            "their number as `segments`"
        )
        size = kept = 1
    if 8 * kept < size:
        return 0
    # Between the roots of the two neighbours the whole number that is best for (inputs kept) + (sets replayed).
    root = math.sqrt(count * size / max(kept, 1))
    lengths = {min(max(n, 1), count) for n in (math.floor(root), math.ceil(root))}
    return min(lengths, key=lambda n: math.ceil(count / n) * size + n * kept)


def _bytes_kept(
    block: Callable[..., Any], device: torch.device, args: Sequence[Any], kwargs: dict[str, Any]
) -> int | None:
    roots = nn.ModuleList(modules_in(block))
    signature: tuple[Any, ...] = tuple(
        (t.shape, t.dtype, t.device, t.requires_grad) for t in memory.tensors([args, kwargs])
    )
    autocast = Autocast.now(device.type)
    trained = any(p.requires_grad for p in roots.parameters())
    signature += (autocast, getattr(block, "training", True), trained)
    try:
        known = _kept.setdefault(block, {})
    except TypeError:  # takes no weak reference
        known = {}
    if signature not in known:

        def measured() -> int | None:
            with autocast.forward(), undisturbed(roots):
                try:
                    memory.allocated_bytes(device)
                except RuntimeError:  # it has no counter
                    return None
                results = list(memory.tensors(forward()))
                if all(t.grad_fn is None for t in results):
                    return 0 if results else None
                del results
                return memory.saved_bytes(lambda: forward(True), device=device, warmup=0)

        def forward(differentiable: bool = False) -> Any:
            """As after a block; its input counts, as that of every block of a replayed segment does."""

            def fresh(t: Tensor) -> Tensor:
                if t.is_floating_point() or t.is_complex():
                    return t.detach().clone().requires_grad_(differentiable or t.requires_grad)
                return t

            inputs = [with_tensors(a, fresh) for a in args]
            with quiet_region():
                return block(*inputs, **kwargs)

        # In a thread of its own: hooks, dispatch modes and regions that are active here do not reach there.
        with ThreadPoolExecutor(1) as thread:
            known[signature] = thread.submit(measured).result()
    return known[signature]
