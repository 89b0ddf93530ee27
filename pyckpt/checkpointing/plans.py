"""What a plan is: which blocks keep what, and how a model is made to run so."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from .. import memory
from .._installation import install, installed, uninstall
from .._levels import LEVELS
from ._blocks import describe
from .segments import Offloaded, Segmented, Wrapped, checkpoint_wrapper, unwrap, wrap


@dataclass(frozen=True)
class Prediction:
    """Of one training step: bytes kept between forward and backward, the peak, and milliseconds."""

    saved: int
    peak: int
    milliseconds: float


@dataclass
class Plan:
    """What :func:`plan` found; ``str()`` is a table.

    Attributes:
        budget: bytes.
        scope: as given.
        steps: ``(paths of the blocks, choice)``, in order; several paths with "segment" are one checkpoint.
        predicted, eager: with the plan, and without anything.
        curve, eager_curve: bytes before the blocks, at the peak inside each one's forward (without autocast: after it), between
            forward and backward, and at the peak inside each one's backward.
        fingerprint: of the blocks that it was made for, and of the sample's shapes.
    """

    budget: int
    scope: str
    steps: list[tuple[list[str], str]]
    predicted: Prediction
    eager: Prediction
    curve: list[int]
    eager_curve: list[int]
    fingerprint: dict[str, str]
    _undo: list[Callable[[], Any]] = field(default_factory=list, repr=False, compare=False)

    def apply(self, model: nn.Module) -> nn.Module:
        """Make `model` run as planned, in place; returns it. :meth:`revert` undoes it. Where it raises, nothing has changed.

        Raises:
            ValueError: its blocks are not those that the plan was made for, or recompute already.
            TypeError: a block is to be wrapped whose forward is not its class's (see :func:`pyckpt.checkpoint_wrapper`).
        """
        if self._undo:
            raise ValueError("Plan.apply: this plan is applied already; revert() it first")
        if self._fingerprint_of(model) != self.fingerprint["model"]:
            raise ValueError(
                "Plan.apply: the plan was made for another model; make one for this, with pyckpt.plan"
            )
        refuse_recomputing("Plan.apply", model, [path for group, _ in self.steps for path in group])
        try:
            self._apply(model)
        except BaseException:
            self.revert()
            raise
        return model

    def _apply(self, model: nn.Module) -> None:
        segments: dict[str, dict[int, int]] = {}
        for group, choice in self.steps:
            if choice == "segment":
                container, _, number = group[0].rpartition(".")
                segments.setdefault(container, {})[int(number)] = len(group)
                continue
            for path in group:
                self._undo.append(_apply(model.get_submodule(path), choice))
        for container, starts in segments.items():
            module = wrap(model.get_submodule(container), Segmented)
            self._undo.append(partial(unwrap, module))
            module._pyckpt_segments = starts  # type: ignore[assignment]

    def revert(self) -> None:
        """Make the model that the plan is applied to run as before."""
        while self._undo:
            self._undo.pop()()

    def to_dict(self) -> dict[str, Any]:
        names = ("budget", "scope", "steps", "curve", "eager_curve", "fingerprint")
        plain = {name: getattr(self, name) for name in names}
        return {"version": 1, **plain, "predicted": asdict(self.predicted), "eager": asdict(self.eager)}

    def save(self, path: str | Path) -> None:
        """As JSON."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Raises ValueError where the file is no plan of this version."""
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
            if data.pop("version") == 1:
                steps = [(list(group), choice) for group, choice in data.pop("steps")]
                predicted, eager = (Prediction(**data.pop(name)) for name in ("predicted", "eager"))
                return cls(steps=steps, predicted=predicted, eager=eager, **data)
        except (ValueError, TypeError, KeyError, AttributeError):  # no JSON, or of another shape
            pass
        raise ValueError(f"Plan.load: {path} holds no plan that this version of pyckpt reads")

    def matches(self, model: nn.Module, *args: Any, **kwargs: Any) -> bool:
        """Whether the plan was made for these blocks and for inputs of these shapes."""
        return self.fingerprint == {"model": self._fingerprint_of(model), "sample": shapes(args, kwargs)}

    def _fingerprint_of(self, model: nn.Module) -> str | None:
        """Of the modules at the plan's paths; None where there are none."""
        try:
            return fingerprint(model, [path for group, _ in self.steps for path in group])
        except AttributeError:
            return None

    def __str__(self) -> str:
        rows: list[list[str]] = []
        for group, choice in self.steps:
            if rows and choice != "segment" and rows[-1][2] == choice:
                rows[-1][1], rows[-1][3] = group[-1], str(int(rows[-1][3]) + len(group))
            else:
                rows.append([group[0], group[-1], choice, str(len(group))])
        lines = [
            (first if first == last else f"{first} ... {last}", choice, count)
            for first, last, choice, count in rows
        ]
        width = max(len(line[0]) for line in lines)
        text = [f"{'blocks':<{width}}  {'choice':<10}  {'count':>5}"]
        text += [f"{name:<{width}}  {choice:<10}  {count:>5}" for name, choice, count in lines]
        text += ["", f"{'':<10}{'kept MiB':>12}{'peak MiB':>12}{'step ms':>12}"]
        for name, p in (("eager", self.eager), ("planned", self.predicted)):
            text.append(
                f"{name:<10}{p.saved / 2**20:>12,.1f}{p.peak / 2**20:>12,.1f}{p.milliseconds:>12,.1f}"
            )
        text.append(f"{'budget':<10}{'':>12}{self.budget / 2**20:>12,.1f}   ({self.scope})")
        return "\n".join(text)

    def plot(self, path: str | Path) -> None:
        """The predicted memory over one step as PNG (or what the suffix says). Needs matplotlib."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 4), layout="constrained")
        axes = figure.subplots()
        for label, curve in (("eager", self.eager_curve), ("planned", self.curve)):
            axes.plot([y / 2**20 for y in curve], label=label)
        axes.axhline(self.budget / 2**20, ls=":", color="#6a737d", label="budget")
        axes.set_xlabel("blocks: forward, then backward")
        axes.set_ylabel("MiB above what stands before the step")
        axes.set_ylim(bottom=0)
        axes.legend()
        figure.savefig(path, dpi=150)


def refuse_recomputing(function: str, model: nn.Module, paths: Iterable[str]) -> None:
    """Raises ValueError where one of these blocks recomputes already, or what holds it does, by itself or by a plan."""
    for path in paths:
        names = path.split(".")
        above = [".".join(names[:depth]) for depth in range(len(names))]
        wrapped = [p for p in (path, *above) if isinstance(model.get_submodule(p), Wrapped)]
        if wrapped or installed(model.get_submodule(path)) is not None:
            where = (wrapped or [path])[0] or "the model"
            raise ValueError(
                f"{function}: {where} recomputes already, by itself or by a plan; revert that first"
            )


def _apply(block: nn.Module, choice: str) -> Callable[[], Any]:
    """Returns what undoes it."""
    if choice in LEVELS:
        install(block, choice)
        return partial(uninstall, block)
    if choice == "checkpoint":
        checkpoint_wrapper(block)
    elif choice == "offload":
        wrap(block, Offloaded)
    else:
        return lambda: None
    return partial(unwrap, block)


def fingerprint(model: nn.Module, paths: Sequence[str]) -> str:
    """Of the modules there, and of how many there are beside them: a plan for four layers is none for five."""
    text = "".join(describe(model.get_submodule(path)) for path in paths)
    for container in sorted({path.rpartition(".")[0] for path in paths}):
        text += f"{container}: {len(model.get_submodule(container)._modules)}"
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def shapes(args: Any, kwargs: Any) -> str:
    found = [(tuple(t.shape), str(t.dtype)) for t in memory.tensors([args, kwargs])]
    return hashlib.sha256(repr(found).encode()).hexdigest()[:32]
