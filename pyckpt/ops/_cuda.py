"""The CUDA kernels as a backend: which device and stream a call goes to, and how many blocks share a sum."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import activation, attention, dropout, norm, softmax
from ._attention_cuda import CudaAttention, unserved
from ._native import Native
from ._registry import DTYPES


def _where(x: Tensor) -> tuple[int, int]:
    """The tensor's device and the stream that is current there. (0, 0) for CPU tensors, which an emulated backend serves."""
    index = x.get_device()
    return (index, torch._C._cuda_getCurrentRawStream(index)) if index >= 0 else (0, 0)


def _partial_sums(x: Tensor, rows: int, columns: int) -> Tensor:
    # Enough blocks of rows to keep a large GPU busy, whichever is at hand; more cost memory traffic (8 bytes a column each).
    blocks = max(256, min(4096, 2**19 // max(1, columns)))
    block_rows = max(1, min(64, rows // blocks))
    return x.new_empty((max(1, -(-rows // block_rows)), 2, columns), dtype=DTYPES[x.dtype][1])


def register(backend: str, module: Any) -> None:
    """Lets the kernels of `module` (``_C.cuda``) compute every op on `backend`."""
    kernels = Native(backend, module, _where, _partial_sums)
    for family in (activation, dropout, norm, softmax):
        family.register(kernels)
    of_attention = CudaAttention(backend, module, _where)
    attention.register(backend, of_attention.forward, of_attention.backward, unserved)
