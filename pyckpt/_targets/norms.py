"""Norm classes of other libraries: the proof that one computes LayerNorm or RMSNorm, and how.

The forward is recorded (recording.py): algebraic operations, means and casts, nothing else. In exact arithmetic,
that is in float64 with casts left out, it must give a LayerNorm or RMSNorm of its input, values and gradients, for
rows from 1e-30 to 1e30 and random parameters. The search for eps, offset and so on is by trial; eps is followed
where an attribute governs it. In every combination of dtypes it must then make the same calls, which leaves
rounding, and the dtype of the result, as the only differences.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .. import nn as fused
from .base import Proof, Target, Unprovable, describe
from .recording import NORMALISING, Record, Unrounded
from .subject import Subject

EXACT = 1e-10
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_RESULTS = ("input", "promoted", "weight")


def prove_norm(subject: Subject) -> Proof:
    """The proof that the class, with parameters of these sizes and these options, is a norm that we have."""
    shapes, options = subject.shapes, subject.options
    known = set(shapes.values())
    if len(known) > 1:
        raise Unprovable(f"{subject.name} has parameters of several shapes")
    if not known and isinstance(options.get("normalized_shape"), tuple):
        known = {options["normalized_shape"]}
    recipes = [_recipe(subject, shape) for shape in known or ((5,), (8,))]
    if not known:  # of any width: two must give the same
        recipes = [recipe._replace(shape=None) for recipe in recipes]
    if recipes[0] != recipes[-1]:
        raise Unprovable(f"{subject.name} computes different functions for different sizes")
    target = _target(subject, recipes[0])
    _compare_resets(subject, target)
    return Proof(target)


def _target(subject: Subject, recipe: fused.NormRecipe) -> Target:
    """Our own LayerNorm or RMSNorm where nothing distinguishes the class from torch's; else a ConvertedNorm."""
    native = fused.NormRecipe(
        recipe.function,
        "eps",
        recipe.weight and "weight",
        recipe.bias and "bias",
        0.0,
        subject.options.get("normalized_shape"),
    )
    cls, attributes = subject.cls, {"_pyckpt_norm": recipe}
    if issubclass(cls, nn.LayerNorm):
        if recipe == native and recipe.function == "layer_norm":
            return Target(fused.LayerNorm)
        return Target(fused.ConvertedLayerNorm, attributes)
    if issubclass(cls, nn.RMSNorm):
        if recipe == native and recipe.function == "rms_norm":
            return Target(fused.RMSNorm)
        raise Unprovable(f"{describe(cls)} is an nn.RMSNorm that computes otherwise")
    return Target(fused.ConvertedNorm, attributes)


# ---- the search --------------------------------------------------------------------------------------------


def _recipe(subject: Subject, shape: tuple[int, ...]) -> fused.NormRecipe:
    layouts = [
        (*_served(subject, shape, first), first) for first in (False, True)[: 2 if len(shape) == 1 else 1]
    ]
    for served, record, channels_first in sorted(layouts, key=lambda layout: -len(layout[0])):
        for recipe in () if record is None else _candidates(subject, record):
            recipe = recipe._replace(channels_first=channels_first, shape=shape)
            if _follows(subject, recipe, served[0]):
                if len(served) not in (1, 4):
                    raise Unprovable(f"{subject.name} fails on inputs of some numbers of dimensions")
                recipe = recipe._replace(rank=served[0].dim() if len(served) == 1 else None)
                return _checked(subject, recipe, served)
    raise Unprovable(
        f"{subject.name} is neither LayerNorm nor RMSNorm of its input's last dimensions or of dimension 1"
    )


def _served(
    subject: Subject, shape: tuple[int, ...], channels_first: bool
) -> tuple[list[Tensor], Record | None]:
    """Inputs of several ranks that the forward takes, and what it did to the first."""
    served, first = list[Tensor](), None
    for batch in ((2, 2, 1), (2, 2), (3,), (2, 1, 2, 1) if channels_first else ()):
        size = (*batch[:1], *shape, *batch[1:]) if channels_first else (*batch, *shape)
        x = _rows(size, len(shape), channels_first)
        try:
            y, record = subject.run(subject.make(), x, NORMALISING, exact=True)
        except (RuntimeError, IndexError, ValueError):
            continue  # such as permute's, on any but four dimensions
        if y.shape == x.shape:
            served.append(x)
            first = first or record
    return served, first


def _candidates(subject: Subject, record: Record) -> Iterator[fused.NormRecipe]:
    roles = [(*order, None, None)[:2] for order in itertools.permutations(subject.shapes)]
    eps: list[str | float] = [
        name
        for name, value in subject.options.items()
        if (isinstance(value, (int, float)) and not isinstance(value, bool))
        or (value is None and name == "eps")
    ]
    eps += record.constants()
    for function, (weight, bias), value in itertools.product(("rms_norm", "layer_norm"), roles, eps):
        for offset in (0.0, 1.0) if weight else (0.0,):
            yield fused.NormRecipe(function, value, weight, bias, offset)


def _follows(subject: Subject, recipe: fused.NormRecipe, x: Tensor) -> bool:
    """Whether values agree; where an attribute is taken for eps, after a change of it too."""
    changes: list[dict[str, Any]] = [{}]
    if isinstance(recipe.eps, str):
        changes.append({recipe.eps: 2.0 * (subject.options[recipe.eps] or 0.0) + 0.1})
    for change in changes:
        module = subject.make(**change)
        with Unrounded(), torch.no_grad():
            want, _ = _reference(recipe, module, x)
            scale = _peak(want, recipe)
            if not bool(((module.forward(x) - want).abs() <= EXACT * scale).all()):
                return False
    return True


def _checked(subject: Subject, recipe: fused.NormRecipe, inputs: list[Tensor]) -> fused.NormRecipe:
    """The recipe, proven for gradients, both modes, every rank and dtype, and completed by what these show."""
    for x, training in itertools.product(inputs, (False, True)):
        module = subject.make()
        module.training = training
        if not _same_gradients(module, recipe, x):
            raise Unprovable(f"{subject.name} is {recipe.function} for some inputs or in one mode only")
    x = inputs[0]
    _, exact = subject.run(subject.make(), x, NORMALISING, exact=True)
    results, cast = {}, False
    for ours, theirs in itertools.product(_DTYPES, _DTYPES if recipe.weight else (None,)):
        try:
            y, record = subject.run(subject.make(theirs or ours), x.to(ours), NORMALISING)
        except RuntimeError:
            if ours is theirs is torch.float32:
                raise Unprovable(f"{subject.name}.forward fails in float32") from None
            continue  # dtypes that it does not take together
        if record.calls != exact.calls:
            raise Unprovable(f"{subject.name}.forward computes different functions for different dtypes")
        results[ours, theirs or ours], cast = y.dtype, cast or bool(record.casts)
    native = not cast and any(call[0] in ("layer_norm", "rms_norm") for call in exact.calls)
    for dtype in ("native",) if native else _RESULTS:
        found = recipe._replace(dtype=dtype)
        if native or all(found.result_dtype(*given) == got for given, got in results.items()):
            return found
    raise Unprovable(f"{subject.name}.forward gives results of unexpected dtypes")


# ---- comparing ---------------------------------------------------------------------------------------------


# Of rows: where eps does nothing, something and everything. Each rank takes its own four (few, so that torch does
# not spread them over threads, which would cost more than it saves).
_SCALES = (0.0, 1e-4, 1e30, 1e-30, 1.0, 1e-3, 1e-6, 1e-2, 10.0, 0.1, 1e-5, 1e4)


def _rows(size: tuple[int, ...], dims: int, channels_first: bool) -> Tensor:
    """float64 input whose rows have different scales."""
    generator = torch.Generator("cpu").manual_seed(len(size))
    x = torch.randn(size, generator=generator, dtype=torch.float64, device="cpu") + 0.5
    x = x.movedim(1, -1) if channels_first else x
    batch = x.shape[: x.dim() - dims]
    scales = [_SCALES[(4 * x.dim() + row) % len(_SCALES)] for row in range(batch.numel())]
    x = x * torch.tensor(scales, dtype=x.dtype, device="cpu").reshape(*batch, *(1,) * dims)
    return (x.movedim(-1, 1) if channels_first else x).contiguous()


def _dims(recipe: fused.NormRecipe) -> tuple[int, ...]:
    assert recipe.shape is not None
    return (1,) if recipe.channels_first else tuple(range(-len(recipe.shape), 0))


def _peak(t: Tensor, recipe: fused.NormRecipe) -> Tensor:
    peak = t.abs().amax(_dims(recipe), keepdim=True)
    return torch.where(peak == 0, 1.0, peak)


def _reference(recipe: fused.NormRecipe, module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """The norm in plain PyTorch, and 1 / the root that each row is divided by."""
    eps = getattr(module, recipe.eps) if isinstance(recipe.eps, str) else recipe.eps
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    dims = _dims(recipe)
    x = x - x.mean(dims, keepdim=True) if recipe.function == "layer_norm" else x
    rstd = torch.rsqrt(x.square().mean(dims, keepdim=True) + eps)
    y = x * rstd
    if recipe.weight is not None:
        y = y * (recipe.offset + _aligned(module, recipe.weight, recipe, x))
    if recipe.bias is not None:
        y = y + _aligned(module, recipe.bias, recipe, x)
    return y, rstd


def _aligned(module: nn.Module, name: str, recipe: fused.NormRecipe, x: Tensor) -> Tensor:
    parameter: Tensor = getattr(module, name)
    return parameter.reshape(-1, *(1,) * (x.dim() - 2)) if recipe.channels_first else parameter


def _same_gradients(module: nn.Module, recipe: fused.NormRecipe, x: Tensor) -> bool:
    parameters = list(module.parameters())
    runs: list[Any] = []
    with Unrounded():
        for function in (module.forward, lambda t: _reference(recipe, module, t)[0]):
            leaf = x.clone().requires_grad_()
            y = function(leaf * 1.0)
            cotangent = (
                torch.linspace(0.0, 9.0, y.numel(), dtype=torch.float64, device="cpu").cos().reshape(y.shape)
            )
            runs.append((y.detach(), *torch.autograd.grad(y, [leaf, *parameters], cotangent)))
        _, rstd = _reference(recipe, module, x)
        weight = 1.0 if recipe.weight is None else recipe.offset + _aligned(module, recipe.weight, recipe, x)
        scale = (_peak(cotangent * weight, recipe) * rstd).detach()  # natural to a gradient that may cancel
    (y, dx, *others), (want, dwant, *wanted) = runs
    pairs = [(y, want, _peak(want, recipe)), (dx, dwant, scale)]
    pairs += [(got, w, w.abs().max()) for got, w in zip(others, wanted, strict=True)]
    return all(bool(((a - b).abs() <= EXACT * s).all()) for a, b, s in pairs)


def _compare_resets(subject: Subject, target: Target) -> None:
    """Where the class has a ``reset_parameters``, that of the new class must do the same."""
    if not hasattr(subject.cls, "reset_parameters"):
        return
    ours, theirs = subject.make(), subject.make()
    vars(ours).update(target.attributes)
    with torch.random.fork_rng(devices=[]):
        theirs.reset_parameters()  # type: ignore[operator]
        target.cls.reset_parameters(ours)  # type: ignore[attr-defined]
    if not all(torch.equal(p, q) for p, q in zip(ours.parameters(), theirs.parameters(), strict=True)):
        raise Unprovable(f"{subject.name} has a reset_parameters of its own")
