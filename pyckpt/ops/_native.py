"""From tensors to the arguments of the C++ kernels: addresses, dtype codes, strides. The same for every device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from .. import backends
from ._kernels import RowView
from ._registry import DTYPES, describe, refused

if TYPE_CHECKING:
    from ._softmax_definition import Options


def code(tensor: torch.Tensor) -> int:
    return DTYPES[tensor.dtype][0]


def address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def resolved(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without a lazy negation, which raw pointers cannot see."""
    return tensor.resolve_neg() if tensor.is_neg() else tensor


def strided(grad: torch.Tensor) -> torch.Tensor:
    """A gradient as a kernel can read it: a sparse one becomes dense."""
    return grad if grad.layout is torch.strided else grad.to_dense()


def like(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether a kernel may read the strided `a` where it expects a tensor of b's shape and dtype."""
    return a.dtype is b.dtype and a.shape == b.shape and together(a, b)


def check_grad(grad: torch.Tensor, x: torch.Tensor) -> None:
    if not like(grad, x):
        raise refused(f"{describe('grad', grad)} does not fit {describe('x', x)}")


def together(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether both lie on one device. (Comparing torch.device costs seven times is_cpu.)"""
    return (a.is_cpu and b.is_cpu) or a.device == b.device


def dense(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return tensor if tensor is None else resolved(tensor).contiguous()


def contiguous_like(x: torch.Tensor, *_: Any) -> torch.Tensor:
    """An uninitialised contiguous tensor of x's shape and dtype."""
    if x.is_contiguous():
        return torch.empty_like(x)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def fake_like(x: torch.Tensor, *_: Any) -> torch.Tensor:
    """Shape function of an op whose output is laid out as `x`."""
    return torch.empty_like(x)


def elementwise_view(*tensors: torch.Tensor, ordered: bool = False) -> list[int]:
    """Sizes, then each tensor's strides, for operands of one shape; empty if all are dense in one common order.

    The last tensor is the output, made by torch.empty_like and hence dense. Dimensions are put in the output's memory order,
    unless `ordered` asks for the logical row-major order (random masks count elements in it), and merged where all allow.
    """
    strides = tensors[-1].stride()
    if all(t.stride() == strides for t in tensors) and not (ordered and not tensors[-1].is_contiguous()):
        return []
    shape = tensors[-1].shape
    dims = [d for d in range(len(shape)) if shape[d] != 1]
    if not ordered:
        dims.sort(key=lambda d: -strides[d])
    merged: list[list[int]] = []  # [size, stride of each tensor]
    for d in dims:
        step = [t.stride(d) for t in tensors]
        if merged and all(
            outer == inner * shape[d] for outer, inner in zip(merged[-1][1:], step, strict=True)
        ):
            merged[-1] = [merged[-1][0] * shape[d], *step]
        else:
            merged.append([shape[d], *step])
    if not merged:
        return []
    return [value for column in zip(*merged, strict=True) for value in column]


def as_rows(x: torch.Tensor, trailing: int, columns: int) -> tuple[torch.Tensor, tuple[int, int, int]]:
    """`x` as rows of its last `trailing` dimensions, `columns` elements: the tensor to read (a copy where strides do not
    allow) and its row view.

    The view is (inner, outer stride, inner stride): row i starts at (i // inner) * outer stride + (i % inner) * inner stride.
    """
    x = resolved(x)
    if x.is_contiguous():
        return x, (1, columns, 0)
    expected = 1
    for d in range(x.dim() - 1, x.dim() - trailing - 1, -1):
        if x.shape[d] != 1 and x.stride(d) != expected:
            return x.contiguous(), (1, columns, 0)
        expected *= x.shape[d]
    leading: list[list[int]] = []
    for d in range(x.dim() - trailing):
        if x.shape[d] == 1:
            continue
        if leading and leading[-1][1] == x.stride(d) * x.shape[d]:
            leading[-1] = [leading[-1][0] * x.shape[d], x.stride(d)]
        else:
            leading.append([x.shape[d], x.stride(d)])
    if not leading:
        return x, (1, columns, 0)
    if len(leading) == 1:
        return x, (1, leading[0][1], 0)
    if len(leading) == 2:
        return x, (leading[1][0], leading[0][1], leading[1][1])
    return x.contiguous(), (1, columns, 0)


def columns_adjacent(x: torch.Tensor) -> torch.Tensor:
    """`x`, or a contiguous copy where its last dimension is not dense in memory."""
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def flat(*groups: Sequence[int]) -> list[int]:
    return [value for group in groups for value in group]


@dataclass(frozen=True)
class Native:
    """The C++ kernels of one backend, whose functions (csrc/bindings.h) have the same arguments on each, up to the last."""

    backend: str
    module: Any
    #: The last argument of a call on a tensor: threads, or device and stream.
    where: Callable[[torch.Tensor], Any]
    #: (x, rows, columns) -> memory for norm_backward's sums: blocks x 2 x columns.
    partial_sums: Callable[[torch.Tensor, int, int], torch.Tensor]

    def activation_forward(self, op: int, x: torch.Tensor, y: torch.Tensor, view: Sequence[int]) -> None:
        self.module.activation_forward(
            op, code(x), x.data_ptr(), y.data_ptr(), x.numel(), view, self.where(x)
        )

    def activation_backward(
        self, op: int, grad: torch.Tensor, x: torch.Tensor, dx: torch.Tensor, view: Sequence[int]
    ) -> None:
        self.module.activation_backward(
            op, code(x), grad.data_ptr(), x.data_ptr(), dx.data_ptr(), x.numel(), view, self.where(x)
        )

    def dropout(
        self, x: torch.Tensor, y: torch.Tensor, view: Sequence[int], p: float, seed: torch.Tensor
    ) -> None:
        self.module.dropout(
            code(x), x.data_ptr(), y.data_ptr(), x.numel(), view, p, seed.data_ptr(), self.where(x)
        )

    def norm_forward(
        self, kind: int, x: torch.Tensor, view: RowView, columns: int, weight: torch.Tensor | None,
        bias: torch.Tensor | None, eps: float, y: torch.Tensor, statistics: torch.Tensor, recompute: bool,
    ) -> None:  # fmt: skip
        parameter = weight if weight is not None else bias if bias is not None else x
        self.module.norm_forward(
            kind, code(x), code(parameter), statistics.shape[-1], columns, eps, x.data_ptr(), view, address(weight),
            address(bias), y.data_ptr(), statistics.data_ptr(), recompute, self.where(x),
        )  # fmt: skip

    def norm_backward(
        self, kind: int, grad: torch.Tensor, grad_view: RowView, x: torch.Tensor, view: RowView, columns: int,
        weight: torch.Tensor | None, eps: float, statistics: torch.Tensor, dx: torch.Tensor | None,
        dweight: torch.Tensor | None, dbias: torch.Tensor | None,
    ) -> None:  # fmt: skip
        rows = statistics.shape[-1]
        parameter = next((t for t in (dweight, dbias, weight) if t is not None), x)
        sums = None if dweight is None and dbias is None else self.partial_sums(x, rows, columns)
        self.module.norm_backward(
            kind, code(x), code(parameter), rows, columns, eps, x.data_ptr(), view, address(weight),
            grad.data_ptr(), grad_view, statistics.data_ptr(), address(dx), address(dweight), address(dbias),
            address(sums), 1 if sums is None else sums.shape[0], self.where(x),
        )  # fmt: skip

    def softmax_forward(
        self, x: torch.Tensor, mask: torch.Tensor | None, options: Options, y: torch.Tensor, statistics: torch.Tensor,
        recompute: bool,
    ) -> None:  # fmt: skip
        x = columns_adjacent(x)
        self.module.softmax_forward(
            *_softmax_arguments(x, mask, options),
            y.data_ptr(),
            statistics.data_ptr(),
            recompute,
            self.where(x),
        )

    def softmax_backward(
        self, grad: torch.Tensor, y: torch.Tensor, dx: torch.Tensor, masked: bool, scale: float
    ) -> None:
        grad = columns_adjacent(grad)
        self.module.softmax_backward(
            *_softmax_arguments(y, None, (1.0, None, 0.0, None), grad), grad.data_ptr(), y.data_ptr(), 0, dx.data_ptr(), scale,
            masked, self.where(y),
        )  # fmt: skip

    def softmax_dropout_backward(
        self, grad: torch.Tensor, x: torch.Tensor, mask: torch.Tensor | None, options: Options,
        statistics: torch.Tensor, dx: torch.Tensor, grad_scale: float,
    ) -> None:  # fmt: skip
        grad, x = columns_adjacent(grad), columns_adjacent(x)
        masked = mask is not None or options.causal is not None
        self.module.softmax_backward(
            *_softmax_arguments(x, mask, options, grad), grad.data_ptr(), 0, statistics.data_ptr(), dx.data_ptr(),
            grad_scale, masked, self.where(x),
        )  # fmt: skip


def _softmax_arguments(
    x: torch.Tensor, mask: torch.Tensor | None, options: tuple[Any, ...], grad: torch.Tensor | None = None
) -> tuple[Any, ...]:
    """The leading arguments of both native launchers, for tensors with adjacent columns that the caller keeps alive."""
    columns, leading, kind, step = x.shape[-1], x.dim() - 1, 0, 0
    scale, causal, dropout_p, seed = options
    if mask is None and causal is None and x.is_contiguous() and (grad is None or grad.is_contiguous()):
        leading = 1
        rows = [x.numel() // columns if columns else 0, columns, 0, columns]
    else:
        steps: tuple[int, ...] = (0,) * x.dim()
        if mask is not None:
            kind = 1 if mask.dtype == torch.bool else 2
            steps = mask.expand(x.shape).stride()
            step = steps[-1]
        rows = flat(x.shape[:-1], x.stride()[:-1], steps[:-1], grad.stride()[:-1] if grad is not None else ())
    return (
        code(x), x.data_ptr(), rows, leading, columns, scale, kind, address(mask), step,
        causal or 0, causal is not None, dropout_p if seed is not None else 0.0, address(seed),
    )  # fmt: skip


def _cpu_partial_sums(x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    # Blocks depend on the shape alone, so that sums do not depend on the number of threads. A block's sums cost as much as some
    # rows do: it has 32 or more, and work enough for a thread.
    blocks = max(1, min(64, rows // 32, rows * columns // 16384))
    return torch.empty((blocks, 2, columns), dtype=torch.float64)


CPU = Native("cpu", backends.native, lambda _: torch.get_num_threads(), _cpu_partial_sums)
