"""Runs csrc/cuda on the CPU: each CUDA thread is a fiber, and a checking build watches every access.

    module = simt.load("check")           # functions as in pyckpt._C.cuda, on CPU tensors' addresses
    simt.install("cuda_emulated", "fast") # a backend of that name, for CPU tensors

Flavours: "fast" finds divergent barriers, deadlocks and wrong results in any order of threads. "check" also finds races,
accesses outside of tensors and shared arrays, writes to inputs, reads of what nobody has written, misaligned vectors and
overflows. What is found raises the module's ``Fault`` (a RuntimeError) with file and line of the kernel.

Tensors' memory: in a checking build a kernel may touch what is known to it and nothing else. A backend that is installed here
tells of every tensor argument of an op (its elements, read-only), and of what the op's Python code allocates (writable, without
a value yet). Torch's allocations lie apart by at least a malloc header, so that the first byte beyond an end belongs to
nobody. Code that calls the module itself uses :func:`tensors`.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .build import FLAVOURS, Missing, build

__all__ = ["FLAVOURS", "Missing", "install", "load", "order", "tensors"]


def load_file(path: Any) -> Any:
    """The extension module in a file."""
    name = path.name.partition(".")[0]
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules[name] = module
    return sys.modules[name]


@functools.cache
def load(flavour: str) -> Any:
    """The kernels of csrc/cuda, built if need be. Raises Missing where the machine cannot build them."""
    return load_file(build(flavour))


@contextmanager
def order(module: Any, name: str, seed: int = 0) -> Iterator[None]:
    """Within the context blocks, warps and lanes run "forward", "reverse" or, by `seed`, in "random" order."""
    module.simt.order(name, seed)
    try:
        yield
    finally:
        module.simt.order("forward")


def _in_memory(values: Any) -> Iterator[torch.Tensor]:
    """The tensors among `values` whose elements lie in memory by strides."""
    for value in tree_leaves(values):
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            yield value


def _allow(module: Any, name: str, tensor: torch.Tensor, *, writable: bool, initialised: bool) -> None:
    if not tensor.numel():
        return
    span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    module.simt.allow(tensor.data_ptr(), span * tensor.element_size(), name, writable, initialised)


@contextmanager
def tensors(module: Any, *, inputs: Any = (), outputs: Any = (), updated: Any = ()) -> Iterator[None]:
    """Within the context kernels may read `inputs`, write `outputs`, which have no values yet, and do both to `updated`."""
    try:
        for i, tensor in enumerate(_in_memory(inputs)):
            _allow(module, f"input {i}", tensor, writable=False, initialised=True)
        for i, tensor in enumerate(_in_memory(outputs)):
            _allow(module, f"output {i}", tensor, writable=True, initialised=False)
        for i, tensor in enumerate(_in_memory(updated)):
            _allow(module, f"tensor {i}", tensor, writable=True, initialised=True)
        yield
    finally:
        module.simt.forget()


class _Allocations(TorchDispatchMode):
    """Makes what torch allocates known to a module's checks."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        empty = name.startswith(("empty", "new_empty"))
        known = {t.untyped_storage().data_ptr() for t in _in_memory((args, kwargs))}
        for tensor in _in_memory(result):
            new = tensor.untyped_storage().data_ptr() not in known
            if new or func._schema.is_mutable:  # zero_() gives values; an input stays read-only
                _allow(
                    self.module, f"{name}{list(tensor.shape)}", tensor, writable=new, initialised=not empty
                )
        return result


_one_at_a_time = threading.RLock()


def _watched(module: Any, kernel: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(kernel)
    def call(*args: Any) -> Any:
        with _one_at_a_time, tensors(module, inputs=args), _Allocations(module):
            return kernel(*args)

    return call


def install(name: str, flavour: str) -> Any:
    """Registers the emulated kernels as backend `name` for CPU tensors; returns the module."""
    from pyckpt import backends
    from pyckpt.ops import _cuda
    from pyckpt.ops._registry import Op

    module = load(flavour)
    backends.register(name, "cpu")
    _cuda.register(name, module)
    if module.simt.checks:
        for op in Op.all:
            if name in op.kernels:
                op.kernels[name] = _watched(module, op.kernels[name])
    return module
