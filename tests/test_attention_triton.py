"""Attention's Triton kernels, interpreted, in blocks so small that there are many: what is skipped, read and refused."""

import importlib
import math

import pytest
import torch

import pyckpt.functional as F
from pyckpt import backends
from pyckpt.ops.dropout import dropout_factors
from tests import _attention as attention
from tests import _interpreter
from tests._attention import FEATURES

SHAPE = (1, 2, 1, 37, 45, 16, 24)
QUICK = (
    "boolean mask",
    "bias (batch, 1, 1, k), gradient",
    "causal, bottom right",
    "packed sequences",
    "all together",
)


@pytest.fixture
def many_blocks(monkeypatch):
    """Blocks of 16 queries and keys, on the interpreted backend."""
    state = backends.available()[_interpreter.NAME]
    if not state.available:
        pytest.skip(state.unavailable)
    blocks = {512: (16, 16, 4, 1)}
    forward, backward = (
        importlib.import_module(f"pyckpt.triton_kernels.{name}")
        for name in ("attention", "attention_backward")
    )
    for name in ("HALF_BLOCKS", "WIDE_BLOCKS"):
        monkeypatch.setattr(forward, name, blocks)
    for name in ("BY_KEYS", "BY_QUERIES"):
        monkeypatch.setattr(backward, name, (blocks, blocks))
    with backends.use(_interpreter.NAME):
        yield


@pytest.fixture
def products(many_blocks, monkeypatch):
    """Counts the products of tiles."""
    from triton.runtime.interpreter import InterpreterBuilder

    made, dot = [], InterpreterBuilder.create_dot

    def counted(*arguments):
        made.append(1)
        return dot(*arguments)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", counted)
    return made


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FEATURES]
)
def test_as_the_reference(name, many_blocks):
    tensors = attention.make(SHAPE, torch.float64)
    feature = FEATURES[name](*tensors[:2])
    actual = attention.ours(*tensors, feature)
    with backends.use("reference"):
        expected = attention.ours(*tensors, feature)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    ("options", "seen"),
    [
        ({}, 9),
        ({"is_causal": True}, 6),
        ({"window": (0, 0)}, 3),
        ({"window": (16, 0)}, 5),
        ({"cu_seqlens": torch.tensor([0, 16, 48])}, 5),
        ({"is_causal": True, "cu_seqlens": torch.tensor([0, 16, 48])}, 4),
    ],
    ids=str,
)
def test_blocks_that_nobody_sees_are_left_out(options, seen, products):
    """Of 3 x 3 blocks. A block costs two products forward, four by keys and three by queries in 16 bits."""
    q, k, v, grad = attention.make((1, 1, 1, 48, 48, 16, 16), torch.bfloat16)
    attention.ours(q, k, v, grad, attention.Feature(options))
    assert len(products) == (2 + 4 + 3) * seen


@pytest.mark.parametrize(
    "options",
    [
        {"is_causal": True},
        {"window": (2, 1)},
        {"cu_seqlens": (torch.tensor([0, 3, 20]), torch.tensor([0, 20, 41])), "is_causal": True},
    ],
    ids=["causal", "window", "packed"],
)
def test_junk_outside_limits(options, many_blocks):
    """In keys and values that no query sees, in front, between and behind those that are seen."""
    q, k, v, grad = attention.make((1, 2, 1, 20, 45, 16, 16), torch.float32)
    feature = attention.Feature(options)
    clean = attention.ours(q, k, v, grad, feature)
    unseen = (clean[3] == 0).all(-1)
    assert unseen.any()
    for x in (k, v):
        x.masked_fill_(unseen.unsqueeze(-1), math.nan)
    for a, b in zip(attention.ours(q, k, v, grad, feature), clean, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("keys", [20, 21])
def test_dropout_has_the_mask_of_every_backend(keys, many_blocks):
    """Where blocks of four random words end with the rows, and where not."""
    q, k, v = torch.zeros(2, 2, 17, 8), torch.zeros(2, 2, keys, 8), torch.eye(keys).expand(2, 2, keys, keys)
    torch.manual_seed(3)
    kept = F.attention(q, k, v, dropout_p=0.4) != 0
    torch.manual_seed(3)
    seed = torch.randint(2**63 - 1, (1,), dtype=torch.int64)
    assert torch.equal(kept, dropout_factors(torch.empty(2, 2, 17, keys), seed, 0.4) != 0)


def test_a_head_that_is_too_wide(many_blocks):
    x = torch.zeros(1, 1, 2, 513)
    with pytest.raises(RuntimeError, match=r"width 512 at most, got 513.*backends\.use\('reference'\)"):
        F.attention(x, x, x)
