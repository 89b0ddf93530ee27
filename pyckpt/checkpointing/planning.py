"""The fastest training step that fits a budget: what each block of a model keeps, solved from measurements."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .. import memory
from .._installation import installed
from .._levels import LEVELS
from .._records import RecomputeError
from ..explanation import suspended, undisturbed
from ._autocast import Autocast, outside
from ._blocks import Found, candidates, observe
from ._measure import Bench, Cost, Ones, few_objects, rest_of
from ._solver import Chain, Option
from .plans import Plan, Prediction, fingerprint, refuse_recomputing, shapes

__all__ = ["BudgetError", "Plan", "Prediction", "plan"]

#: Of a block: keep all; the engine's levels; a checkpoint of its own; kept on the host.
CHOICES = ("none", *LEVELS, "checkpoint", "offload")


_Kind = tuple[str, bool]


class BudgetError(RecomputeError):
    """No choice fits the budget. `smallest` is the least that can be met, in bytes."""

    def __init__(self, message: str, smallest: int):
        super().__init__(message)
        self.smallest = smallest


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
            fraction of eager's (0.6, "60%").
        scope: "activations": with gradients that stand before; "total": gradients of parameters count too.
        blocks: paths or modules, if they are not to be found.
        choices: of those to consider; all by default.
        loss: from the model's result to a scalar; by default the result's ``loss``, else nothing is counted for it.
        on: type of the device whose measurements are wanted ("cuda"); an error if the model is elsewhere.
        rounds: of timing.

    Raises:
        BudgetError: the budget cannot be met; it names the smallest that can.
        ValueError: no repeated blocks were found; they recompute already, or are given a cache of keys and values; "segment" is
            the only choice, and some blocks can be in none; or an argument is none of those.
        TypeError: `blocks` are no list, `loss` is no function.
    """
    chosen_choices = _checked(choices, scope, loss, rounds)
    budget_bytes(budget, 1)
    where = next((p.device for p in model.parameters()), torch.device("cpu"))
    if on is not None and torch.device(on).type != where.type:
        raise ValueError(
            f"plan: on={str(on)!r}, but the model is on {where}; move it there, and the sample too"
        )
    paths = _paths(model, blocks)
    refuse_recomputing("plan", model, paths)
    autocast = Autocast.now(where.type)
    run = lambda module: _scalar(module(*args, **kwargs), loss)  # noqa: E731
    with undisturbed(model), suspended():
        found, calls = observe(model, paths, lambda: model(*args, **kwargs), where)
    with undisturbed(model), few_objects(), outside(where.type):
        rest = rest_of(model, found, calls, run, where, autocast, rounds)
        parts = ("pointwise", "checkpoint") if "segment" in chosen_choices else ()  # of a segment's costs
        measured = tuple(c for c in dict.fromkeys(("none", *chosen_choices, *parts)) if c != "segment")
        if where.type != "cuda" and choices is None:
            measured = tuple(c for c in measured if c != "offload")
        kinds = {b.kind: b for b in found}
        costs = {
            kind: Bench(b.module, calls[b.call], b.differentiable).costs(measured, rounds)
            for kind, b in kinds.items()
        }
    allowed = [c for c in chosen_choices if c in measured or c == "segment"]
    if installed(model) is not None and len(allowed) > 1:
        allowed = [c for c in allowed if c != "none"]  # the engine is around it anyway
    gradients = {
        kind: sum(p.nbytes for p in b.module.parameters() if p.requires_grad) for kind, b in kinds.items()
    }
    chain = _chain(found, costs, allowed, rest, gradients if scope == "total" else None)
    eager_steps = [_option("none", costs[b.kind]["none"]) for b in found]
    eager = _prediction(chain, eager_steps, rest)
    limit = budget_bytes(budget, eager.peak)
    steps = chain.solve(limit)
    if steps is None:
        smallest = chain.smallest()
        if smallest is None:
            raise ValueError(
                'plan: "segment" needs blocks called by an nn.Sequential, several in a row, of which each gives what the next '
                f"takes; the choices {chosen_choices!r} have nothing for the others"
            )
        smallest += smallest // 256 + 2**14  # what two measurements differ by
        raise BudgetError(
            f"plan: no choice fits {limit:,} bytes; the smallest budget that can be met is {smallest:,} bytes "
            f"({smallest / 2**20:,.1f} MiB, {smallest / eager.peak:.3f} of eager's)",
            smallest,
        )
    names, place = [], 0
    for option in steps:
        names.append(([b.path for b in found[place : place + option.length]], option.name))
        place += option.length
    made_for = {"model": fingerprint(model, [b.path for b in found]), "sample": shapes(args, kwargs)}
    return Plan(
        limit,
        scope,
        names,
        _prediction(chain, steps, rest),
        eager,
        _curve(chain, steps),
        _curve(chain, eager_steps),
        made_for,
    )


def _checked(choices: Sequence[str] | None, scope: str, loss: Any, rounds: Any) -> Sequence[str]:
    if scope not in ("activations", "total"):
        raise ValueError(f"plan: scope must be 'activations' or 'total', got {scope!r}")
    if loss is not None and not callable(loss):
        raise TypeError(f"plan: loss must be a function of the model's result, got {type(loss).__name__}")
    if not isinstance(rounds, int) or rounds < 1:
        raise ValueError(f"plan: rounds must be a number from 1 on, got {rounds!r}")
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
    if isinstance(blocks, str) or not isinstance(blocks, Iterable):
        raise TypeError(f"plan: blocks must be a list of modules or their paths, got {type(blocks).__name__}")
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
    parts = [Ones.apply(t) for t in memory.tensors(result) if t.requires_grad]
    return sum(parts[1:], parts[0]) if parts else torch.zeros(())


def _option(name: str, cost: Cost) -> Option:
    return Option(name, 1, cost.saved, cost.peak, cost.time, cost.casts, cost.forward)


def _chain(
    found: Sequence[Found],
    costs: dict[_Kind, dict[str, Cost]],
    allowed: Sequence[str],
    rest: Any,
    gradients: dict[_Kind, int] | None,
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
    return Chain(options, [rest.before + g for g in after], head, rest.before, rest.forward)


def _segments(found: Sequence[Found], place: int, costs: dict[_Kind, dict[str, Cost]]) -> list[Option]:
    first = costs[found[place].kind].get("checkpoint")
    if first is None:
        return []
    made: list[Option] = []
    added = time = 0
    casts, forward, highest = first.casts, first.forward, first.peak
    for end in range(place + 1, len(found)):
        before, last = found[end - 1], found[end]
        inner = costs[before.kind].get("replay")
        alone = costs[last.kind].get("checkpoint")
        joined = last.container == before.container and last.number == before.number + 1
        if inner is None or alone is None or not joined:
            break
        added += inner.peak
        time += costs[before.kind].get("pointwise", costs[before.kind]["none"]).time + inner.time
        forward = max(forward, casts + alone.forward)
        casts += alone.casts
        highest = max(highest, alone.peak)
        whole = time + alone.time
        made.append(Option("segment", end - place + 1, first.saved, added + highest, whole, casts, forward))
    return made


def _prediction(chain: Chain, steps: Sequence[Option], rest: Any) -> Prediction:
    saved = rest.saved + sum(option.saved for option in steps)
    time = rest.time + sum(option.time for option in steps)
    return Prediction(saved, chain.peak(steps), time / 1e6)


def _curve(chain: Chain, steps: Sequence[Option]) -> list[int]:
    forward, peaks = [chain.before], []
    saved = casts = place = 0
    for option in steps:
        peaks.append(chain.standing[place] + saved + option.peak)
        inside = saved + casts + option.forward
        saved += option.saved
        casts += option.casts
        place += option.length
        forward.append(chain.before + max(inside, saved + casts))
    middle = max(chain.head + saved, chain.forward + saved + casts)
    return [*forward, middle, *reversed(peaks)]


def budget_bytes(budget: int | float | str, eager: int) -> int:
    units = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "ki": 1024, "mi": 1024**2, "gi": 1024**3}
    if isinstance(budget, str):
        match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*(?:([kmg]i?)?(b?)|(%))\s*", budget.lower())
        if match and match[4]:
            return budget_bytes(float(match[1]) / 100, eager)
        if match and (match[2] or match[3]):
            return int(float(match[1]) * units[match[2] or ""])
        if match:  # from a command line
            return budget_bytes(float(match[1]), eager)
    elif isinstance(budget, float) and 0 < budget <= 1:
        return int(budget * eager)
    elif isinstance(budget, (int, float)) and not isinstance(budget, bool):
        least = 2**10 if isinstance(budget, float) else 1  # less was meant as a fraction
        if least <= budget < math.inf:
            return int(budget)
    raise ValueError(
        f"a budget must be bytes, a text such as '8GiB' or '60%', or a fraction in (0, 1]; got {budget!r}"
    )
