"""Rules are not trusted: the first use of each kind, and of each place, compares the rebuilt tensor with the one at hand."""

from __future__ import annotations

import contextlib
import sys
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from ._records import Leaf, Outer, Recipe, RecomputeError, Source, regions
from .ops._registry import is_sharded
from .rules import FROM_LOCAL, Unavailable

#: Places of a region that are remembered for a kind of recipe; a forward that has more is checked at fewer.
MAX_PLACES = 1024


class _Uses:
    """Of a kind of recipe."""

    __slots__ = ("count", "places", "wrong")

    def __init__(self) -> None:
        self.count = 0
        self.places: set[int] = set()  # where in a region it gave the right bits: number of the recipe
        self.wrong = False  # it has once not given the bits of the tensor that it replaces


uses: dict[tuple[Any, ...], _Uses] = {}


def check_bits(source: Source, whole: Tensor, verify: bool) -> None:
    """Raises Unavailable unless the source is known, or now seen, to give the bits of `whole`.

    Compared are the first use of each kind, when weights may be ones and zeros, and the 2nd, 4th, 8th...; and the first at each
    place of a region: what a model does behind autograd's back (to ``h.data``), it mostly does in each step, in one layer.
    """
    operands = tuple(map(_kind, source.operands))
    kind = (source.rule, whole.dtype, whole.shape[-1:], whole.is_contiguous(), whole.device, operands)
    known = uses.get(kind)
    if known is None:
        known = uses[kind] = _Uses()
    place = regions.place
    regions.place = place + 1
    new = place not in known.places and len(known.places) < MAX_PLACES
    if new or verify or source.unsure or not known.count & (known.count - 1):
        same = not known.wrong and rebuilds_the_bits(source, whole)
        if same is None:
            raise Unavailable("what it reads has changed since, or it was rounded otherwise")
        if not same:
            known.wrong = True
        elif not whole.numel():
            return  # which proves nothing
        elif new:
            known.places.add(place)
    if known.wrong:
        raise Unavailable("its rule does not give the same bits here")
    known.count += 1


def _kind(record: Any) -> Any:
    """Of an operand. What no node saves is only checked with what reads it, so that all that it is made of counts."""
    if isinstance(record, (tuple, Leaf)):
        tensor = record.tensor if isinstance(record, Leaf) else record[0]
        return tensor.dtype, tensor.layout, tensor.layout is torch.strided and tensor.is_contiguous()
    if type(record) is not Recipe:
        return type(record)
    source = record.source
    return source.rule, source.dtype, () if source.saved else tuple(map(_kind, source.operands))


def rebuilds_the_bits(source: Source, whole: Tensor) -> bool | None:
    """Whether the source gives `whole`; None: it does not, perhaps because what it reads has changed since. A built-in rule that
    does not is warned of; a user's raises RecomputeError."""
    rule = source.rule
    try:
        rebuilt = _rebuilt(source)
    except torch.OutOfMemoryError:  # which says nothing of the rule
        raise
    except Exception as error:
        if source.unsure and isinstance(error, RecomputeError):
            return None
        if rule.built_in:
            _warn_of_rule(source, whole, f"failed ({error})")
            return False
        raise RecomputeError(
            f"the recompute rule of {_place(source)} raised {type(error).__name__}: {error}. Correct the rule, or keep this "
            "node's output by a policy"
        ) from error
    made = f"{tuple(whole.shape)}, {whole.dtype}"
    if not isinstance(rebuilt, Tensor):
        problem = f"returned {type(rebuilt).__name__} where the forward made {made}"
    elif rebuilt.shape != whole.shape or rebuilt.dtype is not whole.dtype:
        problem = f"returned {tuple(rebuilt.shape)}, {rebuilt.dtype} where the forward made {made}"
    elif _same_bits(rebuilt, whole):
        return True
    elif source.unsure:
        return None
    else:
        problem = f"does not give the bits that the forward made ({made})"
    if rule.built_in:
        _warn_of_rule(source, whole, problem)
        return False
    raise RecomputeError(
        f"the recompute rule of {_place(source)} {problem}. It must return the forward's output, computed by the same operations "
        "in the same order"
    )


def _without_modes() -> contextlib.AbstractContextManager[None]:
    """Hides what runs within from dispatch modes: a selective checkpoint counts operations, and would count these."""
    return _disable_current_modes() if torch._C._len_torch_dispatch_stack() else contextlib.nullcontext()


def _rebuilt(source: Source) -> Any:
    with _without_modes():
        return source.get()


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """NaN equals NaN here, and 0 equals -0. Of DTensors this process' parts."""
    if is_sharded(a) and is_sharded(b):
        return a.placements == b.placements and _same_bits(a.to_local(), b.to_local())  # type: ignore[attr-defined]
    with torch.no_grad(), _without_modes():
        return a.device == b.device and (
            torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all())
        )


def check_sharding(source: Source, whole: Any) -> None:
    """A DTensor is rebuilt where that needs no communication: by rules of single elements, from operands laid out alike, or
    from this process' own part alone."""
    waiting, seen = [source], {source.key}
    layouts = [(whole.device_mesh, whole.placements)]
    while waiting:
        source = waiting.pop()
        if source.rule.name == FROM_LOCAL:  # what comes before is no DTensor
            layouts.append((source.node.forward_input_device_mesh, source.node.forward_input_placements))
            continue
        if not source.rule.elementwise:
            raise Unavailable("a DTensor that is no function of single elements")
        for record in source.operands:
            if type(record) is Outer:
                raise Unavailable("a DTensor under other saved-tensor hooks")
            if type(record) is tuple and (record[0].dim() or is_sharded(record[0])):  # else a number
                layouts.append(_layout(record[0]))
            elif type(record) is Leaf:
                layouts.append(_layout(record.tensor))
            elif type(record) is Recipe and record.source.key not in seen:
                seen.add(record.source.key)
                waiting.append(record.source)
    if any(layout != layouts[0] for layout in layouts):
        raise Unavailable("a DTensor made of differently placed ones")
    if any(placement.is_partial() for placement in whole.placements):
        raise Unavailable("a DTensor that holds partial sums")


def _layout(tensor: Any) -> Any:
    return (tensor.device_mesh, tensor.placements) if is_sharded(tensor) else None


def _place(source: Source) -> str:
    """Node and module, the latter from the stack of the forward that is running."""
    frame = sys._getframe()
    modules = []
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and frame.f_code.co_name == "forward":
            modules.append(owner)
        frame = frame.f_back  # type: ignore[assignment]
    name = source.node.name()
    if not modules:
        return name
    path = next((path for path, module in modules[-1].named_modules() if module is modules[0]), "")
    return f"{name} in {type(modules[0]).__name__}{f' ({path})' if path else ''}"


def _warn_of_rule(source: Source, whole: Tensor, problem: str) -> None:
    warn_once(
        f"pyckpt.recompute: the rule of {_place(source)} {problem}; such outputs on {whole.device} are kept instead, and "
        "pyckpt.explain(model, ...) lists them"
    )


warned: set[str] = set()


def warn_once(message: str) -> None:
    if message not in warned:
        warned.add(message)
        warnings.warn(message, stacklevel=_user_level())


def _user_level() -> int:
    """Levels up to the first frame outside this package and PyTorch."""
    level, frame = 2, sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in (
        "pyckpt",
        "torch",
    ):
        level, frame = level + 1, frame.f_back
    return level
