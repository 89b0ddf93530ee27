"""Dropout: the Philox mask, its statistics, seeds and generators, and softmax with dropout."""

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import pyckpt.functional as F
from pyckpt import nn
from pyckpt.ops.dropout import dropout_factors, dropout_op, philox_words
from tests import _oracle as oracle
from tests._oracle import DTYPES


def philox4x32(counter, key):
    """Salmon et al., SC'11, in Python integers."""
    c, k, word = list(counter), list(key), 0xFFFFFFFF
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b & word, (a >> 32) ^ c[3] ^ k[1], a & word]
        k = [(k[0] + 0x9E3779B9) & word, (k[1] + 0xBB67AE85) & word]
    return c


def test_philox_known_answers():
    """The published test vectors of Random123 for philox4x32-10."""
    assert philox4x32([0] * 4, [0] * 2) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert philox4x32([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


@pytest.mark.parametrize("seed", [0, 1, 2**31 + 5, 2**63 - 1, -1])
def test_stream_is_philox_by_element_index(seed):
    words = philox_words(torch.tensor([seed]), 30).tolist()
    key = [seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF]
    assert words == [philox4x32([i // 4, 0, 0, 0], key)[i % 4] for i in range(30)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1,), (7,), (3, 333), (5, 4, 1031)], ids=str)
def test_every_instruction_set_gives_the_same_mask(shape, dtype, isa):
    x = torch.randn(shape, dtype=torch.float64).to(dtype)
    for seed in (7, 2**62 + 12345):
        key = torch.tensor([seed])
        for p in (0.1, 0.5, 0.999):
            expected = dropout_op.on("reference")(x, key, p)
            assert torch.equal(dropout_op.on("cpu")(x, key, p), expected)


def test_mask_counts_elements_in_logical_order(backend):
    x = torch.ones(4, 6, 5, 10)
    seed = torch.tensor([3])
    expected = dropout_op(backend, x, seed, 0.5)
    for other in (
        x.contiguous(memory_format=torch.channels_last),
        x.transpose(0, 3).contiguous().transpose(0, 3),
        torch.ones(1).expand(4, 6, 5, 10),
        torch.ones(4, 6, 5, 20)[..., ::2],
    ):
        assert torch.equal(dropout_op(backend, other, seed, 0.5), expected)


@pytest.mark.parametrize("p", [0.1, 0.25, 0.5, 0.9])
def test_share_and_scale(p, backend):
    n = 1 << 20 if backend == "cpu" else 1 << 16
    x = torch.rand(n) + 0.5
    y = F.dropout(x, p)
    kept = y != 0
    assert abs(kept.double().mean().item() - (1 - p)) < 5 * (p * (1 - p) / n) ** 0.5
    torch.testing.assert_close(y[kept], x[kept] / (1 - p))
    pairs = (kept[::2] & kept[1::2]).double().mean().item()  # neighbours are independent
    assert abs(pairs - (1 - p) ** 2) < 5 * (1 / n) ** 0.5


def test_backward_uses_the_forward_mask(backend):
    x = (torch.rand(40, 37) + 0.5).requires_grad_()
    y = F.dropout(x, 0.3)
    grad = torch.randn(40, 37)
    y.backward(grad)
    torch.testing.assert_close(x.grad, grad * (y != 0) / 0.7)


def test_p_zero_and_one(backend):
    x = torch.randn(5, 7, requires_grad=True)
    assert F.dropout(x, 0.0) is x and F.dropout(x, 0.5, training=False) is x
    y = F.dropout(x, 1.0)
    y.backward(torch.ones(5, 7))
    assert (y == 0).all() and (x.grad == 0).all()


def test_a_dropped_nan_is_nan_as_in_torch(backend):
    x = torch.full((64,), float("nan"))
    assert F.dropout(x, 0.5).isnan().all() and torch.nn.functional.dropout(x, 0.5).isnan().all()


def test_generator_governs(backend):
    x = torch.ones(1000)
    torch.manual_seed(5)
    a, b = F.dropout(x), F.dropout(x)
    torch.manual_seed(5)
    assert torch.equal(a, F.dropout(x)) and not torch.equal(a, b)
    with torch.random.fork_rng():
        F.dropout(x)
    assert torch.equal(b, F.dropout(x))


def test_inplace(backend):
    x = torch.ones(100)
    assert F.dropout(x, 0.5, inplace=True) is x and (x == 0).any()
    leaf = torch.ones(100, requires_grad=True)
    h = leaf * 1.0
    y = F.dropout(h, 0.5, inplace=True)
    assert y is h
    y.sum().backward()
    assert torch.equal(leaf.grad, y.detach())
    with pytest.raises(RuntimeError, match="leaf"):
        F.dropout(leaf, 0.5, inplace=True)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_sees_the_same_mask(use_reentrant, backend):
    block = torch.nn.Sequential(
        torch.nn.Linear(8, 8), nn.Dropout(0.5), torch.nn.Linear(8, 8), nn.Dropout(0.5)
    )
    x = torch.randn(4, 8, requires_grad=True)
    gradients = []
    for call in (block, lambda t: checkpoint(block, t, use_reentrant=use_reentrant)):
        torch.manual_seed(1)
        block.zero_grad()
        x.grad = None
        call(x).square().sum().backward()
        gradients.append([x.grad, *(p.grad.clone() for p in block.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["plain", "causal", "keep", "bias"])
def test_softmax_with_dropout(kind, dtype, backend):
    oracle.require_wide(dtype)
    keep = torch.rand(9, 21) > 0.3
    keep[2] = False
    bias = torch.randn(21).to(dtype)
    arguments = {
        "plain": {},
        "causal": {"is_causal": True},
        "keep": {"mask": keep},
        "bias": {"mask": bias},
    }[kind]
    masks = {
        "causal": {"keep": np.tril(np.ones((9, 21), bool))},
        "keep": {"keep": keep.cpu().numpy()},
        "bias": {"add": oracle.wide(bias)},
    }
    actual, eager, exact = [], [], []
    for _ in range(8):
        x = torch.randn(3, 9, 21, dtype=torch.float64).to(dtype).requires_grad_()
        grad = torch.randn(3, 9, 21, dtype=torch.float64).to(dtype)
        y = F.softmax(x, scale=0.6, dropout_p=0.4, **arguments)
        node = y.grad_fn
        (dx,) = torch.autograd.grad(y, x, grad, retain_graph=True)
        factors = dropout_factors(torch.empty(3, 9, 21, dtype=torch.float64), node.options.seed, 0.4)
        actual.append((y.detach(), dx))
        exact.append(
            oracle.softmax(
                oracle.wide(x), oracle.wide(grad), 0.6, factors=oracle.wide(factors), **masks.get(kind, {})
            )
        )
        leaf = x.detach().clone().requires_grad_()
        s = leaf * 0.6
        if kind == "bias":
            s = s + bias
        elif kind != "plain":
            hidden = ~(keep if kind == "keep" else torch.ones(9, 21, dtype=torch.bool).tril())
            s = s.masked_fill(hidden, float("-inf")).masked_fill(hidden.all(-1, keepdim=True), 0.0)
        p = torch.softmax(s, -1)
        if kind == "keep":
            p = p.masked_fill(hidden.all(-1, keepdim=True), 0.0)
        e = p * factors.to(dtype)
        eager.append((e.detach(), *torch.autograd.grad(e, leaf, grad)))
    for i, name in enumerate(("y", "dx")):
        oracle.check([a[i] for a in actual], [e[i] for e in eager], [np.asarray(r[i]) for r in exact], name)


def test_gradcheck_with_a_fixed_seed(backend):
    x = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(6, dtype=torch.float64, requires_grad=True)

    def seeded(function):
        def call(*tensors):
            torch.manual_seed(4)
            return function(*tensors)

        return call

    for function, inputs in (
        (lambda t: F.dropout(t, 0.4), (x,)),
        (lambda t: F.softmax(t, dropout_p=0.4), (x,)),
        (lambda t, m: F.softmax(t, mask=m, scale=0.3, dropout_p=0.4), (x, bias)),
        (lambda t, m: F.softmax(t, mask=m, scale=0.3), (x, bias)),
    ):
        assert torch.autograd.gradcheck(seeded(function), inputs)
        assert torch.autograd.gradgradcheck(seeded(function), inputs)


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("junk", [0.0, 1e30, -1e30, float("inf"), float("nan")])
def test_what_is_masked_does_not_leak(junk, dropout_p, backend):
    """Keys hidden from every query may hold anything, and so may the gradient there (from a value that is NaN)."""
    x, grad = torch.randn(4, 6), torch.randn(4, 6)
    keep = torch.tensor([True, True, False, True, True, False])
    clean, dirty = x.clone().requires_grad_(), x.clone()
    dirty[:, ~keep] = junk
    dirty.requires_grad_()
    dirty_grad = grad.masked_fill(~keep, junk)
    results = []
    for leaf, g in ((clean, grad), (dirty, dirty_grad)):
        torch.manual_seed(3)
        y = F.softmax(leaf, mask=keep, dropout_p=dropout_p)
        results.append((y.detach(), *torch.autograd.grad(y, leaf, g)))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b) and (a[:, ~keep] == 0).all()
