"""csrc/cuda/attention.cu, run on the CPU, and on a GPU where there is one: what it serves, and what concerns its tiles."""

import types

import numpy as np
import pytest
import torch

import pyckpt.functional as F
from pyckpt import backends
from pyckpt.ops._attention_cuda import unserved
from pyckpt.ops._attention_definition import Given, Options, split
from pyckpt.ops._registry import Unserved
from pyckpt.ops.attention import attention_bwd, attention_fwd
from tests import _attention as attention
from tests import _oracle as oracle
from tests import simt
from tests._attention import FEATURES
from tests._attention_table import ON_CUDA as SERVED

# (batch, heads, kv heads, queries, keys, width, v width): fewer rows and keys than a tile has, and more; keys that are and are
# not a multiple of 4, by which dropout's blocks are drawn.
SHAPES = [
    (2, 4, 2, 9, 21, 64, 64),
    (1, 2, 1, 40, 33, 128, 128),
    (1, 1, 1, 131, 96, 64, 64),
    (1, 1, 1, 70, 130, 128, 128),
]

tensor_cores = pytest.mark.parametrize("backend", ["cuda", "cuda_emulated"], indirect=True)
emulated = pytest.mark.parametrize("backend", ["cuda_emulated"], indirect=True)
every_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
every_feature = pytest.mark.parametrize("name", SERVED)
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def run(name, shape, dtype):
    tensors = attention.make(shape, dtype)
    return attention.ours(*tensors, FEATURES[name](*tensors[:2]))


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def call(q, k, v, given=None, **options):
    """An op's arguments."""
    return q, k, v, *(given or Given()), *Options(0.125, **options)


@every_dtype
@every_shape
@every_feature
@tensor_cores
def test_accuracy(name, shape, dtype, backend, one_thread):
    attention.check(name, shape, dtype, draws=6)


def peaked(q, k, v):
    """Each key scores higher than the one before, far enough for the running reference to move in every tile."""
    k.mul_(torch.linspace(0.1, 4, k.shape[2], dtype=torch.float64)[:, None].to(k.dtype))
    q.mul_(3)


def falling(q, k, v):
    """Scores of thousands, the largest first: later ones underflow."""
    k.mul_(torch.linspace(40, 0, k.shape[2], dtype=torch.float64)[:, None].to(k.dtype))
    q.mul_(4)


def level(q, k, v):
    """Values far from zero: what is subtracted in backward is nearly all there is."""
    v.add_(30)


@every_dtype
@pytest.mark.parametrize("name", ["no mask", "causal, bottom right"])
@pytest.mark.parametrize("change", [peaked, falling, level], ids=lambda f: f.__name__)
@tensor_cores
def test_hard_inputs(change, name, dtype, backend, one_thread):
    results = []
    for _ in range(6):
        tensors = attention.make((1, 2, 1, 36, 150, 64, 64), dtype)
        change(*tensors[:3])
        feature = FEATURES[name](*tensors[:2])
        results.append(
            [compute(*tensors, feature) for compute in (attention.ours, attention.eager, attention.exact)]
        )
    for i, what in enumerate(["out", "dq", "dk", "dv"]):
        oracle.check(*([r[side][i] for r in results] for side in range(3)), what)


@every_dtype
@tensor_cores
def test_logsumexp(dtype, backend):
    """As close as that of float32 operands."""
    actual, eager, exact = [], [], []
    for _ in range(4):
        q, k, v, _ = attention.make((1, 2, 1, 33, 70, 64, 64), dtype)
        actual.append(attention_fwd(backend, *call(q, k, v))[1])
        eager.append(torch.logsumexp(q.float() @ k.float().mT * 0.125, -1))
        s = np.einsum("bhqd,bgkd->bhqk", oracle.wide(q), oracle.wide(k)) / 8
        exact.append(np.log(np.exp(s).sum(-1)))
    oracle.check(actual, eager, exact)


@pytest.mark.parametrize("keys", [61, 62, 63, 64])
@pytest.mark.parametrize("p", [0.3, 0.999, 1.0])
@emulated
def test_the_masks_of_dropout_are_those_of_the_cpu(p, keys, backend, native):
    """Where the output, and the gradient of the values, have zeros: forward and backward draw by themselves."""
    q, k = torch.zeros(2, 3, 50, 64), torch.zeros(2, 3, keys, 64)
    patterns = []
    for name in (backend, "cpu"):
        leaves = [x.to(torch.bfloat16).requires_grad_() for x in (q, k, torch.eye(keys, 64).expand_as(k))]
        torch.manual_seed(5)
        with backends.use(name):
            out = F.attention(*leaves, dropout_p=p)
        (dv,) = torch.autograd.grad(out, leaves[2:], torch.eye(50, 64, dtype=torch.bfloat16).expand_as(out))
        patterns.append((out != 0, dv != 0))
        assert torch.equal(dv[..., :50].mT != 0, out[..., :keys] != 0)
    assert same(*patterns)


@pytest.mark.parametrize("junk", [torch.nan, torch.inf])
@pytest.mark.parametrize("width", [64, 128])
@tensor_cores
def test_junk_that_meets_nothing(width, junk, backend):
    """Keys beyond the last query's; queries that stand before the first key, and their gradients."""
    for queries, keys, alignment in ((20, 90, "top_left"), (90, 20, "bottom_right")):
        tensors = attention.make((1, 2, 1, queries, keys, width, width), torch.bfloat16)
        feature = attention.Feature({"is_causal": True, "causal_alignment": alignment, "dropout_p": 0.2})
        clean = attention.ours(*tensors, feature)
        blind = max(0, queries - keys)
        for i, x in enumerate(tensors):
            x[:, :, :blind] = junk if i in (0, 3) else x[:, :, :blind]
            x[:, :, queries:] = junk  # of keys and values: queries have no more rows
        results = attention.ours(*tensors, feature)
        assert same(results, clean)
        assert not any(x[:, :, :blind].any() for x in results[:2])
        assert not any(x[:, :, queries:].any() for x in results[2:])


@tensor_cores
def test_rows_of_minus_infinity_are_nan(backend):
    """As in torch, where no mask says otherwise; the other rows are not touched."""
    q, k, v, _ = attention.make((1, 1, 1, 5, 70, 64, 64), torch.bfloat16)
    clean = F.attention(q, k, v)
    k[..., 0] = 1
    q[:, :, 3, 0] = -torch.inf
    out = F.attention(q, k, v)
    assert out[:, :, 3].isnan().all() and out[:, :, [0, 1, 2, 4]].isfinite().all() and clean.isfinite().all()


def layouts(x):
    yield x.transpose(1, 2).contiguous().transpose(1, 2)  # read as it lies, as the last but one
    yield x.transpose(-1, -2).contiguous().transpose(-1, -2)
    yield torch.cat([x, x], -1)[..., : x.shape[-1]]
    yield torch.cat([x.new_zeros(1), x.reshape(-1)])[1:].view(x.shape)
    yield x.transpose(0, 2).contiguous().transpose(0, 2)
    yield torch._neg_view(-x)


@tensor_cores
def test_layouts_do_not_change_bits(backend):
    tensors = attention.make((2, 2, 2, 35, 33, 64, 64), torch.bfloat16)
    expected = attention.ours(*tensors, attention.Feature({"is_causal": True}))
    for q, k, v, grad in zip(*map(layouts, tensors), strict=True):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = F.attention(*leaves, is_causal=True)
        assert same([out.detach(), *torch.autograd.grad(out, leaves, grad)], expected)
    q, k, v, _ = tensors
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    F.attention(*leaves).sum().backward()  # a gradient without memory of its own
    assert all(x.grad.isfinite().all() for x in leaves)


@emulated
def test_heads_more_than_two_to_the_31_elements_apart(backend):
    """The memory between them stays untouched."""
    tensors = attention.make((1, 2, 2, 8, 8, 64, 64), torch.bfloat16)
    expected = attention.ours(*tensors, attention.Feature())
    far = []
    for x in tensors:
        base = torch.empty(2**31 + x.numel(), dtype=x.dtype)
        far.append(base.as_strided(x.shape, (0, 2**31, 64, 1)).copy_(x))
    leaves = [x.detach().requires_grad_() for x in far[:3]]
    out = F.attention(*leaves)
    assert same([out.detach(), *torch.autograd.grad(out, leaves, far[3])], expected)


@pytest.mark.parametrize(
    "shape", [(0, 2, 2, 3, 3), (2, 0, 0, 3, 3), (2, 2, 1, 0, 3), (2, 2, 1, 3, 0)], ids=str
)
@pytest.mark.parametrize("name", SERVED)
@tensor_cores
def test_zero_sizes(name, shape, backend):
    tensors = attention.make((*shape, 64, 64), torch.float16)
    feature = FEATURES[name](*tensors[:2]) if shape[1] else attention.Feature()
    out, *gradients = attention.ours(*tensors, feature)
    assert out.shape == tensors[3].shape and not out.any()
    for gradient, x in zip(gradients, tensors, strict=False):
        assert gradient.shape == x.shape and not gradient.any()


@tensor_cores
def test_a_gradient_does_not_depend_on_which_others_are_wanted(backend):
    q, k, v, grad = attention.make((1, 4, 2, 40, 35, 64, 64), torch.bfloat16)
    expected = attention.ours(q, k, v, grad, attention.Feature())[1:]
    for i in range(3):
        leaves = [x.clone().requires_grad_(j == i) for j, x in enumerate((q, k, v))]
        F.attention(*leaves, enable_gqa=True).backward(grad)
        assert torch.equal(leaves[i].grad, expected[i]) and sum(x.grad is not None for x in leaves) == 1


@emulated
def test_schemas_and_shape_functions(backend):
    q, k, v, grad = attention.make((2, 4, 2, 9, 21, 64, 64), torch.bfloat16)
    utils = ("test_schema", "test_faketensor")
    for queries in (q, q.transpose(1, 2).contiguous().transpose(1, 2)):
        forward = call(queries, k, v, right=0)
        torch.library.opcheck(attention_fwd.overload, forward, test_utils=utils)
        out, logsumexp = attention_fwd(backend, *forward)
        for wanted in ([True, True, True, False], [False, True, False, False]):
            backward = (grad, *forward, out, logsumexp, wanted)
            torch.library.opcheck(attention_bwd.overload, backward, test_utils=utils)


@emulated
@every_dtype
@every_shape
@every_feature
def test_any_order_of_threads_gives_the_same_bits(name, shape, dtype, backend):
    results = []
    for order in (("forward", 0), ("reverse", 0), ("random", 1)):
        torch.manual_seed(0)
        with simt.order(simt.load("fast"), *order):
            results.append(run(name, shape, dtype))
    assert same(results[1], results[0]) and same(results[2], results[0])


# What the kernels are not made for: how a call differs from one that they serve.
NOT_SERVED = {
    "float32 operands": {"dtype": torch.float32},
    "float64 operands": {"dtype": torch.float64},
    "heads of width 32": {"width": 32},
    "values of width 128": {"v_width": 128},
    "attn_mask": {"given": Given(mask=torch.ones(1, 1, 1, 1, dtype=torch.bool))},
    "alibi_slopes": {"given": Given(slopes=torch.ones(1, 1))},
    "cu_seqlens": {"given": Given(cu_seqlens_q=torch.tensor([0, 3]), cu_seqlens_k=torch.tensor([0, 3]))},
    "softcap": {"softcap": 2.0},
    "window": {"left": 2},
    "attn_mask, softcap": {"given": Given(mask=torch.ones(1, 1, 1, 1, dtype=torch.bool)), "softcap": 2.0},
}


def arguments(dtype=torch.bfloat16, width=64, v_width=None, given=None, **options):
    q, k, v, _ = attention.make((1, 2, 1, 3, 3, width, v_width or width), dtype)
    return call(q, k, v, given, **options)


@pytest.mark.parametrize("what", NOT_SERVED)
@emulated
def test_what_is_not_served_is_said(what, backend):
    with pytest.raises(Unserved, match=f"backend '{backend}' has no attention kernels for .*{what}"):
        attention_fwd(backend, *arguments(**NOT_SERVED[what]))
    attention_fwd(backend, *arguments())


def test_on_a_gpu_the_rest_goes_to_another_backend(monkeypatch):
    """Unless "cuda" was asked for by name."""
    there = {n: backends.Backend(n, "cuda", "" if n == "cuda" else "planted") for n in ("cuda", "triton")}
    there["reference"] = backends.Backend("reference", None)
    monkeypatch.setattr(backends, "_backends", there)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(attention_fwd, "partial", {"cuda": _unserved})
    tensor = types.SimpleNamespace(is_cpu=False, device=torch.device("cuda"))
    served, others = arguments(right=0), [arguments(**change) for change in NOT_SERVED.values()]
    assert attention_fwd.backend_for(tensor, served) == "cuda"
    assert {attention_fwd.backend_for(tensor, other) for other in others} == {"reference"}
    with backends.use("cuda"):
        assert {attention_fwd.backend_for(tensor, other) for other in others} == {"cuda"}


def _unserved(q, k, v, *rest):
    return unserved(q, k, v, *split(rest))


@emulated
def test_the_benchmark_says_what_is_not_served(backend, one_thread):
    _run, _harness = (pytest.importorskip(f"bench.{name}") for name in ("_run", "_harness"))
    states = []
    for dtype in ("fp32", "bf16"):
        config = _run.Config("attention_causal", dtype, (64, 64), compile=False)
        effort = _harness.Effort(0.01, least=2, most=2)
        rows = _run.measure(config, torch.device("cpu"), effort, _run.Compiler(0), backend, 0)
        states += [row["status"] for row in rows if row["impl"] == "pyckpt"]
    assert states[0].startswith(f"skipped: backend '{backend}' has no attention kernels for float32 operands")
    assert states[1] == "ok"
