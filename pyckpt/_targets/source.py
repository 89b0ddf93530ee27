"""Read the code of a forward before running it: what recording cannot see.

A look at the clock, at Python's random numbers, at a global flag or at autocast's state calls no torch function.
So names that a forward refers to must be known to be harmless, and it must not assign to anything but local
variables.
"""

from __future__ import annotations

import dis
import functools
import inspect
import itertools
import math
import types
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .base import Unprovable, describe
from .recording import ELEMENTWISE, NORMALISING

_BUILTINS = frozenset({super, float, int, bool, tuple, isinstance, abs})
_HARMLESS = ELEMENTWISE | NORMALISING | _BUILTINS
_CAST_METHODS = frozenset({"float", "double", "half", "bfloat16", "to", "type"})  # of Tensor and of Module


_PLAIN_CLASS_ATTRIBUTES = frozenset[str]().union(
    ("__init__", "forward", "extra_repr", "__repr__", "__module__", "__doc__", "__dict__", "__weakref__"),
    ("__qualname__", "__annotations__", "__annotate__", "__annotate_func__", "__annotations_cache__"),
    ("__firstlineno__", "__static_attributes__", "__constants__", "__conditional_annotations__"),
    # Of Hugging Face's kernels: kernelize() reads them, no forward does.
    ("kernel_layer_name", "kernel_condition"),
)


def freeze(name: str, value: object, owner: type, module: nn.Module | None = None) -> Hashable:
    """A hashable stand-in for an option that cannot change under our feet; all else is state."""
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype)):
        return (type(value), value)  # the type too: 1 == 1.0 == True
    if isinstance(value, tuple):
        return (tuple, tuple(freeze(name, v, owner, module) for v in value))
    if isinstance(value, functools.partial):
        keywords = tuple((k, freeze(name, v, owner, module)) for k, v in sorted(value.keywords.items()))
        function, arguments = (freeze(name, v, owner, module) for v in (value.func, value.args))
        return (functools.partial, function, arguments, keywords)
    if isinstance(value, types.MethodType) and value.__self__ is module:
        return (types.MethodType, value.__func__)
    if isinstance(value, types.BuiltinFunctionType) and value in _HARMLESS:
        return (types.FunctionType, value)
    if isinstance(value, types.FunctionType) and not value.__closure__:
        return (types.FunctionType, value)
    raise Unprovable(
        f"{describe(owner)} holds a {type(value).__name__} in attribute {name!r}, which may be state"
    )


def check_class(cls: type[nn.Module], options: Mapping[str, Any], attributes: Iterable[str]) -> Reader:
    """Refuse a class with more to it than ``forward(x)``: other arguments, methods, state, side effects.

    ``options`` are those of its instances, harmless, and ``attributes`` the names of its parameters and buffers.
    Returns what reads the code that is found to run; the forward's own has been read.
    """
    own = _own_classes(cls)
    for base in own:
        for name, value in vars(base).items():
            if name in _PLAIN_CLASS_ATTRIBUTES:
                continue
            if hasattr(nn.Module, name):
                raise Unprovable(f"{describe(cls)} overrides {name}")
            wrapper = isinstance(value, (property, staticmethod, classmethod))
            public = not name.startswith("_") or name.endswith("__")
            if (
                (callable(value) or wrapper) and public and name != "reset_parameters"
            ):  # whose effect is compared
                raise Unprovable(f"{describe(cls)} has more to it than forward: {name}")
            inner = (
                getattr(value, "fget" if isinstance(value, property) else "__func__") if wrapper else value
            )
            if not isinstance(inner, types.FunctionType):  # which is read if it runs
                freeze(name, inner, cls)
    _, *parameters = inspect.signature(cls.forward, follow_wrapped=False).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if [p.kind in kinds and p.default is inspect.Parameter.empty for p in parameters] != [True]:
        raise Unprovable(f"{describe(cls)}.forward takes other arguments than one tensor")
    if not isinstance(cls.forward, types.FunctionType):
        raise Unprovable(f"{describe(cls)}.forward is a {type(cls.forward).__name__}")
    reader = Reader(cls, own, options, attributes)
    reader.read({cls.forward.__code__})
    return reader


def _own_classes(cls: type[nn.Module]) -> list[type]:
    """``cls`` and its bases down to the first that is torch's own; nothing else may be mixed in."""
    own = [c for c in cls.__mro__ if not c.__module__.startswith("torch.nn.modules.")]
    if own.pop() is not object or cls.__mro__[: len(own)] != tuple(own):
        raise Unprovable(f"{describe(cls)} has other base classes than torch.nn.Module")
    return own


def members(cls: type[nn.Module]) -> Hashable:
    """Equal as long as nobody replaces a method or a constant of the class."""
    return tuple(
        (
            name,
            type(value),
            value if isinstance(value, (types.FunctionType, bool, int, float, str)) else id(value),
        )
        for base in _own_classes(cls)
        for name, value in vars(base).items()
    )


class Reader:
    """Reads code, and refuses what may do more than compute on its arguments."""

    def __init__(
        self, cls: type[nn.Module], own: list[type], options: Mapping[str, Any], attributes: Iterable[str]
    ) -> None:
        self.cls, self.own = cls, own
        self.attributes = {
            "forward",
            "training",
            *options,
            *attributes,
            *(name for c in own for name in vars(c)),
        }
        self.functions: dict[types.CodeType, types.FunctionType] = {}  # that are referred to
        self.seen = set[types.CodeType]()
        for value in (*options.values(), *(value for c in own for value in vars(c).values())):
            self._refer(value)

    def _refer(self, value: Any) -> None:
        """Note what functions there are. torch's own and ours need no reading."""
        if isinstance(value, (functools.partial, types.MethodType, staticmethod, classmethod)):
            self._refer(value.func if isinstance(value, functools.partial) else value.__func__)
        elif isinstance(value, property):
            self._refer(value.fget)
        elif isinstance(value, types.FunctionType) and not _of_torch(value.__module__):
            self.functions[value.__code__] = value

    def refuse(self, why: str) -> None:
        raise Unprovable(f"{describe(self.cls)}.forward {why}")

    def read(self, ran: set[types.CodeType]) -> None:
        """Read what of the code that ran has been referred to: other code ran for reasons around us, or is torch's."""
        while unread := (ran & self.functions.keys()) - self.seen:
            for code in unread:
                function = self.functions[code]
                for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
                    freeze(f"a default of {function.__name__}", default, self.cls)
                    self._refer(default)
                self._read(code, function.__globals__)

    def _read(self, code: types.CodeType, names: dict[str, Any]) -> None:
        self.seen.add(code)
        if set(code.co_freevars) - {"__class__"}:
            self.refuse("is a closure: it may depend on what surrounds it")
        if code.co_flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR):
            self.refuse("is a generator or coroutine")
        instructions = [i for i in dis.get_instructions(code) if i.opname not in ("CACHE", "EXTENDED_ARG")]
        resolved = 0  # instructions before this one have been looked at
        for here, instruction in enumerate(instructions):
            name, argument = instruction.opname, instruction.argval
            if name in ("STORE_ATTR", "DELETE_ATTR"):
                self.refuse(f"changes its own attributes ({argument})")
            if name.startswith(("STORE_GLOBAL", "DELETE_GLOBAL", "STORE_SUBSCR", "DELETE_SUBSCR", "IMPORT_")):
                self.refuse("changes or imports something")
            if name in (
                "SETUP_FINALLY",
                "SETUP_WITH",
                "BEFORE_WITH",
                "LOAD_SPECIAL",
                "PUSH_EXC_INFO",
                "WITH_EXCEPT_START",
            ):
                self.refuse("has a with or try statement: it may depend on modes or errors")
            if name in ("LOAD_GLOBAL", "LOAD_NAME"):
                chain = itertools.takewhile(lambda i: i.opname in _ATTRIBUTE_LOADS, instructions[here + 1 :])
                resolved = here + 1 + self._read_global(argument, names, [i.argval for i in chain])
            elif name in _ATTRIBUTE_LOADS and here >= resolved:
                self._read_attribute(argument)
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self._read(constant, names)

    def _read_global(self, name: str, names: dict[str, Any], attributes: list[str]) -> int:
        """Of a name, with the attributes taken of it; returns how many of these belong to a module's name."""
        builtins = names["__builtins__"]
        known = names if name in names else builtins if isinstance(builtins, dict) else vars(builtins)
        value, used = known.get(name), 0
        while isinstance(value, types.ModuleType) and used < len(attributes):
            name, value, used = f"{name}.{attributes[used]}", getattr(value, attributes[used], None), used + 1
        constant = isinstance(value, (float, str, torch.dtype)) or type(value) is int  # True is a flag
        module = getattr(value, "__module__", None)
        function = isinstance(value, types.FunctionType) and not _of_torch(module)  # is read if it runs
        layer = isinstance(value, type) and str(module).startswith("torch.nn.modules.")
        known_one = isinstance(value, Hashable) and (
            value in _HARMLESS or value in self.own or value is Tensor
        )
        of_math = value is not None and getattr(math, getattr(value, "__name__", ""), None) is value
        if not (constant or function or layer or known_one or of_math):
            self.refuse(f"refers to {name}, so that it may depend on more than its input")
        self._refer(value)
        return used

    def _read_attribute(self, name: str) -> None:
        """Of anything but a module: of a tensor (observed) or of the instance; nothing else is at hand."""
        if name in self.attributes or name in _CAST_METHODS:
            return
        if name.startswith("__") or not hasattr(Tensor, name) or callable(getattr(nn.Module, name, None)):
            self.refuse(f"refers to an attribute {name}")


def _of_torch(module: str | None) -> bool:
    return str(module).partition(".")[0] in ("torch", "pyckpt")


_ATTRIBUTE_LOADS = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR")
