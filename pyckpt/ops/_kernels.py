"""What a backend has to compute. The families (activation.py...) check, lay out and allocate; kernels fill what they are given.

x, grad and mask come with any lazy negation resolved. Outputs are uninitialised and dense; they, weights and statistics are
contiguous where not said otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from ._softmax_definition import Options

RowView = tuple[int, int, int]  # of _native.as_rows


class Kernels(Protocol):
    """The kernels of one backend."""

    @property
    def backend(self) -> str: ...

    def activation_forward(self, op: int, x: Tensor, y: Tensor, view: Sequence[int]) -> None:
        """`op`: a code of csrc/arguments.h. `view`: that of _native.elementwise_view for (x, y)."""

    def activation_backward(self, op: int, grad: Tensor, x: Tensor, dx: Tensor, view: Sequence[int]) -> None:
        """`view`: for (grad, x, dx)."""

    def dropout(self, x: Tensor, y: Tensor, view: Sequence[int], p: float, seed: Tensor) -> None:
        """`view`: for (x, y), ordered."""

    def norm_forward(
        self,
        kind: int,
        x: Tensor,
        view: RowView,
        columns: int,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        y: Tensor,
        statistics: Tensor,
        recompute: bool,
    ) -> None:
        """y, and `statistics` unless `recompute`, which reads them."""

    def norm_backward(
        self,
        kind: int,
        grad: Tensor,
        grad_view: RowView,
        x: Tensor,
        view: RowView,
        columns: int,
        weight: Tensor | None,
        eps: float,
        statistics: Tensor,
        dx: Tensor | None,
        dweight: Tensor | None,
        dbias: Tensor | None,
    ) -> None:
        """Those of dx, dweight and dbias that are not None."""

    def softmax_forward(
        self, x: Tensor, mask: Tensor | None, options: Options, y: Tensor, statistics: Tensor, recompute: bool
    ) -> None:
        """y, and `statistics` unless `recompute`. `x` has any strides."""

    def softmax_backward(self, grad: Tensor, y: Tensor, dx: Tensor, masked: bool, scale: float) -> None:
        """dx = scale y (grad - sum(grad y)). `grad` has any strides."""

    def softmax_dropout_backward(
        self,
        grad: Tensor,
        x: Tensor,
        mask: Tensor | None,
        options: Options,
        statistics: Tensor,
        dx: Tensor,
        grad_scale: float,
    ) -> None:
        """The same with the probabilities formed again from x. `grad` and `x` have any strides."""
