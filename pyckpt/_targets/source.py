"""Read the code of a forward before running it: what recording cannot see.

A look at the clock, at Python's random numbers, at a global flag or at autocast's state calls no torch function.
So names that a forward refers to must be known to be harmless, and it must not assign to anything but local
variables.
"""

from __future__ import annotations

import dis
import functools
import inspect
import math
import types
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .base import Unprovable, describe
from .recording import ELEMENTWISE, NORMALISING

_BUILTINS = frozenset({super, float, int, bool, tuple, isinstance, getattr, abs})
_HARMLESS = ELEMENTWISE | NORMALISING | _BUILTINS
_CAST_METHODS = frozenset({"float", "double", "half", "bfloat16", "to", "type"})  # of Tensor and of Module


def options_of(module: nn.Module) -> dict[str, Any]:
    """What the instance holds beyond what every module does."""
    return {name: value for name, value in vars(module).items() if name not in _MODULE_STATE}


_MODULE_STATE = frozenset(vars(nn.Module())) | {"_compiled_call_impl"}
_PLAIN_CLASS_ATTRIBUTES = frozenset[str]().union(
    ("__init__", "forward", "extra_repr", "__repr__", "__module__", "__doc__", "__dict__", "__weakref__"),
    ("__qualname__", "__annotations__", "__annotate__", "__annotate_func__", "__annotations_cache__"),
    (
        "__firstlineno__",
        "__static_attributes__",
        "__constants__",
        "__annotations_cache__",
        "__conditional_annotations__",
    ),
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
    if isinstance(value, types.BuiltinFunctionType):
        return (types.FunctionType, value)
    if isinstance(value, types.FunctionType) and not value.__closure__:
        return (types.FunctionType, value)
    raise Unprovable(
        f"{describe(owner)} holds a {type(value).__name__} in attribute {name!r}, which may be state"
    )


def check_class(cls: type[nn.Module], options: dict[str, Any]) -> None:
    """Refuse a class with more to it than ``forward(x)``: other arguments, methods, state, side effects."""
    for base in _own_classes(cls):
        for name, value in vars(base).items():
            if name in _PLAIN_CLASS_ATTRIBUTES:
                continue
            if hasattr(nn.Module, name):
                raise Unprovable(f"{describe(cls)} overrides {name}")
            function = callable(value) or isinstance(value, (property, staticmethod, classmethod))
            public = not name.startswith("_") or name.endswith("__")
            if function and public and name != "reset_parameters":  # whose effect is compared
                raise Unprovable(f"{describe(cls)} has more to it than forward: {name}")
            if not function:
                freeze(name, value, cls)
    _, *parameters = inspect.signature(cls.forward, follow_wrapped=False).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if [p.kind in kinds and p.default is inspect.Parameter.empty for p in parameters] != [True]:
        raise Unprovable(f"{describe(cls)}.forward takes other arguments than one tensor")
    reader = _Reader(cls)
    if not cls.forward.__module__.startswith("torch.nn.modules."):
        reader.read(cls.forward)
    for value in options.values():
        reader.read(value)


def _own_classes(cls: type[nn.Module]) -> list[type]:
    """``cls`` and its bases down to the first that is torch's own; nothing else may be mixed in."""
    own = [c for c in cls.__mro__ if not c.__module__.startswith("torch.nn.modules.")]
    if own.pop() is not object or cls.__mro__[: len(own)] != tuple(own):
        raise Unprovable(f"{describe(cls)} has other base classes than torch.nn.Module")
    return own


class _Reader:
    """Reads functions, and those of the class and of its module that they refer to."""

    def __init__(self, cls: type[nn.Module]) -> None:
        self.cls, self.own, self.seen = cls, _own_classes(cls), set[int]()

    def refuse(self, why: str) -> None:
        raise Unprovable(f"{describe(self.cls)}.forward {why}")

    def read(self, value: Any) -> None:
        while isinstance(value, (functools.partial, types.MethodType, staticmethod, classmethod, property)):
            if isinstance(value, property):
                value = value.fget
            else:
                value = value.func if isinstance(value, functools.partial) else value.__func__
        if not callable(value) or value in _HARMLESS or id(value) in self.seen:
            return
        if not isinstance(value, types.FunctionType) or value.__module__.partition(".")[0] == "torch":
            self.refuse(f"calls {getattr(value, '__name__', type(value).__name__)}")
        self.seen.add(id(value))
        for default in (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()):
            freeze(f"a default of {value.__name__}", default, self.cls)
        self._read_code(value.__code__, value.__globals__)

    def _read_code(self, code: types.CodeType, names: dict[str, Any]) -> None:
        if set(code.co_freevars) - {"__class__"}:
            self.refuse("is a closure: it may depend on what surrounds it")
        if code.co_flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR):
            self.refuse("is a generator or coroutine")
        instructions = list(dis.get_instructions(code))
        for here, instruction in enumerate(instructions):
            name, argument = instruction.opname, instruction.argval
            if name in ("STORE_ATTR", "DELETE_ATTR"):
                self.refuse(f"changes its own attributes ({argument})")
            if name.startswith(("STORE_GLOBAL", "DELETE_GLOBAL", "STORE_SUBSCR", "DELETE_SUBSCR", "IMPORT_")):
                self.refuse("changes or imports something")
            if name in ("SETUP_FINALLY", "SETUP_WITH", "BEFORE_WITH", "PUSH_EXC_INFO", "WITH_EXCEPT_START"):
                self.refuse("has a with or try statement: it may depend on modes or errors")
            if name in ("LOAD_GLOBAL", "LOAD_NAME"):
                self._read_global(argument, names, _attributes(instructions[here + 1 :]))
            if name in _ATTRIBUTE_LOADS:
                self._read_attribute(argument)
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self._read_code(constant, names)

    def _read_global(self, name: str, names: dict[str, Any], attributes: Iterator[str]) -> None:
        builtins = names["__builtins__"]
        known = names if name in names else builtins if isinstance(builtins, dict) else vars(builtins)
        if name not in known:
            self.refuse(f"refers to {name}, which does not exist")
        value: Any = known[name]
        while isinstance(value, types.ModuleType):
            attribute = next(attributes, None)
            if attribute is None or not hasattr(value, attribute):
                self.refuse(f"refers to the module {name}")
            value, name = getattr(value, str(attribute)), f"{name}.{attribute}"
        if (isinstance(value, Hashable) and value in _HARMLESS) or isinstance(value, torch.dtype):
            return
        if isinstance(value, (float, str)) or type(value) is int:  # True is an int too, and a flag
            return
        if value is Tensor or (isinstance(value, type) and value.__module__.startswith("torch.nn.modules.")):
            return
        if getattr(math, getattr(value, "__name__", ""), None) is value or value in self.own:
            return
        if isinstance(value, types.FunctionType) and value.__module__.partition(".")[0] != "torch":
            return self.read(value)
        self.refuse(f"refers to {name}, so that it may depend on more than its input")

    def _read_attribute(self, name: str) -> None:
        if name.startswith("__"):
            self.refuse(f"refers to {name}")
        for base in self.own:
            if name in vars(base):
                self.read(vars(base)[name])
        module_method: Callable[..., Any] | None = getattr(nn.Module, name, None)
        if callable(module_method) and name != "forward" and name not in _CAST_METHODS:
            self.refuse(f"calls the module's {name}")


_ATTRIBUTE_LOADS = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR")


def _attributes(instructions: list[dis.Instruction]) -> Iterator[str]:
    for instruction in instructions:
        if instruction.opname in _ATTRIBUTE_LOADS:
            yield instruction.argval
        elif instruction.opname not in ("CACHE", "EXTENDED_ARG"):
            return
