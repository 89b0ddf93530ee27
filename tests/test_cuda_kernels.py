"""csrc/cuda, run on the CPU: what concerns the kernels' shape rather than the ops. Order of threads, alignment, every team."""

import pytest
import torch

import pyckpt.functional as F
from pyckpt import backends
from pyckpt.ops import _cuda
from pyckpt.ops._registry import Op
from pyckpt.ops.dropout import dropout_op
from tests import simt
from tests._ops import BY_NAME, CASES, compare, run
from tests._oracle import DTYPES

every_case = pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
emulated = pytest.mark.parametrize("backend", ["cuda_emulated"], indirect=True)


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def draw(shape, dtype=torch.float32):
    return torch.randn(shape, dtype=torch.float64).to(dtype)


@emulated
def test_every_op_has_a_kernel(backend):
    built = hasattr(backends.native, "cuda")
    for op in Op.all:
        assert backend in op.kernels and ("cuda" in op.kernels) == built, op.name
        assert (backend in op.partial) == (op.family == "attention"), op.name


@emulated
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@every_case
def test_any_order_of_threads_gives_the_same_bits(case, dtype, backend):
    """Columns of teams within a warp, of several warps, and beyond registers (of the kernel with parameter gradients)."""
    module = simt.load("fast")
    for columns in (24, 700, 5001):
        x, grad = draw((6, columns), dtype), draw((6, columns), dtype)
        parameters = case.make_parameters(dtype, columns)
        expected = run(case.call, x, parameters, grad)
        for name, seed in (("reverse", 0), ("random", 1)):
            with simt.order(module, name, seed):
                assert same(run(case.call, x, parameters, grad), expected), (columns, name)


@emulated
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@every_case
def test_alignment_does_not_change_bits(case, dtype, backend):
    """16-byte accesses, and element by element where an address is not aligned."""
    for columns in (64, 1536):
        x, grad = draw((5, columns), dtype), draw((5, columns), dtype)
        parameters = case.make_parameters(dtype, columns)
        moved = torch.cat([torch.zeros(1, dtype=dtype), x.reshape(-1)])[1:].view(x.shape)
        assert x.data_ptr() % 16 == 0 and moved.data_ptr() % 16
        assert same(run_view(case.call, moved, parameters, grad), run(case.call, x, parameters, grad))


def run_view(function, x, parameters, grad):
    """As run(), on x where it lies."""
    leaves = [x.detach().requires_grad_(), *(t.detach().clone().requires_grad_() for t in parameters)]
    y = function(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, grad)]


@emulated
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm", "softmax", "softmax_keep", "softmax_causal"])
def test_every_team(name, backend):
    """Around each length at which another team, or another kernel, takes over: float32, 4 elements a vector."""
    for columns in (128, 129, 256, 512, 1028, 2048, 4096, 4100, 8192, 8196):
        compare(
            BY_NAME[name],
            lambda columns=columns: draw((3, columns)),
            torch.float32,
            draws=3,
            what=str(columns),
        )


@emulated
@pytest.mark.parametrize("columns", [4096, 4100])
def test_input_gradient_does_not_depend_on_what_else_is_wanted(columns, backend):
    x, grad, weight = draw((4, columns)), draw((4, columns)), draw((columns,))
    results = []
    for wanted in (False, True):
        leaf = x.clone().requires_grad_()
        y = F.layer_norm(leaf, (columns,), weight.clone().requires_grad_(wanted))
        y.backward(grad)
        results.append(leaf.grad)
    assert torch.equal(*results)


@emulated
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1,), (7,), (3, 333), (5, 4, 1031)], ids=str)
def test_the_masks_of_dropout_are_those_of_the_cpu(shape, dtype, backend, native):
    x = draw(shape, dtype)
    for seed in (7, 2**62 + 12345, -1):
        key = torch.tensor([seed])
        for p in (0.0, 0.1, 0.999, 1.0):
            assert torch.equal(dropout_op.on(backend)(x, key, p), dropout_op.on("cpu")(x, key, p))
    kept = []
    for name in (backend, "cpu"):
        torch.manual_seed(1)
        with backends.use(name):
            kept.append(F.softmax(x, dropout_p=0.4) != 0)
    assert torch.equal(*kept)


@emulated
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["gelu", "gelu_tanh", "silu", "relu"])
def test_activations_are_bit_equal_to_the_cpu(name, dtype, backend, native):
    """One formula for both; where the CPU has a fused multiply-add, as GPUs do."""
    if native.isa() == "x86-64-v2":
        pytest.skip("this processor has no fused multiply-add")
    x, grad = draw((3, 331), dtype) * 4, draw((3, 331), dtype)
    actual = run(BY_NAME[name].call, x, [], grad)
    with backends.use("cpu"):
        assert same(actual, run(BY_NAME[name].call, x, [], grad))


@emulated
@pytest.mark.parametrize(
    "case", [c for c in CASES if c.name in ("gelu", "layer_norm", "softmax_keep", "softmax")]
)
def test_rows_more_than_two_to_the_31_elements_apart(case, backend):
    """The memory between the rows stays untouched. 3 dimensions, so that a row's place takes a division."""
    stride = 2**31
    base, grad_base = (torch.empty(2 * stride + 256, dtype=torch.bfloat16) for _ in range(2))
    x, grad = (t.as_strided((3, 2, 64), (stride, 128, 1)) for t in (base, grad_base))
    x.copy_(draw((3, 2, 64))), grad.copy_(draw((3, 2, 64)))
    parameters = case.make_parameters(torch.bfloat16, 64)
    expected = run(case.call, x.contiguous(), parameters, grad.contiguous())
    assert same(run_view(case.call, x, parameters, grad), expected)


def test_blocks_of_parameter_sums_follow_from_the_shape():
    x = torch.empty(0)
    assert _cuda._partial_sums(x, 8192, 4096).shape == (256, 2, 4096)
    assert _cuda._partial_sums(x, 100_000, 4096).shape[0] == -(-100_000 // 64)
    assert _cuda._partial_sums(x, 0, 8).shape[0] == 1


@pytest.fixture(scope="module")
def checked():
    try:
        simt.install("cuda_checked", "check")
    except simt.Missing as missing:
        pytest.skip(f"cannot be built here: {missing}")
    with backends.use("cuda_checked"):
        yield simt.load("check")
    backends._backends.pop("cuda_checked")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@every_case
def test_no_race_and_no_stray_access(case, dtype, checked):
    """The checking build raises at a race, an access beyond a tensor, a read of what nobody wrote, a misaligned vector."""
    for shape in ((3, 24), (5, 77), (2, 3, 1032), (2, 4200)):
        x, grad = draw(shape, dtype), draw(shape, dtype)
        parameters = case.make_parameters(dtype, shape[-1])
        expected = run(case.call, x, parameters, grad)
        for name, seed in (("reverse", 0), ("random", 3)):
            with simt.order(checked, name, seed):
                assert same(run(case.call, x, parameters, grad), expected), (shape, name)
