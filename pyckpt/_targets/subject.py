"""A class of another library under examination: fresh instances of it, and observed runs of these."""

from __future__ import annotations

import sys
import types
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .base import Unprovable, describe
from .recording import Record
from .source import Reader, check_class, freeze, members

_MODULE_STATE = frozenset(vars(nn.Module())) | {"_compiled_call_impl"}


class Subject:
    """The class of ``module`` with the options and the sizes of parameters that this instance has.

    Attributes:
        options: what the instance holds beyond what every module does; cannot change under our feet.
        shapes: of its parameters, by name.
        key: equal for instances that compute the same.

    Raises:
        Unprovable: the instance holds more than options.
    """

    def __init__(self, module: nn.Module) -> None:
        self.cls, self.name = type(module), describe(type(module))
        self.options = {name: value for name, value in vars(module).items() if name not in _MODULE_STATE}
        self.parameters = {n: None if p is None else tuple(p.shape) for n, p in module._parameters.items()}
        self.shapes: Mapping[str, tuple[int, ...]] = {
            n: s for n, s in self.parameters.items() if s is not None
        }
        self.buffers = tuple(module._buffers)
        frozen = [
            (name, freeze(name, value, self.cls, module)) for name, value in sorted(self.options.items())
        ]
        self.key = (tuple(frozen), tuple(self.shapes.items()), members(self.cls))

    def check_class(self) -> None:
        self.reader: Reader = check_class(self.cls, self.options, (*self.parameters, *self.buffers))

    def make(self, dtype: torch.dtype = torch.float64, **changes: Any) -> nn.Module:
        """Another instance, with ``changes`` of options: probing must not fire the user's hooks, nor change anything.

        Its parameters are random, its buffers (which we could not follow) not even readable.
        """
        twin = self.cls.__new__(self.cls)
        nn.Module.__init__(twin)
        for name, value in {**self.options, **changes}.items():
            bound = isinstance(
                value, types.MethodType
            )  # freeze let only methods of the module itself through
            vars(twin)[name] = types.MethodType(value.__func__, twin) if bound else value
        generator = torch.Generator("cpu").manual_seed(0)
        for name, shape in self.parameters.items():
            twin._parameters[name] = None
            if shape is not None:
                values = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
                twin._parameters[name] = nn.Parameter((0.5 * values + 0.7).to(dtype))
        for name in self.buffers:
            twin._buffers[name] = torch.empty(0, device="meta")
        return twin

    def run(
        self, module: nn.Module, x: Tensor, allowed: frozenset[Any], *, exact: bool = False
    ) -> tuple[Tensor, Record]:
        """``module.forward(x)`` recorded, and whatever Python code it ran read.

        The roots are the parameters, under their names, and ``input``.
        """
        parameters = {n: p for n, p in module._parameters.items() if p is not None}
        record = Record(f"{self.name}.forward", {**parameters, "input": x}, allowed, exact=exact)
        ran: set[types.CodeType] = set()

        def watch(frame: types.FrameType, event: str, _: Any) -> None:
            if event == "call":
                ran.add(frame.f_code)

        with record:
            profile = sys.getprofile()
            sys.setprofile(watch)
            try:
                output = module.forward(x)
            finally:
                sys.setprofile(profile)
        self.reader.read(ran)
        if not isinstance(output, Tensor) or id(output) not in record.symbols:
            raise Unprovable(f"{self.name}.forward does not return a tensor made from its input")
        return output, record
