"""Run a forward under observation: which operations it applies to its input, parameters and constants."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .base import Unprovable


def _functions(names: str, *owners: Any) -> frozenset[Any]:
    return frozenset(getattr(owner, n) for owner in owners for n in names.split() if hasattr(owner, n))


# Without side effects or randomness, as functions and as methods of a tensor alike.
_ARITHMETIC = _functions(
    "add sub subtract rsub mul multiply div divide true_divide neg positive reciprocal pow square sqrt rsqrt"
    " __rsub__ __rdiv__ __rtruediv__ __pow__",
    torch,
    Tensor,
)
ELEMENTWISE = _ARITHMETIC.union(
    _functions(
        "abs sign exp expm1 log log1p tanh erf erfc sigmoid relu clamp clip clamp_min clamp_max maximum minimum where"
        " gt ge lt le __rpow__",
        torch,
        Tensor,
    ),
    _functions("gelu silu relu relu6 sigmoid tanh softplus mish hardswish leaky_relu", F),
)
STATISTICS = _functions("mean sum var var_mean", torch, Tensor) | _functions("layer_norm rms_norm", torch, F)
# Algebraic and free of branches: two such functions that agree on random points agree everywhere.
NORMALISING = _ARITHMETIC | STATISTICS | _functions("permute transpose movedim", torch, Tensor)
_OF_PARAMETERS = _functions("__getitem__ view reshape unsqueeze", Tensor)  # to broadcast them

_CASTS = _functions("to type type_as float double half bfloat16", Tensor)
_DTYPE = Tensor.dtype.__get__  # type: ignore[attr-defined]
_CONSTANTS = (bool, int, float, str, type(None), type(...))


class Record(TorchFunctionMode):
    """While this mode is active, whatever torch function is called is written down, or refused.

    Sample points alone could not show what this does: no branch on values, shapes or devices, no collective, no
    random number and no tensor from elsewhere gets past it. A look at a dtype does; so callers try all dtypes.

    Args:
        forward: whose doing is observed; named in refusals.
        roots: the tensors that it may start from, by name: ``input`` and parameters.
        allowed: the functions that it may call on tensors made from these.
        exact: do not round: casts of float64 to float32 are left out, as if arithmetic were exact.

    Attributes:
        calls: (function, arguments) in order, tensors by root or number of call, casts left out: two runs
            with equal ``calls`` compute the same function in exact arithmetic.
        casts: the dtypes cast to.
    """

    def __init__(
        self, forward: str, roots: Mapping[str, Tensor], allowed: frozenset[Any], *, exact: bool
    ) -> None:
        super().__init__()
        self.forward, self.allowed, self.exact = forward, allowed, exact
        self.parameters = roots.keys() - {"input"}
        self.symbols: dict[int, Any] = {id(tensor): name for name, tensor in roots.items()}
        self.dtypes = {tensor.dtype for tensor in roots.values()} | {torch.float32, torch.float64}
        self.kept: list[Tensor] = list(roots.values())  # so that no id is used twice
        self.calls: list[tuple[Any, ...]] = []
        self.casts: set[torch.dtype] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func == _DTYPE:
            return func(*args)
        if func in _CASTS:
            return self._cast(func, args, kwargs)
        reshapes_parameter = func in _OF_PARAMETERS and self.symbol(args[0]) in self.parameters
        if (func not in self.allowed and not reshapes_parameter) or "out" in kwargs:
            raise Unprovable(f"{self.forward} uses {_label(func)}, {_objection(func)}")
        call = (func.__name__, self.symbol(args), self.symbol(tuple(sorted(kwargs.items()))))
        result = func(*args, **kwargs)
        if reshapes_parameter:
            self._know(result, (call, self.symbol(args[0])))
        else:
            self.calls.append(call)
            for part, tensor in enumerate(result if isinstance(result, tuple) else (result,)):
                self._know(tensor, (len(self.calls), part))
        return result

    def _know(self, tensor: Tensor, symbol: Any) -> None:
        self.symbols[id(tensor)] = symbol
        self.kept.append(tensor)

    def _cast(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        symbol = self.symbol(args[0])
        for given in (*args[1:], *kwargs.values()):
            if isinstance(given, Tensor):
                self.symbol(given)  # refuses one from elsewhere
            elif not isinstance(given, torch.dtype):
                self._refuse_cast(func)
        result = func(*args, **kwargs)
        if result.dtype not in self.dtypes:
            self._refuse_cast(func)
        self.casts.add(result.dtype)
        if self.exact:
            return args[0]
        if result is not args[0]:
            self._know(result, symbol)
        return result

    def _refuse_cast(self, func: Any) -> None:
        raise Unprovable(
            f"{self.forward} uses {_label(func)}, to other than float32 or a dtype of its arguments"
        )

    def symbol(self, value: Any) -> Any:
        """A comparable stand-in: for tensors where they came from, for constants themselves with their type."""
        if isinstance(value, Tensor):
            if id(value) not in self.symbols:
                raise Unprovable(f"{self.forward} uses a tensor that is neither its input nor a parameter")
            return self.symbols[id(value)]
        if isinstance(value, (tuple, list, torch.Size)):
            return ("sequence", *(self.symbol(v) for v in value))
        if isinstance(value, slice):
            return ("slice", value.start, value.stop, value.step)
        if isinstance(value, _CONSTANTS):
            return (type(value), value)
        raise Unprovable(f"{self.forward} passes a {type(value).__name__} to a torch function")

    def constants(self) -> list[float]:
        """The numbers that occur among the arguments."""

        def numbers(symbol: Any) -> Iterator[float]:
            if isinstance(symbol, tuple):
                if len(symbol) == 2 and isinstance(symbol[1], float):
                    yield symbol[1]
                for part in symbol:
                    yield from numbers(part)

        return list(dict.fromkeys(numbers(tuple(self.calls))))


class Unrounded(TorchFunctionMode):
    """While this mode is active, float64 tensors stay float64 where they would be cast to float32."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _CASTS and args[0].dtype == torch.float64 and result.dtype == torch.float32:
            return args[0]
        return result


def _label(func: Any) -> str:
    """``shape`` for the getter of that property."""
    return str(func.__self__.__name__ if func.__name__ in ("__get__", "__set__") else func.__name__)


def _objection(func: Any) -> str:
    if _label(func) in (
        "__bool__",
        "item",
        "tolist",
        "__int__",
        "__float__",
        "__len__",
        "__iter__",
        "__contains__",
    ):
        return "so that it may depend on values"
    if _label(func) in (
        "shape",
        "size",
        "dim",
        "ndim",
        "numel",
        "device",
        "is_cuda",
        "is_contiguous",
        "stride",
    ):
        return "so that it may depend on more than values"
    return "which is not known to be part of an activation or norm"
