"""Attention's features, each with what a user of plain torch writes for it and the right values in long double."""

import math
from dataclasses import dataclass, field

import numpy as np
import torch

import pyckpt.functional as F
from pyckpt import backends
from pyckpt.ops.dropout import dropout_factors
from tests import _interpreter
from tests import _oracle as oracle
from tests._oracle import WIDE

SEED = 11


@dataclass
class Feature:
    """How a call is made, and what it means: which scores count, and what is added to them (in the wide dtype)."""

    options: dict = field(default_factory=dict)
    mask: torch.Tensor | None = None
    keep: torch.Tensor | None = None
    add: torch.Tensor | None = None


def position(queries, keys, bottom_right=False):
    offset = keys - queries if bottom_right else 0
    return torch.arange(keys) - (torch.arange(queries) + offset)[:, None]


def _plain(q, k):
    return Feature()


def _keep(q, k):
    keep = torch.rand(q.shape[0], 1, q.shape[2], k.shape[2]) > 0.3
    keep[:, :, 1 % q.shape[2]] = False  # a query that sees nothing
    keep[..., k.shape[2] // 2] = False  # a key that nobody sees
    return Feature(mask=keep, keep=keep)


def _padding(q, k):
    keep = torch.ones(q.shape[0], 1, 1, k.shape[2], dtype=torch.bool)
    keep[-1, :, :, k.shape[2] // 2 :] = False
    return Feature(mask=keep, keep=keep)


def _bias(*broadcast, dtype=None):
    def feature(q, k):
        sizes = (*q.shape[:3], k.shape[2])
        bias = torch.randn([1 if b else n for n, b in zip(sizes, broadcast, strict=True)]).to(
            dtype or q.dtype
        )
        bias[..., :1] = -torch.inf if k.shape[2] > 1 and not broadcast[3] else bias[..., :1]
        bias = bias.requires_grad_()
        return Feature(mask=bias, keep=bias.detach() != -torch.inf, add=bias.detach().double())

    return feature


def _causal(bottom_right):
    def feature(q, k):
        alignment = "bottom_right" if bottom_right else "top_left"
        keep = position(q.shape[2], k.shape[2], bottom_right) <= 0
        return Feature({"is_causal": True, "causal_alignment": alignment}, keep=keep)

    return feature


def _window(q, k):
    distance = position(q.shape[2], k.shape[2])
    return Feature({"window": (3, 2)}, keep=(distance >= -3) & (distance <= 2))


def _softcap(q, k):
    return Feature({"softcap": 1.5})


def _alibi(q, k):
    slopes = torch.rand(q.shape[1])
    distance = position(q.shape[2], k.shape[2], True)
    add = -slopes.double()[:, None, None] * distance.abs()
    options = {"alibi_slopes": slopes, "is_causal": True, "causal_alignment": "bottom_right"}
    return Feature(options, keep=distance <= 0, add=add)


def _packed(q, k):
    """Three sequences, one of them without keys, and rows behind the last."""
    queries, keys = q.shape[2], k.shape[2]
    bounds_q = torch.tensor([0, queries // 3, queries // 2, max(queries // 2, queries - 1)])
    bounds_k = torch.tensor([0, keys // 4, keys // 4, max(keys // 4, keys - 2)], dtype=torch.int32)
    keep = torch.zeros(queries, keys, dtype=torch.bool)
    for a, b, c, d in zip(bounds_q, bounds_q[1:], bounds_k, bounds_k[1:], strict=False):
        keep[a:b, c:d] = position(int(b - a), int(d - c)) <= 0
    return Feature({"cu_seqlens": (bounds_q, bounds_k), "is_causal": True}, keep=keep)


def _dropout(q, k):
    return Feature({"dropout_p": 0.3})


def _everything(q, k):
    bias = torch.randn(1, q.shape[1], 1, k.shape[2]).to(q.dtype).requires_grad_()
    slopes = torch.rand(q.shape[0], q.shape[1])
    distance = position(q.shape[2], k.shape[2], True)
    options = {
        "alibi_slopes": slopes,
        "softcap": 2.0,
        "window": (7, 3),
        "causal_alignment": "bottom_right",
        "dropout_p": 0.2,
        "scale": 0.4,
    }
    add = bias.detach().double() - slopes.double()[..., None, None] * distance.abs()
    return Feature(options, mask=bias, keep=(distance >= -7) & (distance <= 3), add=add)


FEATURES = {
    "no mask": _plain,
    "boolean mask": _keep,
    "padding mask": _padding,
    "bias (batch, heads, q, k), gradient": _bias(False, False, False, False),
    "bias (1, heads, q, k), gradient": _bias(True, False, False, False),
    "bias (batch, 1, 1, k), gradient": _bias(False, True, True, False),
    "bias (1, heads, q, 1), gradient": _bias(True, False, False, True),
    "float32 bias (1, heads, q, k), gradient": _bias(True, False, False, False, dtype=torch.float32),
    "causal, top left": _causal(False),
    "causal, bottom right": _causal(True),
    "sliding window": _window,
    "softcap": _softcap,
    "ALiBi": _alibi,
    "packed sequences": _packed,
    "dropout": _dropout,
    "all together": _everything,
}
# (batch, heads, kv heads, queries, keys, width, v width)
SHAPES = {
    "equal": (2, 3, 3, 17, 17, 16, 16),
    "grouped heads, more keys": (2, 4, 2, 9, 21, 24, 24),
    "one kv head, fewer keys, wider values": (1, 4, 1, 21, 6, 40, 80),
    "one kv head, 64 wide": (1, 2, 1, 40, 33, 64, 64),
}


def make(shape, dtype):
    """q, k, v and the output's gradient."""
    batch, heads, kv_heads, queries, keys, width, v_width = shape
    sizes = (
        (batch, heads, queries, width),
        (batch, kv_heads, keys, width),
        (batch, kv_heads, keys, v_width),
        (batch, heads, queries, v_width),
    )
    return [torch.randn(size, dtype=torch.float64).to(dtype) for size in sizes]


def ours(q, k, v, grad, feature):
    """[out, dq, dk, dv(, dbias)]."""
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    mask = feature.mask
    if mask is not None and mask.requires_grad:
        mask = mask.detach().clone().requires_grad_()
        leaves.append(mask)
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        out = F.attention(*leaves[:3], mask, enable_gqa=q.shape[1] != k.shape[1], **feature.options)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def factors(q, k, feature):
    p = feature.options.get("dropout_p", 0.0)
    if not p:
        return None
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        seed = torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=q.device)
    return dropout_factors(torch.empty(*q.shape[:3], k.shape[2], dtype=torch.float64), seed, p)


def _scale(q, feature):
    return feature.options.get("scale", 1 / math.sqrt(q.shape[-1]))


def eager(q, k, v, grad, feature):
    """The composition that users write, each operation rounded to the dtype."""
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    q, k, v = leaves
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    scores = (q @ k.transpose(-1, -2)) * _scale(q, feature)
    if cap := feature.options.get("softcap"):
        scores = cap * torch.tanh(scores / cap)
    if feature.add is not None:
        add = feature.add
        if feature.mask is not None and feature.mask.requires_grad:
            bias = feature.mask.detach().clone().requires_grad_()
            leaves.append(bias)
            finite = bias.masked_fill(bias == -torch.inf, 0.0)
            add = (add - feature.mask.detach().double()).masked_fill(feature.mask == -torch.inf, 0.0)
            scores = scores + finite
        scores = scores + add.to(scores.dtype)
    kept = None
    if feature.keep is not None:
        keep = feature.keep.expand(scores.shape)
        kept = keep.any(-1, keepdim=True)
        scores = scores.masked_fill(~keep, -torch.inf).masked_fill(~kept, 0.0)
    p = torch.softmax(scores, -1)
    if kept is not None:
        p = p.masked_fill(~kept, 0.0)
    f = factors(q, k, feature)
    out = (p if f is None else p * f.to(p.dtype)).to(v.dtype) @ v
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def _grouped(x, kv_heads):
    """Sums over the heads that share a kv head."""
    return x.reshape(x.shape[0], kv_heads, -1, *x.shape[2:]).sum(2)


def exact(q, k, v, grad, feature):
    """The same in long double."""
    kv_heads = k.shape[1]
    f = factors(q, k, feature)
    f = WIDE(1) if f is None else oracle.wide(f)
    scale = WIDE(_scale(q, feature))
    q, k, v, grad = map(oracle.wide, (q, k, v, grad))
    k, v = (np.repeat(x, q.shape[1] // kv_heads, 1) for x in (k, v))
    s = np.einsum("bhqd,bhkd->bhqk", q, k) * scale
    slope = WIDE(1)
    if cap := feature.options.get("softcap"):
        t = np.tanh(s / WIDE(cap))
        s, slope = cap * t, 1 - t * t
    if feature.add is not None:
        add = feature.add.cpu().numpy().astype(WIDE)
        s = s + np.where(np.isneginf(add), WIDE(0), add)
    keep = np.ones(s.shape, dtype=bool)
    if feature.keep is not None:
        keep = np.broadcast_to(feature.keep.cpu().numpy(), s.shape)
    top = np.where(keep, s, -np.inf).max(-1, keepdims=True, initial=-np.inf)
    e = np.where(keep, np.exp(np.where(keep, s - np.where(np.isneginf(top), 0, top), 0)), WIDE(0))
    total = e.sum(-1, keepdims=True)
    p = e / np.where(total == 0, WIDE(1), total)
    out = np.einsum("bhqk,bhkd->bhqd", p * f, v)
    dv = np.einsum("bhqk,bhqd->bhkd", p * f, grad)
    dp = np.einsum("bhqd,bhkd->bhqk", grad, v) * f
    db = p * (dp - (p * dp).sum(-1, keepdims=True))
    ds = db * slope * scale
    dq, dk = np.einsum("bhqk,bhkd->bhqd", ds, k), np.einsum("bhqk,bhqd->bhkd", ds, q)
    result = [out, dq, _grouped(dk, kv_heads), _grouped(dv, kv_heads)]
    if feature.mask is not None and feature.mask.requires_grad:
        dims = tuple(d for d, n in enumerate(feature.mask.shape) if n == 1)
        result.append(db.sum(dims, keepdims=True) if dims else db)
    return result


def _check_root_mean_square(actual, eager, right, what):
    """The suite's tolerance for the root mean square in place of the maximum, for float64 and where results are wider than the
    operands: the largest of the errors of several matrix products depends on the order of their sums, and differs by a factor
    between two equally good ones."""
    error, eager_error = (
        np.sqrt(np.mean([np.mean((oracle.wide(a) - r) ** 2) for a, r in zip(side, right, strict=True)]))
        for side in (actual, eager)
    )
    bound = WIDE(1.1) * eager_error
    assert error <= bound, f"{what}: root mean square error {error:.3g} exceeds {bound:.3g}"


def check(name, shape, dtype, draws=None):
    """A feature on the backend in use, by the suite's one tolerance, on outputs and every gradient. A draw takes the interpreter
    as long as a hundred take others: it gets one, or a few where eager's luck in one would decide. Where so few say no, eight
    times as many decide: how the products' sums are ordered depends on the processor, and with it who is lucky."""
    oracle.require_wide(dtype)
    few = 3 if dtype in (torch.float32, torch.float64) else 1
    draws = draws or (few if backends.select("cpu") == _interpreter.NAME else 12)
    results = _draw(name, shape, dtype, draws)
    try:
        _compare(results, f"{name} {shape}")
    except AssertionError:
        _compare(results + _draw(name, shape, dtype, 7 * draws), f"{name} {shape}")


def _draw(name, shape, dtype, draws):
    """(ours, eager's, exact) of each."""
    results = []
    for _ in range(draws):
        tensors = make(shape, dtype)
        feature = FEATURES[name](*tensors[:2])
        results.append([compute(*tensors, feature) for compute in (ours, eager, exact)])
    return results


def _compare(results, where):
    dtype = results[0][0][0].dtype
    for i, what in enumerate(["out", "dq", "dk", "dv", "dbias"][: len(results[0][0])]):
        # Where the result is no narrower than the arithmetic, no unit in its last place covers what those sums differ by.
        exactly = dtype == torch.float64 or results[0][0][i].dtype != dtype
        compare = _check_root_mean_square if exactly else oracle.check
        compare(*([r[side][i] for r in results] for side in range(3)), f"{where} {what}")
