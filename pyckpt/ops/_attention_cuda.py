"""Attention by csrc/cuda/attention.cu: for the calls that it serves, from tensors to addresses and strides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ._attention_checks import check_arguments, check_backward
from ._attention_definition import Given, Options, output_like, split
from ._native import address, code, resolved, strided
from ._registry import Unserved

WIDTHS = (64, 128)
_VECTOR = 8  # elements of 16 bytes
_ROWS = 128  # csrc/cuda/attention.cuh: kRowStep


def unserved(q: Tensor, k: Tensor, v: Tensor, given: Given, options: Options) -> str:
    """What these kernels are not made for in a call; empty if they serve it."""
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"{str(q.dtype).removeprefix('torch.')} operands"
    if q.shape[3] not in WIDTHS or v.shape[3] != q.shape[3]:
        return f"heads of width {q.shape[3]} with values of width {v.shape[3]}"
    asked = {
        "attn_mask": given.mask is not None,
        "alibi_slopes": given.slopes is not None,
        "cu_seqlens": given.cu_seqlens_q is not None,
        "softcap": options.softcap != 0,
        "window": options.left is not None or options.right not in (None, 0),
    }
    return ", ".join(name for name, given in asked.items() if given)


def _readable(x: Tensor) -> bool:
    """Whether rows lie as a HeadsView has them: adjacent columns, at multiples of 16 bytes."""
    return (
        x.stride(3) == 1
        and all(n <= 1 or step % _VECTOR == 0 for n, step in zip(x.shape[:3], x.stride(), strict=False))
        and x.data_ptr() % 16 == 0
    )


def _rows(x: Tensor) -> Tensor:
    x = resolved(x)
    return x if _readable(x) else x.clone(memory_format=torch.contiguous_format)


def _view(x: Tensor | None) -> tuple[int, int, int, int]:
    """Address, and strides of batch, head and row; those of a single one are not looked at."""
    return (0, 0, 0, 0) if x is None else (x.data_ptr(), x.stride(0), x.stride(1), x.stride(2))


def _sizes(q: Tensor, k: Tensor, options: Options) -> list[int]:
    """Batch, heads, kv heads, queries, keys, width; and how far beyond its own number a query sees."""
    queries, keys = q.shape[2], k.shape[2]
    offset = keys - queries if options.bottom_right else 0
    reach = keys if options.right is None else offset + min(options.right, keys)
    return [*q.shape[:2], k.shape[1], queries, keys, q.shape[3], reach]


class CudaAttention:
    """Both ops on one backend. `module`: its native functions; `where`: their last argument for a tensor."""

    def __init__(self, backend: str, module: Any, where: Callable[[Tensor], Any]) -> None:
        self.backend, self.module, self.where = backend, module, where

    def _check(self, q: Tensor, k: Tensor, v: Tensor, given: Given, options: Options) -> None:
        if problem := unserved(q, k, v, given, options):
            raise Unserved(
                f"backend '{self.backend}' has no attention kernels for {problem}: it serves bfloat16 and float16, width 64 and "
                "128, with is_causal and dropout; where no backend is asked for by name, others serve the rest"
            )

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        given, options = split(rest)
        self._check(q, k, v, given, options)
        out = output_like(q, v)
        logsumexp = q.new_empty(q.shape[:3], dtype=torch.float32)
        q, k, v = _rows(q), _rows(k), _rows(v)
        self.module.attention_forward(
            code(q), _sizes(q, k, options), [_view(x) for x in (q, k, v, out)], logsumexp.data_ptr(), options.scale,
            options.dropout_p, address(given.seed), self.where(q),
        )  # fmt: skip
        return out, logsumexp

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        *arguments, out, logsumexp, wanted = rest
        given, options = split(arguments)
        grad = strided(grad)
        check_arguments(q, k, v, given, options)
        check_backward(grad, q, v, out, logsumexp)
        self._check(q, k, v, given, options)
        gradients = [torch.empty_like(x) if w else None for x, w in zip((q, k, v), wanted, strict=False)]
        written = [g if g is None or _readable(g) else g.new_empty(g.shape) for g in gradients]
        q, k, v, out, grad = (_rows(x) for x in (q, k, v, out, grad))
        sizes = _sizes(q, k, options)
        rows = q.new_empty((*q.shape[:2], 2, -(-q.shape[2] // _ROWS) * _ROWS), dtype=torch.float32)
        self.module.attention_backward(
            code(q), sizes, [_view(x) for x in (q, k, v, out)], logsumexp.contiguous().data_ptr(), options.scale,
            options.dropout_p, address(given.seed), [_view(x) for x in (grad, *written)], rows.data_ptr(), self.where(q),
        )  # fmt: skip
        results = []
        for gradient, target in zip(gradients, written, strict=True):
            if gradient is not None and target is not None and target is not gradient:
                gradient.copy_(target)
            results.append(q.new_empty(0) if gradient is None else gradient)
        return results[0], results[1], results[2], q.new_empty(0)
