"""Activation classes of other libraries: the proof that one computes GELU, SiLU or ReLU.

Two measures, both relative to |x| for values (the natural scale of a function with a linear tail: near -6 the
value itself is the difference of two equal numbers) and absolute for derivatives. erf and tanh GELU are 2e-4
apart by it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import functional as ours
from .. import nn as fused
from .base import Proof, Target, Unprovable, describe
from .recording import ELEMENTWISE, Unrounded
from .subject import Subject

EXACT = 4e-12  # the same formula in float64; FastGELU's constant, rounded to ten digits, costs 1e-12
FLOAT32 = 1e-8  # constants rounded to float32: a sixth of the rounding error that float32 makes anyway

_FUNCTIONS: tuple[tuple[Callable[[Tensor], Tensor], Target], ...] = (
    (F.gelu, Target(fused.GELU, {"approximate": "none"})),
    (functools.partial(F.gelu, approximate="tanh"), Target(fused.GELU, {"approximate": "tanh"}, note="tanh")),
    (
        functools.partial(ours.gelu, approximate="sigmoid"),
        Target(fused.GELU, {"approximate": "sigmoid"}, note="sigmoid"),
    ),
    (F.silu, Target(fused.SiLU, {"inplace": False})),
    (F.relu, Target(fused.ReLU, {"inplace": False})),
)


def prove_activation(subject: Subject) -> Proof:
    """The proof that the class, which has no parameters, computes one of our functions."""
    name, module, options = subject.name, subject.make(), subject.options
    best: Proof | None = None
    for training in (False, True):
        module.training = training
        _same_for_all_dtypes(subject, module)
        tried = [_deviation(module, function, target) for function, target in _FUNCTIONS]
        proof = min(tried, key=lambda p: p.error)
        if best is not None and best.target is not proof.target:
            raise Unprovable(f"{name} computes different functions in training and in evaluation")
        best = proof if best is None else max(best, proof, key=lambda p: p.error)
    assert best is not None
    if not best.error <= FLOAT32:
        raise Unprovable(
            f"{name} is none of gelu (erf, tanh or sigmoid), silu and relu: {best.error:.0e} away from the nearest"
        )
    for key, value in best.target.attributes.items():
        if key in options and options[key] != value:
            raise Unprovable(
                f"{name} has an attribute {key} of another meaning than {describe(best.target.cls)}'s"
            )
    if best.error <= EXACT:
        return best
    note = f"{best.target.note}, equal to {best.error:.0e}".lstrip(", ")
    return Proof(Target(best.target.cls, best.target.attributes, note), best.error)


def _same_for_all_dtypes(subject: Subject, module: nn.Module) -> None:
    name, calls = subject.name, []
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        output, record = subject.run(module, torch.ones(3, dtype=dtype, device="cpu"), ELEMENTWISE)
        calls.append(record.calls)
        if output.dtype != dtype:
            raise Unprovable(f"{name}.forward returns {output.dtype} for {dtype}")
    if any(c != calls[0] for c in calls):
        raise Unprovable(f"{name}.forward computes different functions for different dtypes")


def _probe() -> tuple[Tensor, Tensor]:
    """float64 points: the middle, the tails, both sides of zero down to 1e-12; then huge ones."""
    where: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}
    middle, tiny = torch.linspace(-12.0, 12.0, 1537, **where), torch.logspace(-12.0, -1.0, 67, **where)
    tails = torch.tensor([20.0, 40.0, 100.0, 1e200, math.inf, math.nan], **where)
    return torch.cat([middle, tiny, -tiny, tails[:3], -tails[:3]]), torch.cat([tails[3:], -tails[3:]])


def _deviation(module: nn.Module, function: Callable[[Tensor], Tensor], target: Target) -> Proof:
    """How far the module is from ``function``; raises if it writes to its input."""
    name = describe(type(module))
    points, odd = _probe()
    runs = []
    with Unrounded():
        for call in (module.forward, function):
            leaf = points.clone().requires_grad_()
            x = leaf * 1.0  # not a leaf, so that a write in place would go through and be seen
            y = call(x)
            if not torch.equal(x, points):
                raise Unprovable(f"{name} writes to its input")
            runs.append((y.detach(), *torch.autograd.grad(y.sum(), leaf)))
        same = torch.allclose(module.forward(odd), function(odd), rtol=0.0, atol=0.0, equal_nan=True)
    (y, dy), (want, dwant) = runs
    scale = torch.where(points == 0, 1.0, points.abs())
    error = float(torch.maximum((y - want).abs() / scale, (dy - dwant).abs()).max())
    if error <= FLOAT32 and not same:
        raise Unprovable(f"{name} differs from {describe(target.cls)} at infinity")
    return Proof(target, error if error == error else float("inf"))
