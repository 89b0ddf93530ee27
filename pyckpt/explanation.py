"""What a model keeps for backward, module by module, with and without the recompute engine."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules import module as torch_module

from . import memory
from ._levels import check_policy
from ._records import Recipe, regions
from .engine import Policy, Region, enter, leave
from .rules import Unavailable

__all__ = ["Explanation", "ModuleBytes", "explain"]


@dataclass
class ModuleBytes:
    """What autograd saves while one module's own code runs (its submodules have rows of their own).

    Attributes:
        path: as in ``named_modules``; "" for the model itself.
        type: class of the module.
        before: bytes kept for backward without the engine.
        after: bytes kept with it.
        kept: ``(shape, dtype, bytes, reason)`` of each tensor that the engine keeps.
    """

    path: str
    type: str
    before: int = 0
    after: int = 0
    kept: list[tuple[tuple[int, ...], str, int, str]] = field(default_factory=list)


@dataclass
class Explanation:
    """The result of :func:`explain`; ``str()`` is a table.

    Attributes:
        modules: in the order in which they first save something. A storage counts once, where it is saved first.
        parameters: bytes of parameters, buffers and inputs that are saved: alive anyway, and not counted above.
        measured_before, measured_after: what the allocator holds between forward and backward, in bytes; None where it cannot be
            counted (see :func:`pyckpt.memory.saved_bytes`). The figures to trust: a count of what passes through autograd's hooks
            does not see what else keeps a tensor alive.
    """

    modules: list[ModuleBytes]
    parameters: int
    measured_before: int | None
    measured_after: int | None

    @property
    def before(self) -> int:
        return sum(m.before for m in self.modules)

    @property
    def after(self) -> int:
        return sum(m.after for m in self.modules)

    def reasons(self) -> dict[str, int]:
        """Bytes that the engine keeps, by reason, the largest first."""
        total: dict[str, int] = {}
        for module in self.modules:
            for *_, size, reason in module.kept:
                total[reason] = total.get(reason, 0) + size
        return dict(sorted(total.items(), key=lambda item: -item[1]))

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "before": self.before, "after": self.after, "reasons": self.reasons()}

    def to_json(self, **options: Any) -> str:
        return json.dumps(self.to_dict(), **options)

    def _rows(self) -> list[tuple[str, str, str, str]]:
        rows = [(m.path or "(model)", m.type, _mib(m.before), _mib(m.after)) for m in self.modules]
        rows.append(("sum", "", _mib(self.before), _mib(self.after)))
        if self.measured_before is not None and self.measured_after is not None:
            rows.append(
                ("by the allocator's count", "", _mib(self.measured_before), _mib(self.measured_after))
            )
        return rows

    def __str__(self) -> str:
        header = ("module", "class", "kept (MiB)", "with recompute")
        rows = self._rows()
        notes = [
            f"parameters, buffers and inputs that are saved too: {_mib(self.parameters)} MiB",
            "kept because:",
        ]
        notes += [f"  {_mib(size):>10}  {reason}" for reason, size in self.reasons().items()]
        if importlib.util.find_spec("rich") is None:
            widths = [max(len(row[i]) for row in [header, *rows]) for i in range(4)]
            lines = [
                f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c:>{widths[2]}}  {d:>{widths[3]}}"
                for a, b, c, d in [header, *rows]
            ]
            return "\n".join([*lines, *notes])
        from rich.console import Console
        from rich.table import Table

        table = Table(*header)
        for column in table.columns[2:]:
            column.justify = "right"
        for row in rows:
            table.add_row(*row)
        console = Console(width=100)
        with console.capture() as capture:
            console.print(table)
        return "\n".join([capture.get().rstrip(), *notes])

    def plot(self, path: str) -> None:
        """Writes a horizontal bar chart of both columns as PNG (or what the suffix says). Needs matplotlib."""
        from matplotlib.figure import Figure

        modules = [m for m in self.modules if m.before or m.after]
        figure = Figure(figsize=(8, 1 + 0.3 * len(modules)), layout="constrained")
        axes = figure.subplots()
        places = range(len(modules))
        axes.barh([p - 0.2 for p in places], [m.before / 2**20 for m in modules], 0.4, label="eager")
        axes.barh([p + 0.2 for p in places], [m.after / 2**20 for m in modules], 0.4, label="recompute")
        axes.set_yticks(list(places), [m.path or "(model)" for m in modules], fontsize=7)
        axes.invert_yaxis()
        axes.set_xlabel("MiB kept for backward")
        axes.legend()
        figure.savefig(path, dpi=150)


def explain(model: nn.Module, *args: Any, policy: str | Policy = "pointwise", **kwargs: Any) -> Explanation:
    """Tells what each module of `model` keeps for backward, without and with :func:`pyckpt.recompute`, and why.

    Runs ``model(*args, **kwargs)`` a few times, in its mode and on its device, without backward. Random number generators and
    buffers (running statistics) are put back afterwards; parameters are only read.

    Args:
        model: any module; a converted one is compared with itself without the engine.
        args, kwargs: of its forward.
        policy: as for :func:`pyckpt.recompute`.

    Raises:
        TypeError: `model` is no module.
        ValueError: an unknown name of a policy; a model on the meta device, which keeps nothing.
        RuntimeError: gradients are off, or nothing in the result needs a gradient.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"explain: expected a torch.nn.Module, got {type(model).__name__}")
    check_policy("explain", policy)
    if any(t.is_meta for t in (*model.parameters(), *memory.tensors([args, kwargs]))):
        raise ValueError("explain: the model or its input is on the meta device, where nothing is kept")
    if not torch.is_grad_enabled():
        raise RuntimeError("explain: gradients are disabled here, so that nothing is kept for backward")
    fixed = {
        t.untyped_storage().data_ptr()
        for t in [*model.parameters(), *model.buffers()]
        if t.layout is torch.strided
    }
    fixed |= {
        t.untyped_storage().data_ptr() for t in memory.tensors([args, kwargs]) if t.layout is torch.strided
    }
    counter = _Counter(model, fixed)

    def forward() -> Any:
        return model(*args, **kwargs)

    with undisturbed(model), suspended():
        with counter.modules(), saved_tensors_hooks(counter.before, lambda tensor: tensor):
            result = forward()
        if not any(t.requires_grad for t in memory.tensors(result)):
            raise RuntimeError(
                "explain: no tensor in the model's result needs a gradient, so nothing is kept for backward"
            )
        del result
        with counter.modules(), _engine(policy, counter):
            forward()
        before = _measured(model, forward)

        def with_engine() -> Any:
            with _engine(policy, None):
                return forward()

        after = _measured(model, with_engine)
    rows = [m for m in counter.rows.values() if m.before or m.after]
    return Explanation(rows, counter.fixed_bytes, before, after)


class _Counter:
    def __init__(self, model: nn.Module, fixed: set[int]):
        self.paths = {id(module): path for path, module in model.named_modules()}
        self.fixed = fixed
        self.fixed_bytes = 0
        self.rows: dict[str, ModuleBytes] = {}
        self.stack: list[nn.Module] = []
        self.seen: set[int] = set()

    @contextmanager
    def modules(self) -> Iterator[None]:
        """Follows which module's code is running."""
        self.seen = set()
        self.fixed_bytes = 0
        hooks = (
            torch_module.register_module_forward_pre_hook(lambda module, inputs: self.stack.append(module)),
            torch_module.register_module_forward_hook(lambda *_: self._leave(), always_call=True),
        )
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            self.stack.clear()

    def _leave(self) -> None:
        self.stack.pop()

    def row(self) -> ModuleBytes:
        module = next((m for m in reversed(self.stack) if id(m) in self.paths), None)
        path = "" if module is None else self.paths[id(module)]
        return self.rows.setdefault(path, ModuleBytes(path, "" if module is None else type(module).__name__))

    def new_bytes(self, tensor: Tensor) -> int:
        """Of a storage seen for the first time; 0 for others."""
        if tensor.layout is not torch.strided:
            return tensor.numel() * tensor.element_size()
        storage = tensor.untyped_storage()
        if storage.data_ptr() in self.seen:
            return 0
        self.seen.add(storage.data_ptr())
        if storage.data_ptr() in self.fixed:
            self.fixed_bytes += storage.nbytes()
            return 0
        return storage.nbytes()

    def before(self, tensor: Tensor) -> Tensor:
        self.row().before += self.new_bytes(tensor)
        return tensor.detach()  # an output in its own node's keeping would be a cycle, and stay alive

    def after(self, tensor: Tensor, reason: str, row: ModuleBytes) -> None:
        size = self.new_bytes(tensor)
        if size:
            row.after += size
            row.kept.append((tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), size, reason))


def _engine(policy: str | Policy, counter: _Counter | None) -> Any:
    waiting: list[tuple[Recipe, Tensor, ModuleBytes]] = []

    class Observed(Region):
        reason = ""

        def recipe(self, tensor: Tensor, whole: Tensor, node: Any) -> Recipe:
            try:
                return super().recipe(tensor, whole, node)
            except Unavailable as unavailable:
                self.reason = str(unavailable)
                raise

        def pack(self, tensor: Tensor) -> Any:
            self.reason = "an input, a constant, a node's own output, or small"
            record = super().pack(tensor)
            if counter is not None:
                if type(record) is not Recipe:
                    counter.after(tensor, self.reason, counter.row())
                elif record.awaits:
                    waiting.append((record, tensor.detach(), counter.row()))
            return record

    @contextmanager
    def context() -> Iterator[None]:
        owner = object()
        regions.suspended = False
        enter(policy, False, owner, Observed)
        regions.suspended = True
        try:
            yield
        finally:
            leave(owner)
        for record, tensor, row in waiting:
            if counter is not None and record.source.held is not None:
                counter.after(tensor, "a matrix product that others than pointwise nodes may read", row)

    return context()


@contextmanager
def suspended() -> Iterator[None]:
    """Regions that the model begins itself do nothing."""
    before, regions.suspended = regions.suspended, True
    try:
        yield
    finally:
        regions.suspended = before


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Random number generators and buffers are put back at the end."""
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    devices = {t.get_device() for t in model.parameters() if t.is_cuda}
    try:
        with torch.random.fork_rng(devices=sorted(devices)):
            yield
    finally:
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                if name in buffers:
                    buffer.copy_(buffers[name])


def _measured(model: nn.Module, forward: Callable[[], Any]) -> int | None:
    device = next((t.device for t in model.parameters()), torch.device("cpu"))
    try:
        return memory.saved_bytes(forward, device=device, warmup=1)
    except RuntimeError:
        return None


def _mib(size: int) -> str:
    return f"{size / 2**20:,.2f}"
