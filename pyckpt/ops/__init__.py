"""The operators torch.ops.pyckpt.*, one module per family.

Each family's file holds, per op: its schema and fake, the autograd Function with what it saves and how its output is recomputed,
and the public function. Of norms, softmax and attention the references are in _<family>_definition.py, the checks of arguments in
_<family>_checks.py. The kernels of a backend are given by _native.py, _cuda.py, _triton.py and, for attention,
_attention_cpu.py, _attention_cuda.py and _attention_triton.py.
"""

from types import FunctionType

from torch._C._dynamo import eval_frame

from .. import backends
from . import (
    _attention_blocks,
    _attention_cpu,
    _attention_cuda,
    _attention_triton,
    _cuda,
    _native,
    _registry,
    _triton,
    activation,
    attention,
    dropout,
    norm,
    softmax,
)

__all__ = ["activation", "attention", "dropout", "norm", "softmax"]


def _keep_dynamo_out() -> None:
    """Our frames run as they are when Dynamo traces around a graph break: it may drop a tensor whose address was taken.

    This does not keep the public functions from being inlined into a compiled graph, where they are plain expressions.
    """
    skip = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
    for module in (
        activation,
        attention,
        dropout,
        norm,
        softmax,
        _attention_blocks,
        _attention_cpu,
        _attention_cuda,
        _attention_triton,
        _cuda,
        _native,
        _registry,
        _triton,
    ):
        for scope in (module, *(value for value in vars(module).values() if isinstance(value, type))):
            for value in vars(scope).values():
                function = value.__func__ if isinstance(value, staticmethod) else value
                if isinstance(function, FunctionType):
                    eval_frame.set_code_exec_strategy(function.__code__, skip)
    for op in _registry.Op.all:
        for kernel in op.kernels.values():
            if isinstance(kernel, FunctionType):
                eval_frame.set_code_exec_strategy(kernel.__code__, skip)


if hasattr(backends.native, "cuda"):  # built with nvcc
    _cuda.register("cuda", backends.native.cuda)
_keep_dynamo_out()
