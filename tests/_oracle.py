"""Right values, and the one tolerance of this test suite.

Oracles work in numpy's long double (80 bits on x86), from the same inputs in their dtype, so that they can judge float64 too.

The tolerance: max|y - exact| <= 1.1 max|eager - exact| + one ulp of max|exact| in the dtype, where eager is what a user of
plain torch gets. Nowhere is there an absolute one.
"""

import functools
import math

import mpmath
import numpy as np
import pytest
import torch

WIDE = np.longdouble
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def require_wide(dtype):
    if dtype == torch.float64 and np.finfo(WIDE).nmant <= 52:
        pytest.skip("long double is no wider than float64 on this processor")


def wide(tensor):
    return tensor.detach().cpu().to(torch.float64).numpy().astype(WIDE)


def ulp(value, dtype):
    """Distance between neighbouring numbers of `dtype` at |value|."""
    value = abs(float(value))
    info = torch.finfo(dtype)
    exponent = math.floor(math.log2(value)) if value >= info.tiny else math.log2(info.tiny)
    return 2.0**exponent * info.eps


def check(actual, eager, exact, what=""):
    """The tolerance of this suite (see the module's docstring) over several draws of one quantity.

    The maxima are taken over all draws: in a single small one eager's largest error is a matter of luck.
    """
    error = eager_error = largest = WIDE(0)
    for a, e, right in zip(actual, eager, exact, strict=True):
        assert a.shape == right.shape, f"{what}: shape {tuple(a.shape)} instead of {right.shape}"
        if not right.size:
            continue
        assert np.isfinite(right).all(), f"{what}: the oracle is not finite"
        assert torch.isfinite(a).all(), f"{what}: NaN or infinity in the result"
        error = max(error, np.abs(wide(a) - right).max())
        eager_error = max(eager_error, np.abs(wide(e) - right).max())
        largest = max(largest, np.abs(right).max())
    dtype = actual[0].dtype
    bound = WIDE(1.1) * eager_error + WIDE(ulp(largest, dtype))
    assert error <= bound, (
        f"{what}: error {error:.3g} exceeds {bound:.3g} (eager's {eager_error:.3g}), {dtype}"
    )


@functools.lru_cache(1 << 16)  # the same inputs come again for each backend and instruction set
def _exact_erfc(v):
    with mpmath.workdps(30):
        return WIDE(mpmath.nstr(mpmath.erfc(mpmath.mpf(np.format_float_positional(v))), 25))


def _erfc(z, dtype):
    """erfc; beyond double where the result will judge float64."""
    if dtype != torch.float64:
        return np.vectorize(math.erfc, otypes=[WIDE])(z.astype(np.float64))
    return np.vectorize(_exact_erfc, otypes=[WIDE])(z)


def _sigmoid(x):
    e = np.exp(-np.abs(x))
    return np.where(x < 0, e, WIDE(1)) / (1 + e), np.where(x < 0, WIDE(1), e) / (1 + e)


def gelu(x, grad, dtype):
    cdf = _erfc(-x / np.sqrt(WIDE(2)), dtype) / 2
    pdf = np.exp(-x * x / 2) / np.sqrt(2 * WIDE(np.pi))
    return x * cdf, grad * (cdf + x * pdf)


def gelu_tanh(x, grad, dtype):
    c = np.sqrt(2 / WIDE(np.pi))
    k = WIDE(44715) / WIDE(1000000)
    s, complement = _sigmoid(2 * c * (x + k * x**3))
    return x * s, grad * (s + x * s * complement * 2 * c * (1 + 3 * k * x * x))


def gelu_sigmoid(x, grad, dtype):
    u = WIDE(1702) / WIDE(1000) * x
    s, complement = _sigmoid(u)
    return x * s, grad * (s + u * s * complement)


def silu(x, grad, dtype):
    s, complement = _sigmoid(x)
    return x * s, grad * (s + x * s * complement)


def relu(x, grad, dtype):
    return np.where(x > 0, x, WIDE(0)), np.where(x > 0, grad, WIDE(0))


def norm(x, weight, bias, grad, eps, centred):
    """y, dx, dweight, dbias of LayerNorm (centred) or RMSNorm over the last dimension."""
    c = x - x.mean(-1, keepdims=True) if centred else x
    rstd = 1 / np.sqrt((c * c).mean(-1, keepdims=True) + WIDE(eps))
    h = c * rstd
    y = h if weight is None else h * weight
    y = y if bias is None else y + bias
    v = grad if weight is None else grad * weight
    level = v.mean(-1, keepdims=True) if centred else 0
    dx = rstd * (v - level - h * (v * h).mean(-1, keepdims=True))
    rows = tuple(range(x.ndim - 1))
    return y, dx, (grad * h).sum(rows), grad.sum(rows)


def softmax(x, grad, scale=1.0, keep=None, add=None, factors=None):
    """y and dx of softmax(scale x + add) over the last dimension where `keep`, times dropout's factors."""
    s = x * WIDE(scale) + (0 if add is None else np.where(np.isneginf(add), WIDE(0), add))
    keep = np.ones_like(s, dtype=bool) if keep is None else np.broadcast_to(keep, s.shape)
    if add is not None:
        keep = keep & ~np.isneginf(add)
    s = np.where(keep, s, -WIDE(np.inf))
    top = np.where(keep.any(-1, keepdims=True), s.max(-1, keepdims=True, initial=-np.inf), WIDE(0))
    e = np.where(keep, np.exp(np.where(keep, s - top, WIDE(0))), WIDE(0))
    total = e.sum(-1, keepdims=True)
    p = e / np.where(total == 0, WIDE(1), total)
    f = WIDE(1) if factors is None else factors
    g = grad * f
    return p * f, p * (g - (p * g).sum(-1, keepdims=True)) * WIDE(scale)
