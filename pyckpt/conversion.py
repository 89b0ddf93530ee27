"""Swap a model's layers for their fused counterparts, and back.

A swap assigns ``module.__class__`` and nothing else that anyone could notice: the module object, its
parameters, buffers, hooks, training flag and place in the model stay, and so do optimizers, tied weights and
handles that refer to them. The model itself gets two forward hooks, which are the recompute engine.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import re
import sys
import types
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import nn

from . import backends
from . import functional as fused_functions
from ._installation import install, installed, uninstall
from ._levels import check_policy
from ._targets import FUSED_CLASSES, Target, classify, describe
from ._verify import ConversionError, place_of, verify_swap
from .engine import Policy

__all__ = ["ConversionError", "Report", "convert", "report", "revert"]

ModuleT = TypeVar("ModuleT", bound=nn.Module)

# What a swapped module remembers, under one name in its __dict__ (which repr, state_dict and named_* do not
# show, and which deepcopy, pickle and DataParallel's replicas carry along): (original class, names of
# attributes added, {attribute: method}, {attribute replaced: original}). A plain tuple, so that a pickled
# model depends on no private class of ours.
_MARK = "_pyckpt_original"


def convert(model: ModuleT, *, recompute: bool | str | Policy = True, verify: bool = False) -> ModuleT:
    """Make ``model`` keep less for backward: swap its layers for fused ones, in place, and recompute.

    The recompute engine is put around the model's forward (see :func:`pyckpt.recompute`): whatever can be rebuilt
    without a matrix product is not kept, and outputs and gradients are the same bits as without it.

    Swapped are modules whose type is exactly ``torch.nn.GELU``, ``SiLU``, ``ReLU``, ``LayerNorm``, ``RMSNorm``, ``Dropout``,
    ``Softmax`` or ``MultiheadAttention``, the activation function of torch's Transformer layers, and activation and norm classes
    of other libraries (Hugging Face's ``NewGELUActivation``, ``LlamaRMSNorm``, ``GemmaRMSNorm``; timm's ``LayerNorm2d``...) that
    are proven, by reading, recording and probing their forward in float64, to compute GELU (erf, tanh or sigmoid), SiLU, ReLU,
    LayerNorm or RMSNorm of the last dimensions or of dimension 1, whatever they call eps and weight, with ``weight`` or
    ``1 + weight``. The result has the dtype that the original gives it. Attention of two libraries becomes pyckpt's by their own
    switches, where it would store its weights: of transformers' models by ``attn_implementation``, of timm's modules by
    ``fused_attn``, which leaves calls without dropout or a learned mask to torch. All else is left, as are modules with a forward
    of their own, parametrized, quantized, TorchScript or already sharded (``fully_shard``) ones; :func:`report` says which and
    why. Converting twice changes nothing. A compiled model is converted inside its wrapper, and recompiles at its next call.

    Modules that two models share are one object: converting or reverting one model does so for both. After
    the swap, modules in training draw other dropout masks than torch.nn would from the same seed, and a
    Hugging Face activation or norm written out in several operations no longer rounds after each of them (nor,
    under autocast, returns float32 where ``pow`` would have; a norm that computes in float32 does so in float64
    for float64 input). ``torch.jit.script`` does not take converted modules; trace, export and compile do.

    Args:
        model: any module; a bare ``nn.LayerNorm`` too.
        recompute: the policy of the engine, as for :func:`pyckpt.recompute`; True: ``"pointwise"``, False: only swap, and take
            the engine away if it was put there before. It is never put on a module without submodules, which has nothing to
            rebuild. ``torch.compile`` decides by itself what to recompute, so on a
            compiled model it does nothing.
        verify: run old and new on random input, forward and gradient with respect to the input, on each
            module's device and dtype, before anything is swapped. Dropout is compared in evaluation. Modules
            without data of their own (on the meta device, sharded) are compared with random parameters.

    Returns:
        ``model`` itself.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: ``recompute`` is no policy.
        ConversionError: ``verify`` found a difference beyond rounding, or could not run a module; the model
            is unchanged.

    With the environment variable ``PYCKPT_DISABLE=1`` nothing is swapped, and the first call warns.
    """
    _require_module("convert", model)
    if not isinstance(recompute, bool):
        check_policy("convert", recompute)
    if backends.disabled():  # which has warned
        return model
    root = _unwrap(model)
    swaps = [(path, module, to) for path, module, to in _decisions(root) if isinstance(to, Target)]
    if verify:
        place = place_of(root) or (torch.device("cpu"), torch.get_default_dtype())
        for path, module, target in swaps:  # all of them, before the first is swapped
            verify_swap(_name(path), module, target, place)
    for _, module, target in swaps:
        _swap(module, target)
    for library in _libraries():
        library.convert_attention(root)
    scripted = isinstance(root, torch.jit.ScriptModule)
    if recompute and root is model and not scripted and next(root.children(), None) is not None:
        install(root, "pointwise" if recompute is True else recompute)
    elif not recompute:
        uninstall(root)
    return model


def revert(model: ModuleT) -> ModuleT:
    """Give every module that :func:`convert` swapped its original class back, and take the engine away, in place.

    Returns the model.

    Only those: a ``pyckpt.nn`` module that the model was built with stays. A module that was changed again
    after conversion (its class by ``fully_shard`` or ``parametrize``, its forward by a patch on the instance)
    is left, with a warning.

    Raises:
        TypeError: ``model`` is not a module.
    """
    _require_module("revert", model)
    root = _unwrap(model)
    uninstall(root)
    changed = {
        path: then for library in _libraries() for path, then in library.revert_attention(root).items()
    }
    for path, module in root.named_modules():
        if _MARK not in vars(module):
            continue
        if then := _changed_since(module):
            changed[path] = then
        else:
            _restore(module)
    for path, then in changed.items():
        text = f"pyckpt.revert: {_name(path)} was converted, then {then}. It is left so; undo that first."
        warnings.warn(text, stacklevel=2)
    return model


def report(model: nn.Module) -> Report:
    """The present state of ``model``: what :func:`convert` swapped, what is left and why. Changes nothing.

    On a model not converted yet, the modules that :func:`convert` would swap appear under ``left`` and say
    so.

    Raises:
        TypeError: ``model`` is not a module.
    """
    _require_module("report", model)
    result = Report(recompute=any(installed(part) is not None for part in _unwrap(model).modules()))
    for path, module, verdict in _decisions(_unwrap(model)):
        mark = vars(module).get(_MARK)
        if mark is not None:
            result.swapped.update(_swapped_rows(path, module, mark))
        elif type(module) in FUSED_CLASSES:
            result.native[path] = describe(type(module))
        elif isinstance(verdict, Target):
            for where, old, new in _planned_rows(path, module, verdict):
                result.left[where] = f"not converted: {old} would become {new}"
        elif verdict is not None:
            result.left[path] = verdict
        else:
            for name, function in _plain_functions(module):
                reason = f"{function}: a function, not a module; only torch's Transformer layers' is swapped"
                result.left[_join(path, name)] = reason
    for library in _libraries():
        for path, before in library.converted_attention(_unwrap(model)).items():
            result.swapped[_join(path, library.SETTING)] = f"{before} -> pyckpt"
    return result


def _swapped_rows(path: str, module: nn.Module, mark: tuple[Any, ...]) -> dict[str, str]:
    original, added, _, replaced = mark
    if replaced:
        new = {name: _function_name(vars(module)[name]) for name in replaced}
        return {_join(path, name): f"{_function_name(old)} -> {new[name]}" for name, old in replaced.items()}
    options = {name: getattr(module, name) for name in added}
    return {path: f"{describe(original)} -> {describe(type(module))}{_options_text(options)}"}


def _planned_rows(path: str, module: nn.Module, target: Target) -> Iterator[tuple[str, str, str]]:
    if target.cls is type(module):
        for name, function in target.attributes.items():
            yield _join(path, name), _function_name(vars(module)[name]), _function_name(function)
        return
    recipe = {name: value for name, value in target.attributes.items() if name == "_pyckpt_norm"}
    new = describe(target.cls) + (f" ({target.note})" if target.note else _options_text(recipe))
    yield path, describe(type(module)), new


def _options_text(options: dict[str, Any]) -> str:
    recipe = options.get("_pyckpt_norm")
    if recipe is not None:
        default = type(recipe)._field_defaults
        kept = ("offset", "channels_first", "dtype")
        shown = [
            f"{name}={getattr(recipe, name)!r}" for name in kept if getattr(recipe, name) != default[name]
        ]
        return f"({', '.join([recipe.function, *shown])})"
    text = ", ".join(f"{name}={value!r}" for name, value in options.items() if value)
    return f"({text})" if text else ""


@dataclass(frozen=True)
class Report:
    """What :func:`report` found; ``str()`` is a table.

    Paths are those of ``named_modules()`` (``""`` for the model itself; of a compiled model, those inside its
    wrapper); a module that is used in several places appears once, at the first.

    Attributes:
        swapped: path -> ``"nn.GELU -> pyckpt.nn.GELU"``.
        left: path -> the reason; norms, activations, dropouts, softmaxes, ``nn.MultiheadAttention`` and plain functions only.
        native: path -> class, of ``pyckpt.nn`` modules that the model was built with.
        recompute: whether the engine is on the model's forward, or on that of a part of it.
    """

    swapped: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    native: dict[str, str] = field(default_factory=dict)
    recompute: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Plain dictionaries, fit for JSON: the three mappings, ``counts`` with the size of each, and ``recompute``."""
        parts = {"swapped": dict(self.swapped), "left": dict(self.left), "native": dict(self.native)}
        counts = {name: len(rows) for name, rows in parts.items()}
        return {**parts, "counts": counts, "recompute": self.recompute}

    def __str__(self) -> str:
        titles = {"swapped": self.swapped, "built with pyckpt.nn": self.native, "left": self.left}
        counts = [f"{len(rows)} {title}" for title, rows in titles.items()]
        lines = ["pyckpt: " + ", ".join([*counts, f"recompute engine {'on' if self.recompute else 'off'}"])]
        tables = {title: _grouped(rows) for title, rows in titles.items() if rows}
        width = max((len(path) for table in tables.values() for path, _ in table), default=0)
        for title, table in tables.items():
            lines += ["", title]
            lines += [f"  {path:<{width}}  {count:>5}  {text}" for (path, text), count in table.items()]
        return "\n".join(lines)


def _grouped(rows: dict[str, str]) -> dict[tuple[str, str], int]:
    """(path with layer numbers as ``*``, text) -> how many, so that a deep model gives a short table."""
    alike: dict[tuple[str, str], list[str]] = {}
    for path, text in rows.items():
        alike.setdefault((re.sub(r"(?<![^.])\d+(?![^.])", "*", path), text), []).append(path)
    table: dict[tuple[str, str], int] = {}
    for (pattern, text), paths in alike.items():
        table[pattern if len(paths) > 1 else _name(paths[0]), text] = len(paths)
    return table


# ---- walking -----------------------------------------------------------------------------------------------


def _require_module(function: str, model: object) -> None:
    if isinstance(model, nn.Module):
        return
    if isinstance(model, type):
        got, remedy = f"the class {model.__name__}", f"pass an instance: {function}({model.__name__}(...))"
    elif isinstance(model, (list, tuple, set)):
        got, remedy = f"a {type(model).__name__}", "pass the models one by one, or as an nn.ModuleList"
    else:
        got, remedy = f"an object of type {type(model).__name__}", "pass the model itself"
    raise TypeError(f"pyckpt.{function}: expected a torch.nn.Module, got {got}; {remedy}.")


def _libraries() -> Iterator[Any]:
    """The integrations with libraries whose attention has a switch, of those that are loaded: else no model is one of theirs."""
    for name in ("transformers", "timm"):
        if name in sys.modules:
            with contextlib.suppress(ImportError):  # a version without attention interfaces
                yield importlib.import_module(f"pyckpt.integrations.{name}")


def _unwrap(model: nn.Module) -> nn.Module:
    """The module inside ``torch.compile(model)``. Unless Dynamo is loaded, nothing can be compiled yet."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    while dynamo is not None and isinstance(model, dynamo.OptimizedModule):
        model = model._orig_mod
    return model


def _decisions(root: nn.Module) -> Iterator[tuple[str, nn.Module, Target | str | None]]:
    float64 = any(p.dtype == torch.float64 for p in root.parameters())
    for path, module in root.named_modules():
        done = _MARK in vars(module) or type(module) in FUSED_CLASSES
        yield path, module, None if done else classify(module, float64=float64)


def _name(path: str) -> str:
    return path or "(the model itself)"


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


_FUNCTION_NAMES: dict[int, str] = {
    id(getattr(owner, name)): f"{owner.__name__}.{name}"
    for owner, names in (
        (F, "gelu silu relu softmax dropout layer_norm rms_norm"),
        (torch, "relu softmax dropout layer_norm rms_norm"),
        (fused_functions, "gelu silu relu"),
    )
    for name in names.split()
}


def _function_name(function: object) -> str:
    """``torch.nn.functional.gelu``, also where it is wrapped in a partial; empty for anything else."""
    return _FUNCTION_NAMES.get(id(function.func if isinstance(function, functools.partial) else function), "")


def _plain_functions(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Attributes that hold one of torch's functional layers."""
    for name, value in vars(module).items():
        function = _function_name(value)
        if function and not function.startswith("pyckpt"):
            yield name, function


# ---- swapping ----------------------------------------------------------------------------------------------


def _swap(module: nn.Module, target: Target) -> None:
    state = vars(module)
    stays = target.cls is type(
        module
    )  # then attributes are replaced; else only those that it lacks are added
    replaced = {name: state[name] for name in target.attributes} if stays else {}
    added = {name: value for name, value in target.attributes.items() if name not in state}
    # A method of the module itself kept as an attribute (GELUActivation.act) is pickled by name, to be looked
    # up in the class at load: by then the class is ours. So keep the name instead.
    methods = {}
    if added:  # not one of torch's own classes, whose methods ours inherit
        for name, value in state.items():
            if isinstance(value, types.MethodType) and value.__self__ is module:
                method = value.__func__.__name__
                if getattr(type(module), method, None) is value.__func__:
                    methods[name] = method
    state[_MARK] = (type(module), tuple(added), methods, replaced)
    # Before the class, so that a forward running in another thread finds what it needs.
    state.update(target.attributes if stays else added)
    module.__class__ = target.cls
    for name in methods:
        del state[name]


def _restore(module: nn.Module) -> None:
    state = vars(module)
    original, added, methods, replaced = state[_MARK]
    for name, method in methods.items():
        state[name] = types.MethodType(getattr(original, method), module)
    state.update(replaced)
    module.__class__ = original
    for name in (*added, _MARK):
        del state[name]


def _changed_since(module: nn.Module) -> str:
    """What was done to a converted module afterwards, so that it cannot be restored; usually nothing."""
    original, _, _, replaced = vars(module)[_MARK]
    if type(module) not in FUSED_CLASSES and not (replaced and type(module) is original):
        return f"became a {describe(type(module))}"
    if "forward" in vars(module):
        return "was given a forward of its own"
    if not all(_function_name(vars(module).get(name)).startswith("pyckpt") for name in replaced):
        return "was given another activation"
    return ""
