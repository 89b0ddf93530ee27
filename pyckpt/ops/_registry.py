"""Definition and dispatch of the operators torch.ops.pyckpt.*.

There are three ways into an op:

- In plain eager mode the public function enters the autograd Function, which calls :meth:`Op.__call__`: the kernel of the
  backend, without a trip through torch's dispatcher (2.5 us a call).
- Under a dispatch mode (fake tensors, FLOP counters, compiled autograd) the same call goes to ``torch.ops.pyckpt``, so that
  the mode sees it.
- Under torch.compile, export, jit.trace, torch.func, forward-mode AD and for tensor subclasses :func:`lowered` is true and the
  public function is a plain PyTorch expression, which those tools can fuse, differentiate, batch or shard. For torch.compile
  dropout, softmax with dropout and attention stay one opaque op each.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch.autograd import forward_ad

from .. import backends

Kernel = Callable[..., Any]

LIBRARY = torch.library.Library("pyckpt", "DEF")

# dtype -> (DType of csrc/arguments.h, dtype of statistics and of the arithmetic)
DTYPES: dict[torch.dtype, tuple[int, torch.dtype]] = {
    torch.float32: (0, torch.float32),
    torch.bfloat16: (1, torch.float32),
    torch.float16: (2, torch.float32),
    torch.float64: (3, torch.float64),
}

_PLAIN = (torch.Tensor, torch.nn.Parameter)


class Unserved(NotImplementedError):
    """A backend was asked for by name, and its kernels are not made for the call."""


class Function(torch.autograd.Function):
    """Leaves out apply's steps for torch.func, 2 to 3 us a call: :func:`lowered` is true there."""

    apply = vars(torch._C._FunctionBase)["apply"]


class Op:
    """One operator ``torch.ops.pyckpt.<name>``.

    Args:
        schema: ``name(arguments) -> results`` in torch.library's syntax.
        fake: shapes and dtypes of the result from those of the arguments.
        reference: the op in plain differentiable PyTorch: its definition, its kernel on the reference backend, and what is
            differentiated where a gradient through the op itself is asked for.
    """

    all: ClassVar[list[Op]] = []

    def __init__(self, schema: str, *, fake: Kernel, reference: Kernel) -> None:
        Op.all.append(self)
        self.name = schema.partition("(")[0]
        self.family = re.sub("(_dropout)?_(fwd|bwd|recompute)$", "", self.name)  # of the public function
        self.reference = reference
        self.kernels: dict[str, Kernel] = {"reference": reference}
        self._differentiable: Kernel = reference
        # Of backends whose kernels are made for some calls only: what is in the way of one, or an empty string.
        self.partial: dict[str, Callable[..., str]] = {}
        self.guard: Kernel | None = None  # checks the arguments of raw calls, where a public function has not
        LIBRARY.define(schema)
        for key in ("CPU", "CUDA"):
            LIBRARY.impl(self.name, self._on_device, key)
        LIBRARY.impl(self.name, self._autograd, "Autograd")
        torch.library.register_fake(f"pyckpt::{self.name}", fake, lib=LIBRARY)
        self.overload = getattr(torch.ops.pyckpt, self.name).default

    def kernel(self, backend: str) -> Callable[[Kernel], Kernel]:
        """Decorator: the decorated function computes this op on `backend`. It sees plain tensors of that device."""

        def register(function: Kernel) -> Kernel:
            self.kernels[backend] = function
            return function

        return register

    def differentiable(self, function: Kernel) -> None:
        """Calls of the raw op that need a gradient go to `function` (an autograd Function) instead of the reference."""
        self._differentiable = function

    def __call__(self, backend: str, *args: Any) -> Any:
        """Runs the op on `backend`, without autograd; through torch's dispatcher where a dispatch mode has to see it."""
        if torch._C._len_torch_dispatch_stack():
            with backends.use(backend), torch._C._AutoDispatchBelowAutograd():
                return self.overload(*args)
        return self.on(backend)(*args)

    def in_backward(self, backend: str, *args: Any) -> Any:
        """Runs the op inside a backward: differentiable if that backward is itself being recorded, batched or given tangents."""
        if transformed() or torch._C._functorch.is_legacy_batchedtensor(args[0]):
            return self.reference(*args)
        if torch.is_grad_enabled():
            with backends.use(backend):
                return self.overload(*args)
        return self(backend, *args)

    def on(self, backend: str) -> Kernel:
        kernel = self.kernels.get(backend)
        if kernel is None:
            raise NotImplementedError(
                f"backend '{backend}' has no kernel for pyckpt::{self.name}; it exists on {', '.join(self.kernels)}"
            )
        return kernel

    def _on_device(self, *args: Any) -> Any:
        if self.guard is not None:
            self.guard(*args)
        x = next(a for a in args if isinstance(a, torch.Tensor))
        return self.on(self.backend_for(x, args))(*args)

    def backend_for(self, x: torch.Tensor, args: Sequence[Any]) -> str:
        """Name of the backend that serves a call on `x`: that of :func:`backend_of`, or the next one where it is not made for
        the call and was not asked for by name."""
        name = backend_of(x, self)
        problem = self.partial.get(name)
        return backends.select(x.device.type, self.family, name) if problem and problem(*args) else name

    def _autograd(self, *args: Any) -> Any:
        if transformed():
            return self.reference(*args)
        if torch.is_grad_enabled() and any(isinstance(a, torch.Tensor) and a.requires_grad for a in args):
            return self._differentiable(*args)
        with torch._C._AutoDispatchBelowAutograd():
            return self.overload(*args)


def backend_of(x: torch.Tensor, op: Op) -> str:
    """Name of the backend that serves `op` on `x` now."""
    if x.is_cpu:  # torch.device.type costs seven times is_cpu
        return backends.select("cpu")
    return backends.select(x.device.type, op.family)


def small(x: torch.Tensor, elements: int) -> bool:
    """Whether to leave `x` to torch's own op, where that keeps the same bytes for backward: on the CPU below so many elements a
    call of ours costs more than its kernel gains. Never where a backend is asked for by name."""
    return x.numel() < elements and x.is_cpu and not backends.asked_for()


def transformed() -> bool:
    """Whether torch.func transforms or forward-mode AD are at work."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def lowered(x: Any) -> bool:
    """Whether an op on `x` must be a plain PyTorch expression; see the module's docstring."""
    return (
        torch.compiler.is_compiling()
        or not is_plain(x)
        or x.dtype not in DTYPES
        or not (x.is_cpu or x.is_cuda)
        or x.layout is not torch.strided
        or x.is_nested
        or torch._C._get_tracing_state() is not None
        or transformed()
    )


def is_plain(x: Any) -> bool:
    """Whether `x` is a tensor with memory of its own: no subclass, no wrapper left over from a torch.func transform."""
    return type(x) in _PLAIN and not torch._C._functorch.is_functorch_wrapped_tensor(x)


def is_sharded(x: torch.Tensor) -> bool:
    """Whether `x` is a DTensor, told without importing torch.distributed."""
    return type(x).__module__.startswith("torch.distributed.tensor")


def needs_grad(*tensors: torch.Tensor | None) -> bool:
    if torch.is_grad_enabled():
        for t in tensors:
            if t is not None and t.requires_grad:
                return True
    return False


def autocast_to_float32(*tensors: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """What CUDA autocast does to the arguments of norms and softmax (on CPU it leaves them alone)."""
    first = tensors[0]
    if first is not None and first.is_cuda and torch.is_autocast_enabled("cuda"):
        return tuple(
            t.float() if t is not None and t.dtype in (torch.float16, torch.bfloat16) else t for t in tensors
        )
    return tensors


def not_differentiable(name: str, instead: str, *_: Any) -> Any:
    raise RuntimeError(
        f"pyckpt::{name} rebuilds a forward's output inside backward and has no gradient; use pyckpt::{instead}"
    )


def describe(name: str, tensor: Any) -> str:
    """``name`` with what a user needs to find it: shape, dtype, device."""
    if not isinstance(tensor, torch.Tensor):
        return f"{name} of type {type(tensor).__name__}"
    dtype = str(tensor.dtype).removeprefix("torch.")
    shape = "nested" if tensor.is_nested else f"of shape {tuple(tensor.shape)}"
    return f"{name} {shape}, {dtype} on {tensor.device}"


def dtype_problem(name: str, input: Any) -> str:
    """What is wrong with the input of an op for floating-point numbers; empty if its dtype is not the trouble."""
    if isinstance(input, torch.Tensor) and input.dtype in DTYPES:
        return ""
    return (
        f"{name}: expected a floating-point tensor (float32, bfloat16, float16, float64), got {describe('input', input)}; "
        "convert it, e.g. input.float()"
    )


def by_torch(problem: str, function: Kernel, *args: Any, **kwargs: Any) -> Any:
    """Asks torch's own function: its result if it accepts the arguments; else its error type with `problem` in front.

    So an argument that we do not serve (an integer ReLU, a complex SiLU) gives what torch gives, and a mistake gives torch's
    error type with a message that names the argument and the remedy.
    """
    if not problem or torch.compiler.is_compiling():
        return function(*args, **kwargs)
    try:
        return function(*args, **kwargs)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        # NotImplementedError is a RuntimeError. Errors of other libraries' subclasses may not take a message: left alone.
        if type(error).__module__ != "builtins":
            raise
        raise type(error)(f"{problem}\n(torch: {error})") from None


def refused(message: str) -> RuntimeError:
    """For kernels: what they are given must be what they read. The public functions never get here with anything else, but the
    raw ops can be called with anything, and saved-tensor hooks can return anything."""
    return RuntimeError(f"pyckpt: {message}")
