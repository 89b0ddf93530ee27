"""Which modules :func:`pyckpt.convert` may swap, and the proof that a swap changes nothing.

The torch.nn layers are known by their exact type. Activation classes of other libraries (Hugging Face has a
dozen) are known by what they compute, never by name or import path: ``forward`` is recorded as a graph of
elementwise operations on its one input, then compared with the fused function, values and derivative, in
float64. Whatever fails is left alone, with the reason.
"""

from __future__ import annotations

import functools
import inspect
import math
import operator
import re
import types
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.proxy import GraphAppendingTracer
from torch.nn.modules import activation as torch_activations
from torch.nn.utils.parametrize import is_parametrized

from . import nn as fused

TORCH_CLASSES: dict[type[nn.Module], type[nn.Module]] = {
    nn.GELU: fused.GELU,
    nn.SiLU: fused.SiLU,
    nn.ReLU: fused.ReLU,
    nn.LayerNorm: fused.LayerNorm,
    nn.RMSNorm: fused.RMSNorm,
    nn.Dropout: fused.Dropout,
    nn.Softmax: fused.Softmax,
}
FUSED_CLASSES = frozenset(TORCH_CLASSES.values())


@dataclass(frozen=True)
class Target:
    """What a module becomes: its new class, attributes that this one reads and the old lacks, a remark."""

    cls: type[nn.Module]
    attributes: dict[str, Any] = field(default_factory=dict)
    note: str = ""


def describe(cls: type) -> str:
    """``nn.GELU`` for torch's own layers, ``pyckpt.nn.GELU`` for ours, the full dotted name for others."""
    if cls in FUSED_CLASSES:
        return f"pyckpt.nn.{cls.__name__}"
    if getattr(nn, cls.__name__, None) is cls:
        return f"nn.{cls.__name__}"
    return f"{cls.__module__}.{cls.__qualname__}"


def classify(module: nn.Module, *, float64: bool = False) -> Target | str | None:
    """Decide about one module: a :class:`Target` to swap to, a reason to leave it, or None: not our concern.

    ``float64`` says that the model holds float64 parameters: activation classes whose constants are only
    accurate to float32 are then left, since there the difference would be seen.
    """
    cls = type(module)
    if cls in TORCH_CLASSES:
        return _instance_obstacle(module) or Target(TORCH_CLASSES[cls])
    if isinstance(module, torch.jit.ScriptModule):
        name = str(getattr(module, "original_name", cls.__name__))
        return "TorchScript module: its forward is compiled already" if _expected(name, module) else None
    if isinstance(module, _FAMILIES):
        return _why_not_torch(module)
    if cls.__module__.startswith("torch.nn.modules."):  # nn.Linear, nn.Identity, containers...
        return None
    verdict = _prove(module)
    if isinstance(verdict, _Proof):
        if not float64 or verdict.error <= EXACT:
            return verdict.target
        new = describe(verdict.target.cls)
        verdict = f"equals {new} only to {verdict.error:.0e}, and the model has float64 parameters"
    return verdict if _expected(cls.__name__, module) else None


# ---- torch.nn's own classes --------------------------------------------------------------------------------

_FAMILIES: tuple[type[nn.Module], ...] = (
    nn.LayerNorm,
    nn.RMSNorm,
    nn.GroupNorm,
    nn.LocalResponseNorm,
    nn.CrossMapLRN2d,
    nn.modules.batchnorm._NormBase,  # batch and instance norms
    nn.modules.dropout._DropoutNd,
    *(getattr(nn, name) for name in torch_activations.__all__ if name != "MultiheadAttention"),
)


def _instance_obstacle(module: nn.Module) -> str:
    """Why this instance, though of a class we serve, must stay as it is; empty if there is no reason."""
    cls = type(module)
    if "forward" in vars(module):
        return "has a forward of its own, set on the instance (accelerate, Liger and others do so)"
    forward = cls.forward
    if (forward.__module__, forward.__qualname__) != (cls.__module__, f"{cls.__name__}.forward"):
        return f"{describe(cls)}.forward has been replaced by {forward.__module__}.{forward.__qualname__}"
    if getattr(module, "qconfig", None) is not None:
        return "prepared for quantization (qconfig): torch.ao looks it up by its class"
    if any(p is not None and nn.parameter.is_lazy(p) for p in module._parameters.values()):
        return "not initialised yet: run one forward, then convert"
    return ""


def _why_not_torch(module: nn.Module) -> str:
    """The reason why an instance of torch's norm, activation, dropout and softmax families is not swapped."""
    cls = type(module)
    if cls.__module__.startswith("torch.nn.modules."):
        return f"no fused counterpart of {describe(cls)}"
    if is_parametrized(module):
        return "parametrized (torch.nn.utils.parametrize): its class was made for this instance"
    if re.match(r"torch\.(ao\.)?(nn\.)?(intrinsic|qat|quantiz)", cls.__module__) or cls.__module__.startswith(
        "torch.ao."
    ):
        return f"quantized or prepared for quantization ({describe(cls)})"
    base = next(
        c for c in cls.__mro__[1:] if c in FUSED_CLASSES or c.__module__.startswith("torch.nn.modules.")
    )
    if any(c.__name__ == "FSDPModule" for c in cls.__mro__):
        return f"{cls.__name__} was made from {describe(base)} by fully_shard: convert before sharding"
    if cls.forward is getattr(base, "forward", None):
        return f"{describe(cls)} is a subclass of {describe(base)}; only {describe(base)} itself is swapped"
    return f"{describe(cls)}, a subclass of {describe(base)}, has a forward of its own"


_NAMES = re.compile(
    r"norm(?!al)|gelu|relu|silu|swish|mish|dropout|drop_?path|softmax|softplus|activation", re.IGNORECASE
)


def _expected(name: str, module: nn.Module) -> bool:
    """Would a reader of the report look for this one? By name; modules with children are blocks."""
    return not module._modules and bool(_NAMES.search(name) or re.search(r"(^|[a-z_])Act($|[A-Z_\d])", name))


# ---- activation classes of other libraries -----------------------------------------------------------------
# Two measures, both relative to |x| for values (the natural scale of a function with a linear tail: near -6
# the value itself is the difference of two equal numbers) and absolute for derivatives. erf and tanh GELU are
# 2e-4 apart by it.

EXACT = 4e-12  # the same formula in float64; FastGELU's constant, rounded to ten digits, costs 1e-12
FLOAT32 = 1e-8  # constants rounded to float32: a sixth of the rounding error that float32 makes anyway

_FUNCTIONS: tuple[tuple[Callable[[Tensor], Tensor], Target], ...] = (
    (F.gelu, Target(fused.GELU, {"approximate": "none"})),
    (functools.partial(F.gelu, approximate="tanh"), Target(fused.GELU, {"approximate": "tanh"}, note="tanh")),
    (F.silu, Target(fused.SiLU, {"inplace": False})),
    (F.relu, Target(fused.ReLU, {"inplace": False})),
)

# Elementwise, without side effects or randomness: as functions of torch and as methods of a tensor alike.
_PURE_METHODS = frozenset[str]().union(
    ("add", "sub", "subtract", "mul", "multiply", "div", "true_divide", "neg", "abs", "sign", "reciprocal"),
    ("pow", "square", "sqrt", "rsqrt", "exp", "expm1", "log", "log1p", "tanh", "erf", "erfc", "sigmoid"),
    (
        "relu",
        "clamp",
        "clip",
        "clamp_min",
        "clamp_max",
        "maximum",
        "minimum",
        "where",
        "gt",
        "ge",
        "lt",
        "le",
    ),
)
_PURE_FUNCTIONS = frozenset(getattr(torch, name) for name in _PURE_METHODS).union(
    (F.gelu, F.silu, F.relu, F.relu6, F.sigmoid, F.tanh, F.softplus, F.mish, F.hardswish, F.leaky_relu),
    (operator.add, operator.sub, operator.mul, operator.truediv, operator.neg, operator.pos, operator.pow),
    (operator.abs, operator.gt, operator.ge, operator.lt, operator.le),
)

_MODULE_STATE = frozenset(vars(nn.Module())) | {"_compiled_call_impl"}
_PLAIN_CLASS_ATTRIBUTES = frozenset[str]().union(
    ("__init__", "forward", "extra_repr", "__repr__", "__module__", "__doc__", "__dict__", "__weakref__"),
    ("__qualname__", "__annotations__", "__annotate__", "__annotate_func__", "__annotations_cache__"),
    ("__firstlineno__", "__static_attributes__", "__constants__"),
)


class _Unprovable(Exception):
    """Carries the reason why a class cannot be shown to compute one of our functions."""


@dataclass(frozen=True)
class _Proof:
    target: Target
    error: float  # largest deviation found, by the measure above


# Proofs and refusals, by class, then by forward and options. Weak: classes made in a notebook can die.
_verdicts: weakref.WeakKeyDictionary[type, dict[Hashable, _Proof | str]] = weakref.WeakKeyDictionary()


def _prove(module: nn.Module) -> _Proof | str:
    """The proof that ``module`` computes one of our activations on any input, or why there is none."""
    cls = type(module)
    try:
        if module._parameters or module._buffers or module._modules:
            raise _Unprovable(f"{describe(cls)} has parameters, buffers or submodules: no plain activation")
        if "forward" in vars(module):
            raise _Unprovable("has a forward of its own, set on the instance")
        options = {name: value for name, value in vars(module).items() if name not in _MODULE_STATE}
        frozen = tuple((name, _freeze(name, value, module)) for name, value in sorted(options.items()))
    except _Unprovable as reason:
        return str(reason)
    known, key = _verdicts.setdefault(cls, {}), (cls.forward, frozen)
    if key not in known:
        try:
            _check_class(cls)
            verdict: _Proof | str = _compare(_fresh(module, options))
        except _Unprovable as reason:
            verdict = str(reason)
        except Exception as error:  # not cached: the cause may lie around us, such as a fake tensor mode
            return f"{describe(cls)} could not be probed ({type(error).__name__})"
        known[key] = verdict
    return known[key]


def _freeze(name: str, value: object, module: nn.Module) -> Hashable:
    """A hashable stand-in for an instance option that cannot change under our feet; all else is state."""
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype)):
        return (type(value), value)  # the type too: 1 == 1.0 == True
    if isinstance(value, tuple):
        return (tuple, tuple(_freeze(name, v, module) for v in value))
    if isinstance(value, functools.partial):
        keywords = tuple((k, _freeze(name, v, module)) for k, v in sorted(value.keywords.items()))
        function, arguments = _freeze(name, value.func, module), _freeze(name, value.args, module)
        return (functools.partial, function, arguments, keywords)
    if isinstance(value, types.MethodType) and value.__self__ is module:
        return (types.MethodType, value.__func__)
    if isinstance(value, (types.BuiltinFunctionType, types.FunctionType)) and not getattr(
        value, "__closure__", None
    ):
        return (types.FunctionType, value)
    raise _Unprovable(
        f"{describe(type(module))} holds a {type(value).__name__} in attribute {name!r}, which may be state"
    )


def _check_class(cls: type[nn.Module]) -> None:
    """Refuse a class with more to it than ``forward(x)``: other arguments, methods, overrides of Module's."""
    if cls.__mro__[-2:] != (nn.Module, object):
        raise _Unprovable(f"{describe(cls)} has other base classes than torch.nn.Module")
    for base in cls.__mro__[:-2]:
        for name, value in vars(base).items():
            if name in _PLAIN_CLASS_ATTRIBUTES:
                continue
            if hasattr(nn.Module, name):
                raise _Unprovable(f"{describe(cls)} overrides {name}")
            public = not name.startswith("_") or name.endswith("__")
            if public and (callable(value) or isinstance(value, (property, staticmethod, classmethod))):
                raise _Unprovable(f"{describe(cls)} has more to it than forward: {name}")
    _, *parameters = inspect.signature(cls.forward, follow_wrapped=False).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if [p.kind in kinds and p.default is inspect.Parameter.empty for p in parameters] != [True]:
        raise _Unprovable(f"{describe(cls)}.forward takes other arguments than one tensor")


def _fresh(module: nn.Module, options: dict[str, Any]) -> nn.Module:
    """Another instance with the same options: probing must not fire the user's hooks, nor change anything."""
    cls = type(module)
    twin = cls.__new__(cls)
    nn.Module.__init__(twin)
    for name, value in options.items():
        bound = isinstance(value, types.MethodType)  # _freeze let only methods of the module itself through
        vars(twin)[name] = types.MethodType(value.__func__, twin) if bound else value
    return twin


def _compare(module: nn.Module) -> _Proof:
    name, state = describe(type(module)), dict(vars(module))
    best: _Proof | None = None
    for training in (False, True):
        module.training = state["training"] = training
        _record(module)
        tried = [_deviation(module, function, target) for function, target in _FUNCTIONS]
        proof = min(tried, key=lambda p: p.error)
        if best is not None and best.target is not proof.target:
            raise _Unprovable(f"{name} computes different functions in training and in evaluation")
        best = proof if best is None else max(best, proof, key=lambda p: p.error)
    assert best is not None
    if vars(module).keys() != state.keys() or any(vars(module)[k] is not v for k, v in state.items()):
        raise _Unprovable(f"{name} changes its own attributes in forward")
    if not best.error <= FLOAT32:
        raise _Unprovable(
            f"{name} is none of gelu (erf or tanh), silu and relu: {best.error:.0e} away from the nearest"
        )
    for key, value in best.target.attributes.items():
        if key in state and state[key] != value:
            raise _Unprovable(
                f"{name} has an attribute {key} of another meaning than {describe(best.target.cls)}'s"
            )
    try:
        module.__class__ = best.target.cls
    except TypeError as error:  # __slots__
        raise _Unprovable(f"{name} has a memory layout of its own ({error})") from None
    if best.error <= EXACT:
        return best
    note = f"{best.target.note}, equal to {best.error:.0e}".lstrip(", ")
    return _Proof(Target(best.target.cls, best.target.attributes, note), best.error)


def _record(module: nn.Module) -> None:
    """Run forward on a stand-in that records what is done to it; refuse all but elementwise functions of it.

    This is what sample points alone could not show: no branch on values, shapes, dtypes or devices, no cast,
    no collective and no random number gets past it.
    """
    graph = torch.fx.Graph()
    name = describe(type(module))
    try:
        output = module.forward(torch.fx.Proxy(graph.placeholder("input"), GraphAppendingTracer(graph)))
    except Exception as error:
        raise _Unprovable(
            f"{name}.forward is no plain elementwise expression ({type(error).__name__})"
        ) from None
    if not isinstance(output, torch.fx.Proxy):
        raise _Unprovable(f"{name}.forward does not return a tensor made from its input")
    pure = {"call_function": _PURE_FUNCTIONS, "call_method": _PURE_METHODS, "placeholder": {"input"}}
    for node in graph.nodes:
        if node.target not in pure.get(node.op, ()):
            called = getattr(node.target, "__name__", node.target)
            raise _Unprovable(f"{name}.forward uses {called}, which is not known to act element by element")


def _probe() -> tuple[Tensor, Tensor]:
    """float64 points: the middle, the tails, both sides of zero down to 1e-12; then huge ones."""
    where: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}  # whatever default device is set
    middle, tiny = torch.linspace(-12.0, 12.0, 1537, **where), torch.logspace(-12.0, -1.0, 67, **where)
    tails = torch.tensor([20.0, 40.0, 100.0, 1e200, math.inf, math.nan], **where)
    return torch.cat([middle, tiny, -tiny, tails[:3], -tails[:3]]), torch.cat([tails[3:], -tails[3:]])


def _refuse_custom_derivatives(y: Tensor, name: str) -> None:
    """Refuse a result with a torch.autograd.Function in its graph: it may do anything in backward."""
    nodes = [y.grad_fn]
    while nodes:
        node = nodes.pop()
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            raise _Unprovable(f"{name} has a derivative of its own ({type(node).__name__})")
        nodes += [] if node is None else [following for following, _ in node.next_functions]


def _deviation(module: nn.Module, function: Callable[[Tensor], Tensor], target: Target) -> _Proof:
    """How far the module is from ``function``; raises if it writes to its input."""
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", enabled=False):
        points, odd = _probe()
        runs = []
        for call in (module.forward, function):
            leaf = points.clone().requires_grad_()
            x = leaf * 1.0  # not a leaf, so that a write in place would go through and be seen
            y = call(x)
            _refuse_custom_derivatives(y, describe(type(module)))  # before any is run
            if not torch.equal(x, points):
                raise _Unprovable(f"{describe(type(module))} writes to its input")
            runs.append((y.detach(), *torch.autograd.grad(y.sum(), leaf)))
        (y, dy), (want, dwant) = runs
        half = points.to(torch.bfloat16)
        same = module.forward(half).dtype == half.dtype
        same = same and torch.allclose(module.forward(odd), function(odd), rtol=0.0, atol=0.0, equal_nan=True)
        scale = torch.where(points == 0, 1.0, points.abs())
        error = float(torch.maximum((y - want).abs() / scale, (dy - dwant).abs()).max())
    if error <= FLOAT32 and not same:
        raise _Unprovable(
            f"{describe(type(module))} differs from {describe(target.cls)} at infinity or in dtype"
        )
    return _Proof(target, error if error == error else float("inf"))
