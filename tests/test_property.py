"""Random shapes, strides, dtypes and options: native kernels against the reference backend."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import pyckpt.functional as F
from pyckpt import backends
from tests._ops import CASES

settings.register_profile(
    "suite", max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
settings.load_profile("suite")

pytestmark = pytest.mark.parametrize("backend", ["cpu", "cuda_emulated"], indirect=True)

TOLERANCE = {  # of one op, in ulps of the largest magnitude
    torch.float32: 16,
    torch.float64: 16,
    torch.bfloat16: 2,
    torch.float16: 2,
}


@st.composite
def tensors(draw, min_dims=1):
    """A tensor of up to 4 dimensions: permuted, sliced with steps, or expanded."""
    shape = draw(st.lists(st.integers(1, 9), min_size=min_dims, max_size=4))
    dtype = draw(st.sampled_from(sorted(TOLERANCE, key=str)))
    steps = [draw(st.integers(1, 3)) for _ in shape]
    order = draw(st.permutations(range(len(shape))))
    seed = draw(st.integers(0, 2**16))
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn([shape[d] * steps[d] for d in order], generator=generator, dtype=torch.float64).to(
        dtype
    )
    x = base.permute([order.index(d) for d in range(len(shape))])
    x = x[tuple(slice(None, None, step) for step in steps)]
    if draw(st.booleans()):
        d = draw(st.integers(0, len(shape) - 1))
        x = x.narrow(d, 0, 1).expand(*x.shape[:d], shape[d], *x.shape[d + 1 :])
    return x, seed


def results(backend, function, x, grad, parameters):
    leaves = [x.detach().requires_grad_(), *(p.detach().clone().requires_grad_() for p in parameters)]
    with backends.use(backend):
        y = function(*leaves)
        return [y.detach(), *torch.autograd.grad(y, leaves, grad)]


def agree(backend, function, x, seed, parameters=(), amplification=1.0):
    """`amplification`: how much larger than the results the terms are that cancel in them."""
    torch.manual_seed(seed)
    grad = torch.randn(x.shape, dtype=torch.float64).to(x.dtype)
    both = []
    for name in ("reference", backend):
        torch.manual_seed(seed)
        both.append(results(name, function, x, grad, parameters))
    for i, (r, c) in enumerate(zip(*both, strict=True)):
        assert r.shape == c.shape and r.dtype == c.dtype
        if r.numel():
            scale = amplification * max(r.abs().max().double().item(), 1.0 if i else 0.0) or 1.0
            error = (r.double() - c.double()).abs().max().item()
            assert error <= TOLERANCE[x.dtype] * torch.finfo(x.dtype).eps * scale, (i, error, scale)


@given(tensors(), st.sampled_from([case for case in CASES if not case.masked]))
def test_ops(backend, native_tensor, case):
    x, seed = native_tensor
    torch.manual_seed(seed)
    amplification = 1.0
    if (
        "norm" in case.name
    ):  # dx is a difference of terms of the size of rstd; over two columns they nearly cancel
        variance = x.double().var(-1, correction=0) if "layer" in case.name else x.double().square().mean(-1)
        amplification = max(1.0, (variance + 1e-5).rsqrt().max().item())
    agree(backend, case.call, x, seed, case.make_parameters(x.dtype, x.shape[-1]), amplification)


@given(
    tensors(min_dims=2),
    st.data(),
    st.sampled_from(["none", "keep", "bias"]),
    st.booleans(),
    st.sampled_from(["top_left", "bottom_right"]),
    st.sampled_from([0.0, 0.0, 0.4]),
    st.floats(-3, 3),
)
def test_softmax_options(backend, native_tensor, data, kind, causal, alignment, dropout_p, scale):
    x, seed = native_tensor
    shape = [size if data.draw(st.booleans()) else 1 for size in x.shape][
        data.draw(st.integers(0, x.dim() - 1)) :
    ]
    generator = torch.Generator().manual_seed(seed)
    mask = None
    if kind == "keep":
        mask = torch.rand(shape, generator=generator) > 0.3
    elif kind == "bias":
        mask = torch.randn(shape, generator=generator, dtype=torch.float64).to(x.dtype)
    agree(
        backend,
        lambda t: F.softmax(
            t, mask=mask, scale=scale, is_causal=causal, causal_alignment=alignment, dropout_p=dropout_p
        ),
        x,
        seed,
    )


@given(tensors(), st.floats(0, 1))
def test_dropout(backend, native_tensor, p):
    x, seed = native_tensor
    torch.manual_seed(seed)
    with backends.use("reference"):
        expected = F.dropout(x, p)
    torch.manual_seed(seed)
    assert torch.equal(F.dropout(x, p), expected)


@given(tensors(), st.data())
def test_softmax_over_any_dimension(backend, native_tensor, data):
    x, seed = native_tensor
    dim = data.draw(st.integers(-x.dim(), x.dim() - 1))
    agree(backend, lambda t: F.softmax(t, dim), x, seed)
