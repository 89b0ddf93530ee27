"""Swap a model's layers for their fused counterparts, and back.

A swap assigns ``module.__class__`` and nothing else that anyone could notice: the module object, its
parameters, buffers, hooks, training flag and place in the model stay, and so do optimizers, tied weights and
handles that refer to them.
"""

from __future__ import annotations

import functools
import re
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import backends
from ._targets import FUSED_CLASSES, Target, classify, describe

__all__ = ["ConversionError", "Report", "convert", "report", "revert"]

ModuleT = TypeVar("ModuleT", bound=nn.Module)

# What a swapped module remembers, under one name in its __dict__ (which repr, state_dict and named_* do not
# show, and which deepcopy, pickle and DataParallel's replicas carry along): (original class, names of
# attributes added, {attribute: method}). A plain tuple, so that a pickled model depends on no private class
# of ours.
_MARK = "_pyckpt_original"


class ConversionError(RuntimeError):
    """``convert(model, verify=True)`` found a module whose fused counterpart computes something else."""


def convert(model: ModuleT, *, verify: bool = False) -> ModuleT:
    """Swap the layers of ``model`` that pyckpt has fused, in place, and return the model.

    Swapped are modules whose type is exactly ``torch.nn.GELU``, ``SiLU``, ``ReLU``, ``LayerNorm``,
    ``RMSNorm``, ``Dropout`` or ``Softmax``, and activation classes of other libraries (Hugging Face's
    ``GELUActivation``, ``NewGELUActivation``...) that are proven, by recording and probing their forward in
    float64, to compute GELU (erf or tanh), SiLU or ReLU. Subclasses and modules with a forward of their own,
    parametrized, quantized, TorchScript or already sharded (``fully_shard``) modules are left; :func:`report`
    says which and why. Converting twice changes nothing. A compiled model is converted inside its wrapper,
    and recompiles at its next call.

    Modules that two models share are one object: converting or reverting one model does so for both. After
    the swap, modules in training draw other dropout masks than torch.nn would from the same seed, and a
    Hugging Face activation written out in several operations no longer rounds after each of them (nor, under
    autocast, returns float32 where ``pow`` would have). ``torch.jit.script`` does not take converted modules;
    trace, export and compile do.

    Args:
        model: any module; a bare ``nn.LayerNorm`` too.
        verify: run old and new on random input, forward and gradient with respect to the input, on each
            module's device and dtype, before anything is swapped. Dropout is compared in evaluation. Modules
            without data of their own (on the meta device, sharded) are compared with random parameters.

    Returns:
        ``model`` itself.

    Raises:
        TypeError: ``model`` is not a module.
        ConversionError: ``verify`` found a difference beyond rounding, or could not run a module; the model
            is unchanged.

    With the environment variable ``PYCKPT_DISABLE=1`` nothing is swapped, and the first call warns.
    """
    _require_module("convert", model)
    if backends.disabled():  # which has warned
        return model
    root = _unwrap(model)
    swaps = [(path, module, to) for path, module, to in _decisions(root) if isinstance(to, Target)]
    if verify:
        place = _place(root) or (torch.device("cpu"), torch.get_default_dtype())
        for path, module, target in swaps:  # all of them, before the first is swapped
            _verify(path, module, target, place)
    for _, module, target in swaps:
        _swap(module, target)
    return model


def revert(model: ModuleT) -> ModuleT:
    """Give every module that :func:`convert` swapped its original class back, in place, and return the model.

    Only those: a ``pyckpt.nn`` module that the model was built with stays. A module that was changed again
    after conversion (its class by ``fully_shard`` or ``parametrize``, its forward by a patch on the instance)
    is left, with a warning.

    Raises:
        TypeError: ``model`` is not a module.
    """
    _require_module("revert", model)
    for path, module in _unwrap(model).named_modules():
        if _MARK not in vars(module):
            continue
        if type(module) in FUSED_CLASSES and "forward" not in vars(module):
            _restore(module)
            continue
        ours = type(module) in FUSED_CLASSES
        then = "was given a forward of its own" if ours else f"became a {describe(type(module))}"
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
    result = Report()
    for path, module, verdict in _decisions(_unwrap(model)):
        mark = vars(module).get(_MARK)
        if mark is not None:
            options = ", ".join(
                f"{name}={getattr(module, name)!r}" for name in mark[1] if getattr(module, name)
            )
            new = describe(type(module)) + (f"({options})" if options else "")
            result.swapped[path] = f"{describe(mark[0])} -> {new}"
        elif type(module) in FUSED_CLASSES:
            result.native[path] = describe(type(module))
        elif isinstance(verdict, Target):
            new = describe(verdict.cls) + (f" ({verdict.note})" if verdict.note else "")
            result.left[path] = f"not converted: {describe(type(module))} would become {new}"
        elif verdict is not None:
            result.left[path] = verdict
        else:
            for name, function in _plain_functions(module):
                where = f"{path}.{name}" if path else name
                result.left[where] = f"{function}: a function, not a module; it cannot be swapped"
    return result


@dataclass(frozen=True)
class Report:
    """What :func:`report` found; ``str()`` is a table.

    Paths are those of ``named_modules()`` (``""`` for the model itself; of a compiled model, those inside its
    wrapper); a module that is used in several places appears once, at the first.

    Attributes:
        swapped: path -> ``"nn.GELU -> pyckpt.nn.GELU"``.
        left: path -> the reason; norms, activations, dropouts and softmaxes only.
        native: path -> class, of ``pyckpt.nn`` modules that the model was built with.
    """

    swapped: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    native: dict[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain dictionaries, fit for JSON: the three mappings, and ``counts`` with the size of each."""
        parts = {"swapped": dict(self.swapped), "left": dict(self.left), "native": dict(self.native)}
        return {**parts, "counts": {name: len(rows) for name, rows in parts.items()}}

    def __str__(self) -> str:
        titles = {"swapped": self.swapped, "built with pyckpt.nn": self.native, "left": self.left}
        lines = ["pyckpt: " + ", ".join(f"{len(rows)} {title}" for title, rows in titles.items())]
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


def _unwrap(model: nn.Module) -> nn.Module:
    """The module inside ``torch.compile(model)``. Unless Dynamo is loaded, nothing can be compiled yet."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    while dynamo is not None and isinstance(model, dynamo.OptimizedModule):
        model = model._orig_mod
    return model


def _decisions(root: nn.Module) -> Iterator[tuple[str, nn.Module, Target | str | None]]:
    float64 = any(p.dtype == torch.float64 for p in root.parameters())
    for path, module in root.named_modules():
        yield path, module, None if type(module) in FUSED_CLASSES else classify(module, float64=float64)


def _name(path: str) -> str:
    return path or "(the model itself)"


_PLAIN_FUNCTIONS: dict[int, str] = {
    id(getattr(owner, name)): f"{owner.__name__}.{name}"
    for owner, names in (
        (F, "gelu silu relu softmax dropout layer_norm rms_norm"),
        (torch, "relu softmax dropout layer_norm rms_norm"),
    )
    for name in names.split()
}


def _plain_functions(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Attributes that hold one of torch's functional layers, as nn.TransformerEncoderLayer's activation."""
    for name, value in vars(module).items():
        function = value.func if isinstance(value, functools.partial) else value
        if id(function) in _PLAIN_FUNCTIONS:
            yield name, _PLAIN_FUNCTIONS[id(function)]


# ---- swapping ----------------------------------------------------------------------------------------------


def _swap(module: nn.Module, target: Target) -> None:
    state = vars(module)
    added = {name: value for name, value in target.attributes.items() if name not in state}
    # A method of the module itself kept as an attribute (GELUActivation.act) is pickled by name, to be looked
    # up in the class at load: by then the class is ours. So keep the name instead.
    methods = {}
    if target.attributes:  # not one of torch's own classes, whose methods ours inherit
        for name, value in state.items():
            if isinstance(value, types.MethodType) and value.__self__ is module:
                method = value.__func__.__name__
                if getattr(type(module), method, None) is value.__func__:
                    methods[name] = method
    state[_MARK] = (type(module), tuple(added), methods)
    state.update(added)  # before the class, so that a forward running in another thread finds what it needs
    module.__class__ = target.cls
    for name in methods:
        del state[name]


def _restore(module: nn.Module) -> None:
    state = vars(module)
    original, added, methods = state[_MARK]
    for name, method in methods.items():
        state[name] = types.MethodType(getattr(original, method), module)
    module.__class__ = original
    for name in (*added, _MARK):
        del state[name]


# ---- verifying ---------------------------------------------------------------------------------------------


_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _place(module: nn.Module) -> tuple[torch.device, torch.dtype] | None:
    """Device and dtype of the module's first floating-point tensor."""
    tensors = (t for t in (*module.parameters(), *module.buffers()) if t.dtype in _FLOATS)
    return next(((t.device, t.dtype) for t in tensors), None)


def _verify(path: str, module: nn.Module, target: Target, place: tuple[torch.device, torch.dtype]) -> None:
    """Compare old and new class on copies of ``module``; raise :class:`ConversionError` if they differ.

    Twice: in float64 on the CPU, where another function cannot hide behind rounding, and in the module's
    dtype on its device, where the new class may be as far from the float64 values as the old one, plus a
    tenth and four units in the last place.
    """
    what = f"pyckpt.convert: {_name(path)} ({describe(type(module))} -> {describe(target.cls)})"
    device, dtype = _place(module) or place
    device = torch.device("cpu") if device.type == "meta" else device
    generator = torch.Generator("cpu").manual_seed(0)  # the user's random numbers stay as they are
    random = functools.partial(torch.randn, generator=generator, dtype=torch.float64, device="cpu")
    try:
        with warnings.catch_warnings(), torch.inference_mode(False), torch.enable_grad():
            warnings.simplefilter("ignore")  # nn.Softmax() without dim
            old = _twin(module, functools.partial(_values, random=random, device=device))
            x = random(_example_shape(module)).mul_(3.0).to(dtype).to(device)
            runs = []
            for before, example in ((_twin(old, _exact), _exact(x)), (old, x)):
                after = _twin(before, lambda tensor: tensor)
                vars(after).update(target.attributes)
                after.__class__ = target.cls
                runs += [_run(before, example), _run(after, example)]
    except Exception as error:
        raise ConversionError(
            f"{what} could not be verified: {type(error).__name__}: {error}. The model is unchanged. "
            "Convert it before sharding or wrapping it, or convert without verify."
        ) from error
    for name, truth, same, theirs, ours in zip(("output", "gradient"), *runs, strict=True):
        if (theirs.shape, theirs.dtype) != (ours.shape, ours.dtype):
            raise ConversionError(
                f"{what}: the {name} has shape {tuple(ours.shape)} and dtype {ours.dtype}, the original's "
                f"{tuple(theirs.shape)} and {theirs.dtype}. The model is unchanged; please report this."
            )
        finite = truth.isfinite()
        if not finite.any():
            continue
        scale = float(truth[finite].abs().max())
        errors = (float((_exact(t) - truth)[finite].abs().max()) for t in (same, theirs, ours))
        error64, error_theirs, error_ours = errors
        allowed = max(1.1 * error_theirs + 4.0 * torch.finfo(dtype).eps * scale, 1e-12 * scale)
        if not (error64 <= 1e-7 * scale and error_ours <= allowed):
            raise ConversionError(
                f"{what}: on input of shape {tuple(x.shape)} the {name} is off by {error64:.1e} in float64, "
                f"and by {error_ours:.1e} in {dtype} on {device}, where rounding explains {allowed:.1e}. "
                "The model is unchanged; please report this."
            )


def _example_shape(module: nn.Module) -> tuple[int, ...]:
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        return (4, *module.normalized_shape)
    if isinstance(module, nn.Softmax) and module.dim is not None:
        return (3,) * max(2, module.dim + 1, -module.dim)
    return (4, 33)


def _twin(module: nn.Module, values: Callable[[Tensor], Tensor]) -> nn.Module:
    """A copy in evaluation mode, each tensor (weight_norm's plain ones too) replaced by ``values`` of it."""
    twin = type(module).__new__(type(module))
    state: dict[str, Any] = {
        name: values(v) if isinstance(v, Tensor) else v for name, v in vars(module).items()
    }
    for group in ("_parameters", "_buffers"):
        state[group] = {name: None if t is None else values(t) for name, t in state[group].items()}
    vars(twin).update(state, training=False)
    return twin


def _values(tensor: Tensor, random: Callable[..., Tensor], device: torch.device) -> Tensor:
    """The tensor's own values; random ones near 1 where it has none here (on the meta device, sharded)."""
    if tensor.is_meta or type(tensor) not in (Tensor, nn.Parameter):
        return (1.0 + 0.1 * random(tensor.shape)).to(tensor.dtype).to(device)
    return tensor.detach().clone()


def _exact(tensor: Tensor) -> Tensor:
    tensor = tensor.cpu()  # first: not every device has float64
    return tensor.double() if tensor.is_floating_point() else tensor


def _run(module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Forward, past any hooks, and the gradient of a weighted sum of the output with respect to the input."""
    with torch.autocast(x.device.type, enabled=False):
        leaf = x.detach().clone().requires_grad_()
        y = module.forward(leaf * 1.0)  # not a leaf: the module may work in place
        weights = (
            torch.linspace(0.0, 7.0, y.numel(), dtype=torch.float64, device="cpu").cos().reshape(y.shape)
        )
        (gradient,) = torch.autograd.grad(y, leaf, weights.to(y.dtype).to(y.device))
    return y.detach(), gradient
