"""The repeated blocks of a model, and how they are called."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .. import memory
from ._autocast import Autocast


@dataclass
class Call:
    """How a block was called, with tensors detached; `output` is what it returned, `autocast` what it was called under."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any
    autocast: Autocast


@dataclass
class Found:
    """A block: its path; `call`, equal for blocks that are alike and called alike; where it stands in an ``nn.Sequential``, as
    `container` and `number`; and whether its input requires a gradient, once that is known."""

    path: str
    module: nn.Module
    call: str
    container: str | None = None
    number: int = 0
    differentiable: bool = True

    @property
    def kind(self) -> tuple[str, bool]:
        """Blocks of one kind cost the same."""
        return self.call, self.differentiable


def candidates(model: nn.Module) -> list[str]:
    """Paths of the children of containers that hold several modules of one class, which have children themselves."""
    found: list[str] = []

    def descend(path: str, module: nn.Module) -> None:
        children = list(module.named_children())
        alike = len({type(child) for _, child in children}) == 1 and len(children) > 1
        deep = all(next(child.children(), None) is not None for _, child in children)
        held = isinstance(module, (nn.ModuleList, nn.Sequential))
        if held and alike and deep and all(next(c.parameters(), None) is not None for _, c in children):
            found.extend(f"{path}.{name}" if path else name for name, _ in children)
            return
        for name, child in children:
            descend(f"{path}.{name}" if path else name, child)

    descend("", model)
    return found


def observe(
    model: nn.Module, paths: Sequence[str], run: Callable[[], Any], device: torch.device
) -> tuple[list[Found], dict[str, Call]]:
    """The blocks at `paths` in the order in which one forward calls them, and each different call.

    Raises:
        ValueError: a block is called more than once, or not at all.
    """
    found: list[Found] = []
    calls: dict[str, Call] = {}
    handles = []

    def hook(path: str) -> Callable[..., None]:
        def record(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            signature = [(tuple(t.shape), str(t.dtype)) for t in memory.tensors([args, kwargs])]
            modes = [m.training for m in module.modules()]
            autocast = Autocast.now(device.type)
            call = f"{describe(module)}{modes}{signature}{autocast}"
            refuse_cache(f"plan: block {path!r}", [*args, *kwargs.values()])
            call = hashlib.sha256(call.encode()).hexdigest()[:16]
            container, _, name = path.rpartition(".")
            plain = type(model.get_submodule(container)) is nn.Sequential and len(args) == 1 and not kwargs
            number = int(name) if plain and name.isdigit() else 0
            found.append(Found(path, module, call, container if plain else None, number))
            if call not in calls:
                detached = [with_tensors(value, Tensor.detach) for value in (args, kwargs, output)]
                calls[call] = Call(detached[0], detached[1], detached[2], autocast)

        return record

    for path in paths:
        module = model.get_submodule(path)
        handles.append(module.register_forward_hook(hook(path), with_kwargs=True))
    try:
        with torch.no_grad():
            run()
    finally:
        for handle in handles:
            handle.remove()
    order = [block.path for block in found]
    wrong = [path for path in paths if order.count(path) != 1]
    if wrong:
        raise ValueError(
            f"plan: a forward must call each block once; it calls {wrong[0]!r} {order.count(wrong[0])} times"
        )
    return found, calls


def refuse_cache(what: str, arguments: Sequence[Any]) -> None:
    """Raises ValueError where one is a cache of keys and values, as Hugging Face's decoders make unless they are told not to."""
    if any(hasattr(argument, "get_seq_length") for argument in arguments):
        raise ValueError(
            f"{what} is given a cache of keys and values, and would append to it again whenever it is replayed. Train without: "
            "model.config.use_cache = False"
        )


def describe(module: nn.Module) -> str:
    """What says that two modules in the same mode cost the same."""
    tensors = [
        (name, tuple(t.shape), str(t.dtype), t.requires_grad)
        for named in (module.named_parameters(), module.named_buffers())
        for name, t in named
    ]
    return f"{type(module).__qualname__} {module!r} {tensors}"


def with_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same tuples, lists and dictionaries, with `change` of each tensor in them."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: with_tensors(item, change) for key, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(with_tensors(item, change) for item in value)
    return value
