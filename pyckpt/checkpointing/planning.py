"""The fastest training step that fits a budget: what each block of a model keeps, solved from measurements."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import memory
from .._installation import install, installed, uninstall
from .._levels import LEVELS
from .._records import RecomputeError
from ..explanation import _suspended, _undisturbed
from ._blocks import Found, candidates, describe, observe
from ._measure import Bench, Cost, _Ones, few_objects, rest_of
from ._solver import Chain, Option
from .segments import Offloaded, Segmented, _Wrapped, checkpoint_wrapper, unwrap, wrap

__all__ = ["BudgetError", "Plan", "Prediction", "plan"]

#: Of a block: keep all; the engine's levels; a checkpoint of its own; kept on the host.
CHOICES = ("none", *LEVELS, "checkpoint", "offload")


class BudgetError(RecomputeError):
    """No choice fits the budget. `smallest` is the least that can be met, in bytes."""

    def __init__(self, message: str, smallest: int):
        super().__init__(message)
        self.smallest = smallest


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
        curve, eager_curve: bytes after each block's forward and at the peak inside each one's backward.
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
    _undo: list[Callable[[], None]] = field(default_factory=list, repr=False, compare=False)

    def apply(self, model: nn.Module) -> nn.Module:
        """Make `model` run as planned, in place; returns it. :meth:`revert` undoes it.

        Raises:
            ValueError: its blocks are not those that the plan was made for, or the plan is applied already.
        """
        if self._undo:
            raise ValueError("Plan.apply: this plan is applied already; revert() it first")
        paths = [path for group, _ in self.steps for path in group]
        try:
            blocks = [model.get_submodule(path) for path in paths]
            same = _fingerprint(blocks) == self.fingerprint["model"]
        except AttributeError:
            same = False
        if not same:
            raise ValueError(
                "Plan.apply: the plan was made for another model; make one for this, with pyckpt.plan"
            )
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
            module._pyckpt_segments = starts  # type: ignore[assignment]
            self._undo.append(partial(_unwrapped, module))
        return model

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
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(data, dict) or data.pop("version", None) != 1:
            raise ValueError(f"Plan.load: {path} holds no plan that this version of pyckpt reads")
        data["steps"] = [(list(group), choice) for group, choice in data["steps"]]
        data["predicted"], data["eager"] = Prediction(**data["predicted"]), Prediction(**data["eager"])
        return cls(**data)

    def matches(self, model: nn.Module, *args: Any, **kwargs: Any) -> bool:
        """Whether the plan was made for these blocks and for inputs of these shapes."""
        paths = [path for group, _ in self.steps for path in group]
        try:
            blocks = [model.get_submodule(path) for path in paths]
        except AttributeError:
            return False
        return self.fingerprint == {"model": _fingerprint(blocks), "sample": _shapes(args, kwargs)}

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


def _apply(block: nn.Module, choice: str) -> Callable[[], None]:
    """Returns what undoes it."""
    before = installed(block)
    if choice in LEVELS:
        install(block, choice)

        def undo() -> None:
            uninstall(block)
            if before is not None:
                install(block, before)

        return undo
    if choice == "checkpoint":
        checkpoint_wrapper(block)
    elif choice == "offload":
        wrap(block, Offloaded)
    else:
        return lambda: None
    return partial(_unwrapped, block)


def _unwrapped(block: nn.Module) -> None:
    unwrap(block)


def plan(
    model: nn.Module,
    *args: Any,
    budget: int | float | str,
    scope: str = "activations",
    blocks: Sequence[str | nn.Module] | None = None,
    choices: Sequence[str] | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    on: str | torch.device | None = None,
    rounds: int = 5,
    **kwargs: Any,
) -> Plan:
    """The fastest choice of what each block keeps, such that a training step stays within a budget.

    Finds the repeated blocks of `model`, measures one of each kind at each choice (bytes kept, peak inside backward, time), and
    solves exactly for the fastest step. Choices are "none", the levels of :func:`pyckpt.recompute`, "checkpoint" (a checkpoint
    around the block), "segment" (one around several, where they are called by an ``nn.Sequential``) and, on CUDA, "offload".
    Measured is on copies: gradients, buffers and random numbers of the model stay. Convert the model first, and plan before it
    is wrapped in DDP or FSDP.

    Args:
        model: on its device and in its mode; under ``torch.autocast`` if the training is.
        args, kwargs: of its forward: a sample batch.
        budget: bytes that a step may allocate at its peak above what stands before it: a number, a text ("8GiB", "500 MB"), or a
            fraction of eager's.
        scope: "activations": with gradients that stand before; "total": gradients of parameters count too.
        blocks: paths or modules, if they are not to be found.
        choices: of those to consider; all by default.
        loss: from the model's result to a scalar; by default the result's ``loss``, else nothing is counted for it.
        on: type of the device whose measurements are wanted ("cuda"); an error if the model is elsewhere.
        rounds: of timing.

    Raises:
        BudgetError: the budget cannot be met; it names the smallest that can.
        ValueError: no repeated blocks were found, or an argument is none of those.
    """
    chosen_choices = _checked(choices, scope)
    _bytes(budget, 1)
    where = next((p.device for p in model.parameters()), torch.device("cpu"))
    if on is not None and torch.device(on).type != where.type:
        raise ValueError(
            f"plan: on={str(on)!r}, but the model is on {where}; move it there, and the sample too"
        )
    paths = _paths(model, blocks)
    for path in paths:
        block = model.get_submodule(path)
        if isinstance(block, _Wrapped) or installed(block) is not None:
            raise ValueError(f"plan: {path} recomputes already, by itself or by a plan; revert that first")
    autocast = torch.is_autocast_enabled(where.type), torch.get_autocast_dtype(where.type)
    run = lambda module: _scalar(module(*args, **kwargs), loss)  # noqa: E731
    with _undisturbed(model), _suspended():
        found, calls = observe(model, paths, lambda: model(*args, **kwargs))
    with _undisturbed(model), few_objects():
        rest = rest_of(model, [(b.module, calls[b.kind]) for b in found], run, where, rounds)
        parts = ("pointwise", "checkpoint") if "segment" in chosen_choices else ()  # of a segment's costs
        measured = tuple(c for c in dict.fromkeys(("none", *chosen_choices, *parts)) if c != "segment")
        if where.type != "cuda" and choices is None:
            measured = tuple(c for c in measured if c != "offload")
        kinds = {b.kind: b.module for b in found}
        costs = {
            kind: Bench(module, calls[kind], autocast).costs(measured, rounds)
            for kind, module in kinds.items()
        }
    allowed = [c for c in chosen_choices if c in measured or c == "segment"]
    if installed(model) is not None and len(allowed) > 1:
        allowed = [c for c in allowed if c != "none"]  # the engine is around it anyway
    gradients = {kind: sum(p.nbytes for p in m.parameters() if p.requires_grad) for kind, m in kinds.items()}
    chain = _chain(found, costs, allowed, rest, gradients if scope == "total" else None)
    eager_steps = [_option("none", costs[b.kind]["none"]) for b in found]
    eager = _prediction(chain, eager_steps, rest)
    limit = _bytes(budget, eager.peak)
    steps = chain.solve(limit)
    if steps is None:
        smallest = chain.smallest()
        raise BudgetError(
            f"plan: no choice fits {limit:,} bytes; the smallest budget that can be met is {smallest:,} bytes "
            f"({smallest / 2**20:,.1f} MiB, {smallest / eager.peak:.3f} of eager's)",
            smallest,
        )
    names, place = [], 0
    for option in steps:
        names.append(([b.path for b in found[place : place + option.length]], option.name))
        place += option.length
    print_ = {"model": _fingerprint([b.module for b in found]), "sample": _shapes(args, kwargs)}
    return Plan(
        limit,
        scope,
        names,
        _prediction(chain, steps, rest),
        eager,
        _curve(chain, steps),
        _curve(chain, eager_steps),
        print_,
    )


def _checked(choices: Sequence[str] | None, scope: str) -> Sequence[str]:
    if scope not in ("activations", "total"):
        raise ValueError(f"plan: scope must be 'activations' or 'total', got {scope!r}")
    wrong = [c for c in choices or () if c not in (*CHOICES, "segment")]
    if wrong or (choices is not None and not choices):
        raise ValueError(f"plan: choices must be of {', '.join((*CHOICES, 'segment'))}; got {choices!r}")
    return (*CHOICES, "segment") if choices is None else choices


def _paths(model: nn.Module, blocks: Sequence[str | nn.Module] | None) -> list[str]:
    if blocks is None:
        paths = candidates(model)
        if not paths:
            raise ValueError(
                "plan: found no nn.ModuleList or nn.Sequential of blocks of one class; name them, as blocks=[...]"
            )
        return paths
    known = {id(module): path for path, module in model.named_modules()}
    paths = [block if isinstance(block, str) else known.get(id(block), "") for block in blocks]
    if not paths or any(path not in known.values() or not path for path in paths):
        raise ValueError("plan: blocks must be modules of the model, or their paths")
    return paths


def _scalar(result: Any, loss: Callable[[Any], Tensor] | None) -> Tensor:
    if loss is not None:
        return loss(result)
    own = getattr(result, "loss", None)
    if isinstance(own, Tensor):
        return own
    parts = [_Ones.apply(t) for t in memory._tensors(result) if t.requires_grad]
    return sum(parts[1:], parts[0]) if parts else torch.zeros(())


def _option(name: str, cost: Cost) -> Option:
    return Option(name, 1, cost.saved, cost.peak, cost.time)


def _chain(
    found: Sequence[Found],
    costs: dict[str, dict[str, Cost]],
    allowed: Sequence[str],
    rest: Any,
    gradients: dict[str, int] | None,
) -> Chain:
    options = []
    for place, block in enumerate(found):
        here = [_option(c, costs[block.kind][c]) for c in allowed if c != "segment"]
        if "segment" in allowed and block.container is not None:
            here += _segments(found, place, costs)
        options.append(here)
    after = [0] * len(found)
    head = rest.peak
    if gradients is not None:
        # Those of the blocks behind stand, and a block's own come; those of the rest, wherever they arise.
        total = rest.gradients
        for place in reversed(range(len(found))):
            total += gradients[found[place].kind]
            after[place] = total
        head += rest.gradients
    return Chain(options, [rest.before + g for g in after], head)


def _segments(found: Sequence[Found], place: int, costs: dict[str, dict[str, Cost]]) -> list[Option]:
    first = costs[found[place].kind].get("checkpoint")
    made: list[Option] = []
    added = time = 0
    for end in range(place + 1, len(found)):
        before, last = found[end - 1], found[end]
        inner = costs[before.kind].get("replay")
        alone = costs[last.kind].get("checkpoint")
        joined = last.container == before.container and last.number == before.number + 1
        if first is None or inner is None or alone is None or not joined:
            break
        added += inner.peak
        time += costs[before.kind].get("pointwise", costs[before.kind]["none"]).time + inner.time
        peak = added + max(costs[b.kind]["checkpoint"].peak for b in found[place : end + 1])
        made.append(Option("segment", end - place + 1, first.saved, peak, time + alone.time))
    return made


def _prediction(chain: Chain, steps: Sequence[Option], rest: Any) -> Prediction:
    saved = rest.saved + sum(option.saved for option in steps)
    time = rest.time + sum(option.time for option in steps)
    return Prediction(saved, chain.peak(steps), time / 1e6)


def _curve(chain: Chain, steps: Sequence[Option]) -> list[int]:
    kept = [chain.standing[-1]]
    peaks: list[int] = []
    place = 0
    for option in steps:
        peaks.append(chain.standing[place] + kept[-1] - chain.standing[-1] + option.peak)
        kept.append(kept[-1] + option.saved)
        place += option.length
    return [*kept, chain.head + kept[-1] - chain.standing[-1], *reversed(peaks)]


def _bytes(budget: int | float | str, eager: int) -> int:
    units = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "ki": 1024, "mi": 1024**2, "gi": 1024**3}
    if isinstance(budget, str):
        match = re.fullmatch(r"\s*([\d.]+)\s*([kmg]i?)?b?\s*", budget.lower())
        if match:
            return int(float(match[1]) * units[match[2] or ""])
    elif isinstance(budget, float) and 0 < budget <= 1:
        return int(budget * eager)
    elif isinstance(budget, (int, float)) and not isinstance(budget, bool) and budget >= 1:
        return int(budget)
    raise ValueError(f"plan: budget must be bytes, a text as '8GiB', or a fraction in (0, 1]; got {budget!r}")


def _fingerprint(blocks: Sequence[nn.Module]) -> str:
    text = "".join(describe(block) for block in blocks)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _shapes(args: Any, kwargs: Any) -> str:
    shapes = [(tuple(t.shape), str(t.dtype)) for t in memory._tensors([args, kwargs])]
    return hashlib.sha256(repr(shapes).encode()).hexdigest()[:32]
