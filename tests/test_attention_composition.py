"""Attention under what others do with gradients, devices and graphs."""

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as TF
from torch.nn.attention import SDPBackend, sdpa_kernel

import pyckpt
import pyckpt.functional as F
from tests import _attention as attention
from tests._attention import FEATURES

SHAPE = (2, 4, 2, 5, 6, 8, 8)
features = pytest.mark.parametrize(
    "name", ["no mask", "boolean mask", "bias (1, heads, q, k), gradient", "packed sequences", "all together"]
)


def _recorded(name, dtype=torch.float32):
    """An output, the leaves that it depends on, and a gradient."""
    q, k, v, grad = attention.make(SHAPE, dtype)
    feature = FEATURES[name](q, k)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    if feature.mask is not None and feature.mask.requires_grad:
        leaves.append(feature.mask)
    return F.attention(*leaves[:3], feature.mask, enable_gqa=True, **feature.options), leaves, grad


@features
def test_batched_gradients(name, backend):
    """is_grads_batched runs the backward under vmap, though forward ran outside."""
    out, leaves, grad = _recorded(name)
    grads = torch.stack([grad, grad.flip(2), torch.ones_like(grad)])
    batched = torch.autograd.grad(out, leaves, grads, is_grads_batched=True, retain_graph=True)
    one_by_one = [torch.autograd.grad(out, leaves, g, retain_graph=True) for g in grads]
    for together, apart in zip(batched, zip(*one_by_one, strict=True), strict=True):
        torch.testing.assert_close(together, torch.stack(apart))


@features
def test_tangents_of_gradients(name, backend):
    """A gradient that carries a tangent, though forward ran without."""
    out, leaves, grad = _recorded(name, torch.float64)
    with forward_ad.dual_level():
        dual = torch.autograd.grad(out, leaves, forward_ad.make_dual(grad, grad.flip(2)), retain_graph=True)
        tangents = [forward_ad.unpack_dual(g).tangent for g in dual]
    # Backward is linear in the gradient.
    for tangent, expected in zip(tangents, torch.autograd.grad(out, leaves, grad.flip(2)), strict=True):
        torch.testing.assert_close(tangent, expected)


def _upstream(kind, out):
    x = torch.randn(out.shape, device=out.device)
    return {
        "one number": torch.ones(1).expand_as(out),
        "one row": x[:1, :1, :1].expand_as(out),
        "transposed": x.mT.contiguous().mT,
        "every other": torch.stack([x, x], -1)[..., 0],
        "negated": torch._neg_view(x),
        "sparse": x.to_sparse(),
    }[kind]


@pytest.mark.parametrize("kind", ["one number", "one row", "transposed", "every other", "negated", "sparse"])
def test_gradients_that_come_in(kind, backend):
    """In any layout."""
    out, leaves, _ = _recorded("no mask")
    grad = _upstream(kind, out)
    actual = torch.autograd.grad(out, leaves, grad, retain_graph=True)
    for a, b in zip(actual, torch.autograd.grad(out, leaves, grad.to_dense().contiguous()), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("under", ["nothing", "cpu autocast"])
@features
def test_meta_tensors(name, under):
    """Shapes of a model that is nowhere yet."""
    q, k, v, _ = attention.make(SHAPE, torch.float32)
    feature = FEATURES[name](q, k)
    expected = F.attention(q, k, v, feature.mask, enable_gqa=True, **feature.options)

    def meta(x):
        if isinstance(x, tuple):
            return tuple(map(meta, x))
        return x.to("meta") if isinstance(x, torch.Tensor) else x

    options = {key: meta(value) for key, value in feature.options.items()}
    with torch.autocast("cpu", torch.bfloat16, enabled=under != "nothing"):
        out = F.attention(*map(meta, (q, k, v, feature.mask)), enable_gqa=True, **options)
    assert out.is_meta and out.shape == expected.shape and out.dtype == expected.dtype


@pytest.mark.parametrize("need_weights", [True, False])
def test_meta_module(need_weights):
    module = pyckpt.nn.MultiheadAttention(16, 4, device="meta")
    x = torch.randn(5, 3, 16, device="meta")
    out, weights = module(x, x, x, need_weights=need_weights)
    assert out.shape == x.shape and (weights is None or weights.shape == (3, 5, 5))


@pytest.mark.parametrize("nested", [(0,), (1,), (2,), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_tensors_are_torchs(layout, nested):
    """What it accepts, and its error for the rest."""
    x = torch.nested.nested_tensor([torch.randn(3, 2, 4), torch.randn(5, 2, 4)], layout=layout).transpose(
        1, 2
    )
    tensors = [x if i in nested else torch.randn(2, 2, 5, 4) for i in range(3)]
    results = []
    for function in (F.attention, TF.scaled_dot_product_attention):
        try:
            results.append(function(*tensors).transpose(1, 2).to_padded_tensor(0.0))
        except (RuntimeError, ValueError) as error:
            results.append(type(error))
    if isinstance(results[1], type):
        assert results[0] is results[1]
    else:
        torch.testing.assert_close(*results)


def test_higher_derivatives_as_torch(backend):
    results = []
    x = torch.randn(1, 2, 3, 4, dtype=torch.float64)
    for function in (F.attention, TF.scaled_dot_product_attention):
        leaf = x.clone().requires_grad_()
        with sdpa_kernel(SDPBackend.MATH):
            y = function(leaf, leaf, leaf, is_causal=True).sin().sum()
            for _ in range(3):
                (g,) = torch.autograd.grad(y, leaf, create_graph=True)
                y = (g**2).sum()
        results.append(g)
    torch.testing.assert_close(*results)
