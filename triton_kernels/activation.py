"""GELU, SiLU, ReLU. Forward (which is also the recompute) reads x and writes y; backward reads grad and x and writes dx: 2 and 3
elements moved per element. The formulas are those of csrc/math.h, the codes those of its Activation: 0 GELU by erf, 1 by tanh,
4 by the sigmoid, 2 SiLU, 3 ReLU.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from ._common import arithmetic, exp_nonpositive, exp_square, is_half, launch, multiply_add, ratio
from ._elementwise import (
    BLOCK,
    dense_like,
    element_indices,
    element_offsets,
    few_dims,
    padded,
    programs,
    warps,
)

_LINEAR = tl.constexpr(1.5957691216057308)  # 2 sqrt(2 / pi)
_SIGMOID_SCALE = tl.constexpr(1.702)
_CUBIC = tl.constexpr(0.044715 * 1.5957691216057308)


@triton.jit
def _normal_single(a, HALF: tl.constexpr):
    """Density and upper tail of the standard normal distribution at a >= 0, from one exponential: tail exp(a^2 / 2) is a
    polynomial in u = a / (1 + 0.3 a), after Abramowitz & Stegun 26.2.17."""
    a = tl.minimum(a, 13.2687)  # from where exp(-a^2 / 2) is no normal number any more
    e = exp_square(a, HALF)
    u = ratio(a, multiply_add(a, 0.3, 1.0), HALF)
    u2 = u * u
    c0 = multiply_add(u, -3.989422632e-01, 0.5)
    c2 = multiply_add(u, -1.888486881e-02, 1.303171199e-01)
    c4 = multiply_add(u, 3.608655576e-04, -4.546415615e-04)
    c6 = multiply_add(u, -1.129138536e-05, 2.788451771e-05)
    p = tl.fma(tl.fma(tl.fma(c6, u2, c4), u2, c2), u2, c0)
    return 0.398942280 * e, p * e


@triton.jit
def _normal_double(a):
    """The same for float64: exp(-a^2 / 2) q(t) / (a + 5), t = (a - 5) / (a + 5)."""
    a = tl.minimum(a, 37.65869)
    r = 1.0 / (a + 5.0)
    t = (a - 5.0) * r
    q = t * -8.36627608762287517e-10 + 4.84140359359810075e-10
    q = q * t + 9.54269539761261150e-09
    q = q * t + -4.92178722711651175e-09
    q = q * t + -6.80212736238434666e-08
    q = q * t + 3.56267736992871036e-08
    q = q * t + 4.34248499187807502e-07
    q = q * t + -3.30852215796474361e-07
    q = q * t + -2.76949154628418755e-06
    q = q * t + 3.97776217961243910e-06
    q = q * t + 1.66811657192719114e-05
    q = q * t + -4.97617059794555120e-05
    q = q * t + -5.93756912320177370e-05
    q = q * t + 5.44898813330748277e-04
    q = q * t + -7.97869406600651247e-04
    q = q * t + -2.99337673540330581e-03
    q = q * t + 2.07950668006901228e-02
    q = q * t + -6.91186387090605564e-02
    q = q * t + 1.65020366170352761e-01
    q = q * t + -3.13533156671204016e-01
    q = q * t + 4.95305615969976687e-01
    q = q * t + -6.65382502890057848e-01
    q = q * t + 7.69193049750062974e-01
    e = tl.where(a < 37.65869, tl.exp(-0.5 * a * a), 0.0)
    return e * 0.3989422804014327, e * r * q


@triton.jit
def _central_slope(s):
    """(cdf(x) - 1/2) / x on [-1, 1] as a polynomial in s = x^2, where the tail's form loses digits of float64."""
    p = s * 4.07432697742662756e-12 + -1.10643282827558905e-10
    p = p * s + 2.27041375856759989e-09
    p = p * s + -4.12241075141608145e-08
    p = p * s + 6.65967987965523093e-07
    p = p * s + -9.44465579310384498e-06
    p = p * s + 1.15434687516559410e-04
    p = p * s + -1.18732821546803434e-03
    p = p * s + 9.97355701003502237e-03
    p = p * s + -6.64903800669054273e-02
    return p * s + 3.98942280401432703e-01


@triton.jit
def _normal(x, HALF: tl.constexpr):
    """Density and distribution function of the standard normal distribution at x. Not NaN for NaN."""
    if x.dtype == tl.float64:
        density, tail = _normal_double(tl.abs(x))
        cdf = tl.where(tl.abs(x) < 1.0, x * _central_slope(x * x) + 0.5, tl.where(x > 0.0, 1.0 - tail, tail))
    else:
        density, tail = _normal_single(tl.abs(x), HALF)
        cdf = tl.where(x > 0.0, 1.0 - tail, tail)
    return density, cdf


@triton.jit
def _sigmoid(x, HALF: tl.constexpr):
    """sigmoid(x) and 1 - sigmoid(x), from exp(-|x|): no overflow, and no cancellation on either side."""
    e = exp_nonpositive(-tl.abs(x), HALF)
    value = ratio(tl.where(x < 0.0, e, 1.0), 1.0 + e, HALF)
    return value, tl.where(x < 0.0, 1.0 - value, e * value)


@triton.jit
def _times_sigmoid(x, z, HALF: tl.constexpr):
    """x sigmoid(z), with fewer roundings than by way of the sigmoid."""
    e = exp_nonpositive(-tl.abs(z), HALF)
    return ratio(tl.where(z < 0.0, x * e, x), 1.0 + e, HALF)


@triton.jit
def _twice_u(x):
    """2 sqrt(2 / pi) (x + 0.044715 x^3): GELU's tanh form is x sigmoid of this."""
    return x * multiply_add(x * x, _CUBIC, _LINEAR)


@triton.jit
def _value(x, OP: tl.constexpr, HALF: tl.constexpr):
    """The factor x brings in NaN, and infinity times zero where torch.nn has it too."""
    if OP == 0:
        return x * _normal(x, HALF)[1]
    elif OP == 1:
        return _times_sigmoid(x, _twice_u(x), HALF)
    elif OP == 2:
        return _times_sigmoid(x, x, HALF)
    elif OP == 4:
        return _times_sigmoid(x, x * _SIGMOID_SCALE, HALF)
    else:
        return tl.where(x < 0.0, 0.0, x)


@triton.jit
def _gradient(grad, x, OP: tl.constexpr, HALF: tl.constexpr):
    if OP == 0:
        density, cdf = _normal(x, HALF)
        return grad * tl.fma(x, density, cdf)
    elif OP == 1:
        value, rest = _sigmoid(_twice_u(x), HALF)
        square = tl.minimum(x * x, 1e4)  # bounded: the sigmoid is saturated there
        du = multiply_add(square, 3 * _CUBIC, _LINEAR)
        return grad * tl.fma(x * (value * rest), du, value)
    elif OP == 2:
        value, rest = _sigmoid(x, HALF)
        return grad * (value * tl.fma(x, rest, tl.full(x.shape, 1.0, x.dtype)))
    elif OP == 4:
        value, rest = _sigmoid(x * _SIGMOID_SCALE, HALF)
        return grad * (value * tl.fma(x * _SIGMOID_SCALE, rest, tl.full(x.shape, 1.0, x.dtype)))
    else:
        return tl.where(x <= 0.0, 0.0, grad)


@triton.jit
def _forward(x, y, n, OP: tl.constexpr, BLOCK: tl.constexpr):
    F: tl.constexpr = arithmetic(x.dtype.element_ty)
    HALF: tl.constexpr = is_half(x.dtype.element_ty)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    i = tl.arange(0, BLOCK)
    inside = i < n - start
    value = _value(tl.load(x + start + i, mask=inside, other=0.0).to(F), OP, HALF)
    tl.store(y + start + i, value.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _backward(grad, x, dx, n, OP: tl.constexpr, BLOCK: tl.constexpr):
    F: tl.constexpr = arithmetic(x.dtype.element_ty)
    HALF: tl.constexpr = is_half(x.dtype.element_ty)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    i = tl.arange(0, BLOCK)
    inside = i < n - start
    g = tl.load(grad + start + i, mask=inside, other=0.0).to(F)
    value = _gradient(g, tl.load(x + start + i, mask=inside, other=0.0).to(F), OP, HALF)
    tl.store(dx + start + i, value.to(dx.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize_on_alignment=["n", "n1", "n2", "x0", "x1", "x2", "y0", "y1", "y2"])
def _forward_strided(
    x, y, n, n1, n2, x0, x1, x2, y0, y1, y2, OP: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr
):
    F: tl.constexpr = arithmetic(x.dtype.element_ty)
    HALF: tl.constexpr = is_half(x.dtype.element_ty)
    i = element_indices(n, BLOCK, WIDE)
    value = _value(tl.load(x + element_offsets(i, n1, n2, x0, x1, x2), mask=i < n, other=0.0).to(F), OP, HALF)
    tl.store(y + element_offsets(i, n1, n2, y0, y1, y2), value.to(y.dtype.element_ty), mask=i < n)


@triton.jit(
    do_not_specialize_on_alignment=["n", "n1", "n2", "g0", "g1", "g2", "x0", "x1", "x2", "y0", "y1", "y2"]
)
def _backward_strided(
    grad, x, dx, n, n1, n2, g0, g1, g2, x0, x1, x2, y0, y1, y2,
    OP: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    F: tl.constexpr = arithmetic(x.dtype.element_ty)
    HALF: tl.constexpr = is_half(x.dtype.element_ty)
    i = element_indices(n, BLOCK, WIDE)
    g = tl.load(grad + element_offsets(i, n1, n2, g0, g1, g2), mask=i < n, other=0.0).to(F)
    value = _gradient(
        g, tl.load(x + element_offsets(i, n1, n2, x0, x1, x2), mask=i < n, other=0.0).to(F), OP, HALF
    )
    tl.store(dx + element_offsets(i, n1, n2, y0, y1, y2), value.to(dx.dtype.element_ty), mask=i < n)


def forward(op: int, x: Tensor, y: Tensor, view: Sequence[int]) -> None:
    """y = activation(x). `view`: sizes and strides of x and y where they are not dense in one order, else empty."""
    n = y.numel()
    if n and view and few_dims(view, 2):
        options = {"OP": op, "BLOCK": BLOCK, "WIDE": n >= 2**31, "num_warps": warps()}
        launch(_forward_strided, programs(n), y, x, y, n, *padded(view, 2), **options)
    elif n:
        launch(_forward, programs(n), y, dense_like(y, x), y, n, OP=op, BLOCK=BLOCK, num_warps=warps())


def backward(op: int, grad: Tensor, x: Tensor, dx: Tensor, view: Sequence[int]) -> None:
    """dx = grad * derivative at x; ReLU may be given its output as x. `view` as for :func:`forward`, of grad, x and dx."""
    n = dx.numel()
    if n and view and few_dims(view, 3):
        options = {"OP": op, "BLOCK": BLOCK, "WIDE": n >= 2**31, "num_warps": warps()}
        launch(_backward_strided, programs(n), dx, grad, x, dx, n, *padded(view, 3), **options)
    elif n:
        operands = dense_like(dx, grad), dense_like(dx, x), dx
        launch(_backward, programs(n), dx, *operands, n, OP=op, BLOCK=BLOCK, num_warps=warps())
