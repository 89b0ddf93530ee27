"""What the tests of the recompute engine share."""

import contextlib
import gc

import torch
import torch.nn.functional as F
from torch import nn

from pyckpt import recompute
from pyckpt.engine import Region, regions
from pyckpt.memory import allocated_bytes

WIDTH = 32


class Block(nn.Module):
    """x + fc2(gelu(fc1(norm(x)))), with torch's own layers."""

    def __init__(self, width=WIDTH, norm=nn.LayerNorm, activation=nn.GELU):
        super().__init__()
        self.norm = norm(width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.activation = activation()

    def forward(self, x):
        return x + self.fc2(self.activation(self.fc1(self.norm(x))))


def blocks(count=3, width=WIDTH, **kwargs):
    torch.manual_seed(1)
    return nn.Sequential(*(Block(width, **kwargs) for _ in range(count)))


def region(on=True, **kwargs):
    return recompute(**kwargs) if on else contextlib.nullcontext()


class Watched:
    """A region that counts: `rebuilt`, and `reasons`, why each other tensor was kept."""

    def __init__(self, **kwargs):
        self.region = recompute(**kwargs)

    def __enter__(self):
        self.region.__enter__()
        inner: Region = regions.stack[-1][1]
        self.reasons = []
        original = inner.recipe

        def recipe(tensor, whole, node):
            try:
                return original(tensor, whole, node)
            except Exception as error:
                self.reasons.append(str(error))
                raise

        inner.recipe = recipe
        self.inner = inner
        return self

    def __exit__(self, *error):
        self.region.__exit__(*error)

    @property
    def rebuilt(self):
        return self.inner.rebuilt


def gradients(model, run):
    """The gradients of `run()`'s loss with respect to the model's parameters."""
    model.zero_grad()
    run().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def assert_same(actual, expected):
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype is b.dtype and torch.equal(a, b)


def allocated():
    gc.collect()
    return allocated_bytes()


def gelu_then(linear, x):
    return linear(F.gelu(x))
