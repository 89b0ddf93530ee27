"""What holds for every op: exact recompute, determinism, clean inputs, any layout, any size, torch's NaN and infinity."""

import numpy as np
import pytest
import torch

import pyckpt.functional as F
from pyckpt import backends, recompute
from pyckpt.memory import saved_bytes
from tests import _oracle as oracle
from tests._ops import BY_NAME, CASES, run
from tests._oracle import DTYPES

every_case = pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


def draw(*shape, dtype=torch.float32):
    return torch.randn(shape, dtype=torch.float64).to(dtype)


def same(a, b):
    """Equal bit by bit, NaN included."""
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@every_dtype
@every_case
@pytest.mark.filterwarnings("error:.*the rule of")
def test_recompute_is_exact(case, dtype, backend):
    x = draw(5, 7, 65, dtype=dtype).requires_grad_()
    with recompute():
        x = x.clone()  # or dropout could not be rebuilt from a leaf that it does not keep
        y = case.call(x, *case.make_parameters(dtype, 65))
        saver = y.sin().grad_fn
    again = saver._saved_self
    assert same([again], [y])
    keeps_its_output = case.name.startswith("softmax") and "dropout" not in case.name
    assert (again.data_ptr() == y.data_ptr()) == keeps_its_output


@every_case
def test_same_inputs_same_bits_on_any_number_of_threads(case, backend):
    rows = 9 if backend == "triton_interpreted" else 129
    x, grad = draw(rows, 3, 257), draw(rows, 3, 257)
    parameters = case.make_parameters(torch.float32, 257)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3, 2):
            torch.set_num_threads(count)
            results.append(run(case.call, x, parameters, grad))
    finally:
        torch.set_num_threads(threads)
    if backend == "cpu":  # the reference is torch's arithmetic, whose sums may depend on the threads
        assert all(same(results[0], other) for other in results)
    assert same(results[1], results[3])


def layouts(x):
    """Tensors equal to x with other strides."""
    wider = torch.zeros(*x.shape[:-1], 2 * x.shape[-1] + 3, dtype=x.dtype)
    wider[..., 2 : 2 + x.shape[-1]] = x
    every_other = torch.zeros(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype)
    every_other[..., ::2] = x
    yield "slice of wider rows", wider[..., 2 : 2 + x.shape[-1]]
    yield "every other column", every_other[..., ::2]
    yield "first two dimensions swapped", x.transpose(0, 1).contiguous().transpose(0, 1)
    yield "last two dimensions swapped", x.transpose(-1, -2).contiguous().transpose(-1, -2)
    yield "columns first", x.movedim(-1, 0).contiguous().movedim(0, -1)
    yield "offset", torch.cat([torch.zeros(3, dtype=x.dtype), x.reshape(-1)])[3:].view(x.shape)
    yield "lazily negated", torch._neg_view(-x)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@every_case
def test_layouts_of_input_and_gradient(case, dtype, backend):
    check_layouts(case, (4, 6, 5, 10), dtype, backend)


@pytest.mark.parametrize("columns", [259, 8201])
@every_case
def test_layouts_of_long_rows(case, columns, native):
    """Which the CPU kernels do not gather, where they are dense."""
    with backends.use("cpu"):  # by name, or some of these would be left to torch
        check_layouts(case, (2, 3, 2, columns), torch.bfloat16 if columns == 259 else torch.float32, "cpu")


def check_layouts(case, shape, dtype, backend):
    x, grad = draw(*shape, dtype=dtype), draw(*shape, dtype=dtype)
    parameters = case.make_parameters(dtype, shape[-1])
    expected = run(case.call, x, parameters, grad)
    for (name, other), (grad_name, other_grad) in zip(
        [("contiguous", x), *layouts(x)], [*list(layouts(grad))[::-1], ("contiguous", grad)], strict=True
    ):
        leaves = [other.detach().requires_grad_(), *(p.detach().clone().requires_grad_() for p in parameters)]
        y = case.call(*leaves)
        actual = [y.detach(), *torch.autograd.grad(y, leaves, other_grad)]
        for a, e in zip(actual, expected, strict=True):
            if backend == "cpu":
                assert torch.equal(a, e), f"input {name}, gradient {grad_name}"
            else:
                torch.testing.assert_close(a, e)
        assert y.stride() == case.eager(*leaves).stride() or y.is_contiguous(), name


@every_case
def test_expanded_inputs_and_gradients(case, backend):
    row = draw(1, 6, 16)
    x = row.expand(4, 6, 16)
    parameters = case.make_parameters(torch.float32, 16)
    for grad in (torch.ones(()).expand(4, 6, 16), draw(16).expand(4, 6, 16), draw(4, 1, 1).expand(4, 6, 16)):
        expected = run(case.call, x.contiguous(), parameters, grad.contiguous())
        leaves = [row.clone().requires_grad_(), *(p.detach().clone().requires_grad_() for p in parameters)]
        y = case.call(leaves[0].expand(4, 6, 16), *leaves[1:])
        actual = torch.autograd.grad(y, leaves, grad)
        torch.testing.assert_close(y.detach(), expected[0])
        torch.testing.assert_close(actual[0], expected[1].sum(0, keepdim=True))
        for a, e in zip(actual[1:], expected[2:], strict=True):
            torch.testing.assert_close(a, e)


@pytest.mark.parametrize("name", ["gelu", "gelu_tanh", "silu", "relu"])
def test_elementwise_results_keep_the_memory_format(name, backend):
    x = draw(2, 6, 5, 4).contiguous(memory_format=torch.channels_last)
    assert BY_NAME[name].call(x).is_contiguous(memory_format=torch.channels_last)


@every_case
def test_inputs_and_gradients_are_left_alone(case, backend):
    x, grad = draw(3, 5, 16).requires_grad_(), draw(3, 5, 16)
    parameters = case.make_parameters(torch.float32, 16)
    before = [t.detach().clone() for t in (x, grad, *parameters)]
    y = case.call(x, *parameters)
    y.backward(grad)
    assert same(before, [t.detach() for t in (x, grad, *parameters)])
    assert x.grad.data_ptr() != grad.data_ptr()


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (4, 0), (0, 3, 8)], ids=str)
@every_case
def test_zero_sizes(case, shape, backend):
    x = torch.zeros(shape)
    parameters = case.make_parameters(torch.float32, shape[-1])
    y, dx, *dparameters = run(case.call, x, parameters, torch.ones(shape))
    assert y.shape == dx.shape == shape
    for gradient, parameter in zip(dparameters, parameters, strict=True):
        assert gradient.shape == parameter.shape and (gradient == 0).all()


@pytest.mark.parametrize("name", ["gelu", "gelu_tanh", "silu", "relu", "softmax"])
def test_zero_dimensional(name, backend):
    case = BY_NAME[name]
    function = (lambda x: F.softmax(x, 0)) if name == "softmax" else case.call
    eager = (lambda x: torch.softmax(x, 0)) if name == "softmax" else case.eager
    x = torch.tensor(0.7)
    for a, e in zip(
        run(function, x, [], torch.tensor(2.0)), run(eager, x, [], torch.tensor(2.0)), strict=True
    ):
        torch.testing.assert_close(a, e)


@every_dtype
@every_case
def test_nan_and_infinity_as_torch(case, dtype, backend):
    """Rows with one NaN or infinity, compared in float64: torch's own vectorised float kernels disagree with its scalar ones
    (gelu(inf) is NaN there), which the reference backend inherits."""
    rows = draw(5, 24, dtype=dtype)
    # What is masked is 0 here, also in a row of NaN where the composition in torch gives NaN.
    visible = (
        case.eager(rows.double(), *case.make_parameters(torch.float64, 24)) != 0
        if case.masked
        else slice(None)
    )
    for i, value in enumerate((float("nan"), float("inf"), -float("inf"))):
        rows[i + 2, 3] = value
    parameters = case.make_parameters(dtype, 24)
    grad = draw(5, 24, dtype=dtype)
    actual = run(case.call, rows, parameters, grad)
    wide = torch.float64 if backend != "reference" or dtype == torch.float64 else torch.float32
    eager = run(case.eager, rows.to(wide), [p.to(wide) for p in parameters], grad.to(wide))
    for a, e in zip(actual[:2], eager[:2], strict=True):
        a, e = a[visible], e[visible]
        assert torch.equal(a.isnan(), e.isnan()), (a, e)
        assert torch.equal(a.isposinf(), e.isposinf()) and torch.equal(a.isneginf(), e.isneginf())


def test_finite_extremes_give_no_nan(isa):
    """Arguments whose cube or exponential overflows."""
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        big = [1e4, 1e13, 1e30, torch.finfo(dtype).max]
        x = torch.tensor(
            [*big, *(-b for b in big), 88.0, -88.0, -87.5, 13.0, -13.0, -13.1, -0.0], dtype=dtype
        )
        for name in ("gelu", "gelu_tanh", "silu"):
            y, dx = run(BY_NAME[name].call, x, [], torch.ones_like(x))
            assert torch.isfinite(y).all() and torch.isfinite(dx).all(), (name, y, dx)
            assert torch.equal(y[:4], x[:4]) and (y[4:8] == 0).all()
            assert (dx[:4] == 1).all() and (dx[4:8] == 0).all()


@pytest.mark.parametrize("columns", [4, 16, 64, 512])
@pytest.mark.parametrize("mean, spread", [(2000.0, 1.0), (1e4, 1.0), (300.0, 1e-2), (-4e4, 3.0)])
def test_variance_far_from_zero(mean, spread, columns, isa):
    """Exact to a few ulps of the data's own resolution, however large the mean: better than eager on one row in two."""
    x = draw(64, columns) * spread + mean
    y = F.layer_norm(x, (columns,), eps=1e-5)
    exact = oracle.norm(oracle.wide(x), None, None, np.zeros(x.shape), 1e-5, True)[0]
    error = np.abs(oracle.wide(y) - exact).max()
    assert error <= 4 * oracle.ulp(np.abs(exact).max(), torch.float32)


def test_outliers_in_the_first_columns(isa):
    """The first guess at the mean is far off; the second pass has to mend it."""
    x = draw(8, 5000)
    x[:, :16] = 1e5
    exact = oracle.norm(oracle.wide(x), None, None, np.zeros(x.shape), 1e-5, True)[0]
    error = np.abs(oracle.wide(F.layer_norm(x, (5000,))) - exact).max()
    assert error <= 4 * oracle.ulp(np.abs(exact).max(), torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_parameter_gradients_are_not_summed_in_16_bits(dtype, backend):
    weight, bias = (torch.ones(8, dtype=dtype).requires_grad_() for _ in range(2))
    x = draw(4096, 8, dtype=dtype)
    y = F.layer_norm(x, (8,), weight, bias)
    y.backward(torch.ones_like(y))
    assert (bias.grad == 4096).all()


def test_one_column_is_exact(backend):
    """LayerNorm of one column is its bias, whatever x; RMSNorm's derivative at 0 is 1 / sqrt(eps)."""
    weight, bias = torch.tensor([3.0], requires_grad=True), torch.tensor([-1.0], requires_grad=True)
    x = (draw(64, 1) * 100).requires_grad_()
    y = F.layer_norm(x, (1,), weight, bias)
    y.backward(draw(64, 1))
    assert (y == -1).all() and (weight.grad == 0).all() and (x.grad == 0).all()
    zero = torch.zeros(1, 1, requires_grad=True)
    F.rms_norm(zero, (1,), eps=1e-6).sum().backward()
    torch.testing.assert_close(zero.grad, torch.tensor([[1e3]]))


def test_every_subset_of_gradients(backend):
    for needs in [(a, b, c) for a in (0, 1) for b in (0, 1) for c in (0, 1)]:
        x, weight, bias = (
            t.requires_grad_(bool(n))
            for t, n in zip((draw(2, 3, 10), draw(10), draw(10)), needs, strict=True)
        )
        y = F.layer_norm(x, (10,), weight, bias)
        assert y.requires_grad == any(needs)
        if any(needs):
            y.square().sum().backward()
        for t, n in zip((x, weight, bias), needs, strict=True):
            assert (t.grad is not None) == bool(n)


@every_case
def test_gradcheck_and_double_backward(case, backend):
    shape = (2, 2, 4) if backend == "triton_interpreted" else (3, 2, 6)  # a call for each element
    x = draw(*shape, dtype=torch.float64).requires_grad_()
    parameters = case.make_parameters(torch.float64, shape[-1])
    assert torch.autograd.gradcheck(case.call, (x, *parameters))
    assert torch.autograd.gradgradcheck(case.call, (x, *parameters))


ELEMENTS = 256 * 1024
SAVED = {  # bytes kept for backward beyond the input itself, which the caller owns here
    "gelu": 0,
    "gelu_tanh": 0,
    "silu": 0,
    "relu": 4 * ELEMENTS,
    "layer_norm": 3 * 4 * 256,
    "rms_norm": 4 * 256,
    "softmax": 4 * ELEMENTS,
    "softmax_causal": 4 * ELEMENTS,
    "softmax_keep": 4 * ELEMENTS,
}


@pytest.mark.parametrize("name", SAVED)
def test_saved_bytes(name, native, counted):
    """The contract stated beside each op, by the allocator's count."""
    case = BY_NAME[name]
    x = draw(256, 1024).requires_grad_()
    parameters = case.make_parameters(torch.float32, 1024)
    saved = saved_bytes(lambda: case.call(x, *parameters))
    mask = 256 * 1024 if name == "softmax_keep" else 0  # the test's own mask, which may be alive
    assert SAVED[name] <= saved + 1024 and saved <= SAVED[name] + mask + 16384, saved


def test_saved_bytes_with_dropout(native, counted):
    x = draw(256, 1024).requires_grad_()
    assert saved_bytes(lambda: F.dropout(x, 0.1)) <= 16384
    assert saved_bytes(lambda: F.softmax(x, dropout_p=0.1)) <= 2 * 4 * 256 + 16384


@pytest.mark.slow
@every_case
def test_more_than_two_to_the_31_elements_apart(case, native):
    """Row strides of 2^31 elements: offsets must not be 32-bit. The memory between the rows stays untouched."""
    stride = 2**31
    base, grad_base = (torch.empty(stride + 4096, dtype=torch.bfloat16) for _ in range(2))
    x, grad = base.as_strided((2, 64), (stride, 1)), grad_base.as_strided((2, 64), (stride, 1))
    x.copy_(draw(2, 64)), grad.copy_(draw(2, 64))
    parameters = case.make_parameters(torch.bfloat16, 64)
    leaves = [x.detach().requires_grad_(), *parameters]
    y = case.call(*leaves)
    actual = [y.detach(), *torch.autograd.grad(y, leaves, grad)]
    assert same(actual, run(case.call, x.contiguous(), parameters, grad.contiguous()))
