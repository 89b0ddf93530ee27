"""Attention: right values for every feature, against a long double oracle and torch's own."""

import itertools
import math

import hypothesis
import pytest
import torch
import torch.nn.functional as TF
from hypothesis import strategies as st

import pyckpt.functional as F
from pyckpt import backends
from pyckpt.ops import _attention_blocks
from tests import _attention as attention
from tests import _attention_table, _interpreter
from tests._attention import FEATURES, SHAPES
from tests._oracle import DTYPES

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
# This shape has everything that the others have; these are for the slow run.
USUAL = "grouped heads, more keys"
shapes = [
    pytest.param(shape, id=name, marks=() if name == USUAL else pytest.mark.slow)
    for name, shape in SHAPES.items()
]
every_feature = pytest.mark.parametrize("name", FEATURES)


@every_dtype
@pytest.mark.parametrize("shape", shapes)
@every_feature
def test_accuracy(name, shape, dtype, backend, one_thread):
    if backend == _interpreter.NAME and shape != SHAPES[USUAL] and dtype != torch.bfloat16:
        pytest.skip("the interpreter takes minutes for this shape in every dtype")
    attention.check(name, shape, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("name", _attention_table.ON_CUDA)
def test_accuracy_of_wide_heads(name, width, dtype, backend, one_thread):
    """What tensor cores are used for."""
    attention.check(name, (1, 2, 1, 40, 33, width, width), dtype, draws=6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["no mask", "causal, bottom right", "all together"])
def test_accuracy_of_many_blocks(name, dtype, native, monkeypatch, one_thread):
    monkeypatch.setattr(_attention_blocks, "SCORE_BYTES", 2**15)
    monkeypatch.setattr(_attention_blocks, "LIMITED_ROWS", 32)
    attention.check(name, (1, 4, 2, 130, 96, 16, 16), dtype, draws=2)


@every_feature
def test_every_instruction_set(name, isa, one_thread):
    attention.check(name, SHAPES["grouped heads, more keys"], torch.float32)


@pytest.mark.parametrize("width", [16, 20, 33, 80, 96, 128, 192, 256])
def test_widths(width, backend, one_thread):
    attention.check("causal, top left", (1, 2, 1, 12, 12, width, width), torch.float32)


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(
    name=st.sampled_from(sorted(FEATURES)),
    batch=st.integers(1, 3),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    queries=st.integers(1, 20),
    keys=st.integers(1, 20),
    width=st.integers(1, 20),
    v_width=st.integers(1, 20),
    block=st.sampled_from([8, 128, 800, 2**23]),
    seed=st.integers(0, 2**16),
)
def test_any_sizes_as_the_reference(name, batch, kv_heads, group, queries, keys, width, v_width, block, seed):
    """The kernels against the definition, in float64."""
    if backends.native is None:
        pytest.skip(backends.available()["cpu"].unavailable)
    torch.manual_seed(seed)
    shape = (batch, kv_heads * group, kv_heads, queries, keys, width, v_width)
    tensors = attention.make(shape, torch.float64)
    feature = FEATURES[name](*tensors[:2])
    results = []
    before, threads = _attention_blocks.SCORE_BYTES, torch.get_num_threads()
    try:
        _attention_blocks.SCORE_BYTES = block
        torch.set_num_threads(1)
        for backend in ("cpu", "reference"):
            with backends.use(backend):
                results.append(attention.ours(*tensors, feature))
    finally:
        _attention_blocks.SCORE_BYTES = before
        torch.set_num_threads(threads)
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("masked", [None, "boolean", "bias", "causal"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_as_the_math_backend(masked, dtype, backend):
    q, k, v, grad = attention.make((2, 4, 2, 9, 21, 16, 24), dtype)
    mask = {"boolean": torch.rand(9, 21) > 0.2, "bias": torch.randn(2, 1, 9, 21).to(dtype)}.get(masked)
    arguments = {"attn_mask": mask, "is_causal": masked == "causal", "enable_gqa": True}
    results = []
    for function in (F.attention, TF.scaled_dot_product_attention):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            out = function(*leaves, **arguments)
        results.append([out.detach(), *torch.autograd.grad(out, leaves, grad)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("shape", [(5, 4), (3, 5, 4), (2, 3, 5, 4), (2, 2, 3, 5, 4)], ids=len)
def test_leading_dimensions(shape, backend):
    q, k, v = (torch.randn(shape) for _ in range(3))
    mask = torch.rand(*shape[:-1], shape[-2]) > 0.3
    mask[..., 0] = True
    for m in (None, mask, mask[..., :1, :]):
        torch.testing.assert_close(F.attention(q, k, v, m), TF.scaled_dot_product_attention(q, k, v, m))
    if len(shape) > 2:  # keys for all leading dimensions together
        torch.testing.assert_close(
            F.attention(q, k[..., :1, :, :], v[..., :1, :, :]),
            TF.scaled_dot_product_attention(
                q, k[..., :1, :, :].expand(shape), v[..., :1, :, :].expand(shape)
            ),
        )


LIMITS = {
    "no limits": {},
    "causal": {"is_causal": True},
    "causal, bottom right": {"is_causal": True, "causal_alignment": "bottom_right"},
    "window": {"window": (3, 2)},
    "packed": {"cu_seqlens": (torch.tensor([0, 5, 7]), torch.tensor([0, 4, 8])), "is_causal": True},
}


def within(options, queries, keys):
    """Which scores the limits leave, told from values that are the identity."""
    q, v = torch.zeros(1, 1, queries, 1), torch.eye(keys)[None, None]
    with backends.use("reference"):
        return F.attention(q, torch.zeros(1, 1, keys, 1), v, **options)[0, 0] > 0


@pytest.mark.parametrize("junk", [math.nan, math.inf, 1e30])
@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize("limits", LIMITS)
def test_junk_behind_masks(limits, additive, junk, backend):
    """In keys and values that nobody sees, in queries that see nothing, and in such queries' gradients: because of a mask, or of
    mask and limits together."""
    if backend == _interpreter.NAME and LIMITS[limits] and not math.isnan(junk):
        pytest.skip("takes the interpreter a minute; NaN stands for the others")
    q, k, v, grad = attention.make((2, 4, 2, 7, 9, 8, 8), torch.float32)
    seen = within(LIMITS[limits], 7, 9)
    keep = torch.rand(2, 4, 7, 9) > 0.3
    keep[..., 3:5], keep[..., 6, :] = ~seen[:, 3:5], ~seen[6]
    mask = torch.where(keep, 0.5, -math.inf) if additive else keep
    feature = attention.Feature(LIMITS[limits], mask=mask)
    clean = attention.ours(q, k, v, grad, feature)
    for x in (k, v):
        x[:, :, 3:5] = junk
    for x in (q, grad):
        x[:, :, 6] = junk
    for a, b in zip(attention.ours(q, k, v, grad, feature), clean, strict=True):
        assert torch.equal(a, b)
    assert (clean[0][:, :, 6] == 0).all() and (clean[1][:, :, 6] == 0).all()
    assert (clean[2][:, :, 3:5] == 0).all() and (clean[3][:, :, 3:5] == 0).all()


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"dropout_p": 0.5}], ids=str)
@pytest.mark.parametrize(
    "shape",
    [(0, 2, 2, 3, 3, 4, 4), (2, 2, 1, 0, 3, 4, 4), (2, 2, 1, 3, 0, 4, 4), (1, 2, 2, 3, 3, 4, 0)],
    ids=str,
)
def test_zero_sizes(shape, options, backend):
    tensors = attention.make(shape, torch.float32)
    out, *gradients = attention.ours(*tensors, attention.Feature(options))
    assert out.shape == tensors[3].shape and (out == 0).all()
    for gradient, x in zip(gradients, tensors, strict=False):
        assert gradient.shape == x.shape and (gradient == 0).all()


def layouts(x):
    yield x.transpose(1, 2).contiguous().transpose(1, 2)
    yield x.transpose(-1, -2).contiguous().transpose(-1, -2)
    yield torch.cat([x, x], -1)[..., : x.shape[-1]]
    yield torch.stack([x, x], -1)[..., 0]
    yield torch._neg_view(-x)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_layouts(dtype, backend):
    tensors = attention.make((2, 3, 3, 10, 10, 8, 8), dtype)
    expected = attention.ours(*tensors, attention.Feature())
    for q, k, v, grad in zip(*map(layouts, tensors), strict=True):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = F.attention(*leaves)
        for a, b in zip([out.detach(), *torch.autograd.grad(out, leaves, grad)], expected, strict=True):
            assert torch.equal(a, b) or torch.allclose(a, b, rtol=1e-6, atol=1e-6)


def test_mask_layouts(backend):
    q, k, v, grad = attention.make((2, 3, 3, 6, 10, 8, 8), torch.float32)
    for mask in (torch.rand(2, 3, 6, 10) > 0.3, torch.randn(2, 3, 6, 10)):
        expected = attention.ours(q, k, v, grad, attention.Feature(mask=mask))
        for other in (
            mask.transpose(2, 3).contiguous().transpose(2, 3),
            torch.stack([mask, mask], -1)[..., 1],
            mask.transpose(0, 1).contiguous().transpose(0, 1),
        ):
            for a, b in zip(
                attention.ours(q, k, v, grad, attention.Feature(mask=other)), expected, strict=True
            ):
                assert torch.equal(a, b)


def test_packed_sequences_are_separate_calls(backend):
    """Any number of them, as in a padded batch; each with its own places."""
    lengths = [5, 1, 0, 9]
    bounds = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    q, k, v, grad = attention.make((1, 4, 2, 15, 15, 8, 8), torch.float64)
    options = {"is_causal": True, "window": (3, None), "alibi_slopes": torch.rand(4)}
    packed = attention.ours(q, k, v, grad, attention.Feature(options | {"cu_seqlens": bounds}))
    for a, b in itertools.pairwise(bounds.tolist()):
        apart = attention.ours(*(x[:, :, a:b] for x in (q, k, v, grad)), attention.Feature(options))
        for whole, part in zip(packed, apart, strict=True):
            torch.testing.assert_close(whole[:, :, a:b], part)


def test_dropout_statistics_and_seeds(backend):
    """The kept share, the scale, p = 1; another mask at each call, the same from one seed."""
    n = 64
    q, k, v = torch.zeros(1, 2, n, 4), torch.zeros(1, 2, n, 4), torch.eye(n).expand(1, 2, n, n)
    torch.manual_seed(3)
    a, b = (F.attention(q, k, v, dropout_p=0.25) for _ in range(2))
    torch.manual_seed(3)
    assert torch.equal(F.attention(q, k, v, dropout_p=0.25), a) and not torch.equal(a, b)
    kept = a != 0
    assert abs(kept.float().mean() - 0.75) < 0.03
    torch.testing.assert_close(a[kept], torch.full((int(kept.sum()),), 1 / n / 0.75))
    assert (F.attention(q, k, v, dropout_p=1.0) == 0).all()


def test_only_a_bias_needs_a_gradient(backend):
    """And every other subset."""
    q, k, v, grad = attention.make((2, 4, 2, 5, 6, 8, 8), torch.float32)
    bias = torch.randn(1, 4, 5, 6)
    whole = [x.clone().requires_grad_() for x in (q, k, v, bias)]
    expected = torch.autograd.grad(F.attention(*whole, enable_gqa=True), whole, grad)
    for needs in itertools.product((False, True), repeat=4):
        leaves = [x.clone().requires_grad_(n) for x, n in zip((q, k, v, bias), needs, strict=True)]
        out = F.attention(*leaves, enable_gqa=True)
        assert out.requires_grad == any(needs)
        if any(needs):
            out.backward(grad)
        for x, n, e in zip(leaves, needs, expected, strict=True):
            assert (x.grad is not None) == n
            if n:
                torch.testing.assert_close(x.grad, e)


@pytest.mark.parametrize(
    "name",
    [
        "no mask",
        "boolean mask",
        "bias (1, heads, q, k), gradient",
        "softcap",
        "all together",
        "packed sequences",
    ],
)
def test_gradcheck_and_double_backward(name, backend, one_thread):
    if backend == "triton_interpreted" and name != "boolean mask":
        pytest.skip("takes the interpreter up to a minute; its gradients are judged by test_accuracy")
    q, k, v, _ = attention.make((1, 2, 1, 3, 4, 2, 2), torch.float64)
    feature = FEATURES[name](q, k)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    mask = feature.mask
    if mask is not None and mask.requires_grad:
        mask = torch.randn(mask.shape, dtype=torch.float64).requires_grad_()
        leaves.append(mask)

    def call(q, k, v, *bias):
        torch.manual_seed(attention.SEED)
        return F.attention(q, k, v, bias[0] if bias else mask, enable_gqa=True, **feature.options)

    assert torch.autograd.gradcheck(call, leaves)
    assert torch.autograd.gradgradcheck(call, leaves)


def test_table_of_features_is_current():
    """docs/attention.md promises what test_accuracy tests. From a checkout only."""

    if not _attention_table.PAGE.exists():
        pytest.skip("no checkout around the tests")
    told = _attention_table.features_told()
    assert list(told) == list(FEATURES)
    assert told == {name: _attention_table.expected(name) for name in FEATURES}
