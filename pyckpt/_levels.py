"""Which matrix products the named levels of :func:`pyckpt.recompute` rebuild.

``mlp``: those that only pointwise nodes save (fc1 in front of GELU; gate and up in front of SwiGLU). Who saves a tensor is not
known when it is saved, so the product is held (``Source.held``) until each record of it has been seen in the keeping of a node
with a pointwise rule; that happens when the output of that node is saved, or asked for in vain, further on in the forward.

``linear``: those of every linear layer, whoever saves them, and also where only what pointwise nodes made of them is saved
(queries and keys behind rotary embeddings).

At both, products do not chain: what a product is rebuilt from needs no other product, so that backward holds one layer's at a
time and a deep stack of linear layers does not become one long replay. And none is run again for a sum with another activation:
a residual stream costs as much to rebuild as all that is written to it.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch

from ._records import Leaf, Recipe, Source, shape_of
from .rules import Unavailable

LEVELS = ("pointwise", "mlp", "linear")

#: A product so many times narrower than what it is made of (the first factor of LoRA) is kept: it is small, and with it kept the
#: product that reads it can be rebuilt.
NARROW = 16

_SUMS = ("AddBackward0", "SubBackward0")


def check_policy(function: str, policy: Any) -> None:
    """Raises ValueError."""
    if not (policy in LEVELS if isinstance(policy, str) else _takes_three(policy)):
        raise ValueError(
            f"{function}: policy must be one of {', '.join(map(repr, LEVELS))}, or a function "
            f"(node, flops, bytes) -> CheckpointPolicy; got {policy!r}"
        )


def _takes_three(policy: Any) -> bool:
    """A module, or a function decorated without parentheses, is no policy."""
    if not callable(policy) or isinstance(policy, torch.nn.Module):
        return False
    try:
        inspect.signature(policy).bind(None, 0, 0)
    except TypeError:
        return False
    except ValueError:  # a built-in function has none
        return True
    return True


def products_of(policy: Any, below: Any) -> str | None:
    """The level, if a region that begins now rebuilds products at all. In a checkpoint it does not: the products of a segment
    that is replayed would be run a third time."""
    if not isinstance(policy, str) or policy == "pointwise":
        return None
    if below is None:
        # Inside a backward without hooks: a reentrant checkpoint's replay.
        return policy if torch._C._current_graph_task_id() < 0 else None
    return None if below[0].__module__ == "torch.utils.checkpoint" else policy


def check_products(level: str, source: Source, direct: bool) -> None:
    """Raises Unavailable where the level does not rebuild this source, which needs a product. `direct`: the product itself, or a
    view of it, is what a node saves."""
    if source.rule.matrix:
        if len(source.products) > 1:
            raise Unavailable("{} reads what another matrix product has to be run for", source.node)
        if level == "mlp" and not direct:
            raise Unavailable("{} is a matrix product that no node saves", source.node)
        factors = [shape_of(record) for record in source.operands[-2:]]
        if factors[1][-1] * NARROW <= factors[0][-1]:
            raise Unavailable("{} is a narrow matrix product", source.node)
    elif source.rule.name in _SUMS:
        _check_sum(source)


def _check_sum(source: Source) -> None:
    parts: list[frozenset[Any]] = []
    shared = False
    for record in source.operands:
        if type(record) is Recipe and record.source.products:
            parts.append(record.source.products)
            shared = shared or record.source.saved
        elif type(record) is not Leaf or record.tensor.numel() == math.prod(source.shape):  # else a bias
            raise Unavailable("{} adds a matrix product to another activation", source.node)
    # Of one product: rotary embeddings. Of several that nobody else reads: LoRA's branches.
    if shared and any(part != parts[0] for part in parts):
        raise Unavailable("{} adds a matrix product to another activation", source.node)


def reads_of(source: Source) -> None:
    """A node with a pointwise rule has been seen: products that it saves have one reader less to be known."""
    for record in source.operands:
        if type(record) is Recipe and record.awaits:
            record.awaits = False
            product = record.source
            product.waiting -= 1
            if not product.waiting:
                product.held = None


def hold(recipe: Recipe, kept: Any) -> None:
    """Until it is known who saves it."""
    recipe.awaits = True
    source = recipe.source
    source.waiting += 1
    if source.held is None:
        source.held = kept
