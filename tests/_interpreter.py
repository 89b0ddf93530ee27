"""Backend ``triton_interpreted``: the Triton kernels run by Triton's interpreter, on CPU tensors. For tests without a GPU."""

import functools
import inspect
import os

import numpy as np
import torch

from pyckpt import backends
from pyckpt.ops import _triton

NAME = "triton_interpreted"
LANGUAGE = {"triton.language", "triton.language.core"}


def _to_bfloat16(single):
    """Rounded to nearest even, as hardware does it; the interpreter cuts off. NaN stays NaN."""
    bits = single.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(single), 0x7FFF, rounded).astype(np.uint16)


def _as_hardware_does():
    """The interpreter rounds where hardware does not, and otherwise than hardware does; both would be judged here."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    cast = InterpreterBuilder.cast_impl

    def cast_impl(self, source, dtype):
        pair = source.dtype.scalar, dtype.scalar
        if pair == (tl.float32, tl.bfloat16):
            return TensorHandle(_to_bfloat16(np.ascontiguousarray(source.data)), tl.bfloat16)
        if pair == (tl.bfloat16, tl.float32):
            return TensorHandle((source.data.astype(np.uint32) << 16).view(np.float32), tl.float32)
        return cast(self, source, dtype)

    def create_fma(self, x, y, z):
        wide = np.longdouble if x.data.dtype == np.float64 else np.float64
        exact = x.data.astype(wide) * y.data.astype(wide) + z.data
        return TensorHandle(exact.astype(x.data.dtype), z.dtype.scalar)

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        # numpy would multiply the integers that bfloat16 is held as. Rounded once: in what order hardware adds up is not known
        # here, and the luck of an order decides which of two equally good products comes nearer. What lies between is judged.
        wide = np.longdouble if d.data.dtype == np.float64 else np.float64
        a, b = (cast_impl(self, x, d.dtype.scalar).data.astype(wide) for x in (a, b))
        return TensorHandle((np.matmul(a, b) + d.data).astype(d.data.dtype), d.dtype.scalar)

    InterpreterBuilder.cast_impl = cast_impl
    InterpreterBuilder.create_fma = create_fma
    InterpreterBuilder.create_dot = create_dot


def _once(cls, key, handle=False):
    """Has cls(...) work out its attributes once for each key(...); objects made later are given the same. `handle`: but for an
    attribute of that name, the first argument."""
    initialise, made = cls.__init__, {}

    def init(self, *arguments):
        which = key(*arguments)
        if which not in made:
            initialise(self, *arguments)
            made[which] = {name: value for name, value in vars(self).items() if name != "handle"}
            return
        attributes = vars(self)
        attributes.update(made[which])
        if handle:
            attributes["handle"] = arguments[0]

    cls.__init__ = init


def _spare_work():
    """The interpreter exchanges triton.language's functions at every call of a jitted function from another, copies memory to
    the host and back, where it is, and works out the same types for each value: most of a test's time."""
    import triton.language as tl
    from triton.runtime import interpreter

    interpreter.GridExecutor._init_args_hst = lambda self, arguments, options: (arguments, options)
    interpreter.GridExecutor._restore_args_dev = lambda self, *_: None

    _once(tl.block_type, lambda element, shape: (element.name, *shape))
    _once(tl.tensor, lambda handle, type: type.name, handle=True)
    numpy_type, numpy_types = interpreter._get_np_dtype, {}

    def known_numpy_type(dtype):
        name = dtype.scalar.name
        if name not in numpy_types:
            numpy_types[name] = numpy_type(dtype)
        return numpy_types[name]

    interpreter._get_np_dtype = known_numpy_type

    patch, active = interpreter._patch_lang, {}  # by the modules of Triton's that a function refers to

    class Outermost:
        def restore(self):
            for scope in reversed(active.values()):
                scope.restore()
            active.clear()

    @functools.cache
    def modules_of(function):
        return frozenset(v.__name__ for v in function.__globals__.values() if inspect.ismodule(v)) & LANGUAGE

    def patch_once(function):
        modules = modules_of(function)
        if modules not in active:
            active[modules] = patch(function)
        return Outermost()

    interpreter._patch_lang = patch_once


def register():
    """Adds the backend; unavailable, with the reason, beside a GPU or without Triton. Before Triton is imported."""
    if torch.cuda.is_available():
        reason = "there is a GPU, on which backend triton runs"
    else:
        os.environ["TRITON_INTERPRET"] = "1"
        reason = backends.triton_problem()
    if not reason:
        _as_hardware_does()
        _spare_work()
    backends.register(NAME, "cpu", reason)
    _triton.register(NAME)
