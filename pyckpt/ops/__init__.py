"""The operators torch.ops.pyckpt.*, one module per family.

Each family's file holds, per op: its schema and fake, its kernels by backend, the autograd Function with what it saves and
how its output is recomputed, and the public function.
"""

from . import activation, dropout, norm, softmax

__all__ = ["activation", "dropout", "norm", "softmax"]
