"""The Triton backend: which versions, which ops, what its launchers do at the limits."""

import importlib
from importlib import metadata, util
from pathlib import Path

import pytest
import torch

import pyckpt.functional as F
from pyckpt import backends
from pyckpt.ops import _triton
from pyckpt.ops._registry import Op
from tests import _interpreter
from tests._ops import BY_NAME, CASES, compare, run


@pytest.fixture
def interpreted():
    """The kernels' modules by name, with the interpreted backend in use."""
    state = backends.available()[_interpreter.NAME]
    if not state.available:
        pytest.skip(state.unavailable)
    with backends.use(_interpreter.NAME):
        yield {
            name: importlib.import_module(f"pyckpt.triton_kernels.{name}")
            for name in ("_common", "activation", "norm", "norm_long", "softmax", "softmax_long")
        }


@pytest.fixture
def pieces(interpreted, monkeypatch):
    """Rows longer than 128 columns are too long for a program, which goes through them in pieces of as many."""
    for name, constant in (
        ("norm", "WIDEST"),
        ("norm", "WIDEST_BACKWARD"),
        ("softmax", "WIDEST"),
        ("softmax", "WIDEST_DROPOUT_BACKWARD"),
        ("norm_long", "PIECE"),
        ("softmax_long", "PIECE"),
    ):
        monkeypatch.setattr(interpreted[name], constant, 128)


def draw(*shape):
    return torch.randn(shape, dtype=torch.float64).float()


# Versions and choice


def test_every_op_has_a_kernel():
    assert all("triton" in op.kernels for op in Op.all)


@pytest.fixture
def fresh():
    """Nothing found out yet about the installed Triton."""
    cached = (backends.triton_problem, _triton.kernels)
    for function in cached:
        function.cache_clear()
    yield
    for function in cached:
        function.cache_clear()


@pytest.mark.parametrize("version", ["2.3.1", "3.5.1", "3.5.0+git1234"])
def test_too_old_a_triton(version, fresh, monkeypatch):
    monkeypatch.setattr(util, "find_spec", lambda name: object())
    monkeypatch.setattr(metadata, "version", lambda name: version)
    with pytest.raises(
        RuntimeError, match=rf"Triton {version.partition('+')[0]}.*is installed.*need 3\.6 or newer"
    ):
        _triton.kernels("activation")


def test_no_triton(fresh, monkeypatch):
    monkeypatch.setattr(util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match="pip install triton"):
        _triton.kernels("activation")


def test_a_triton_that_cannot_read_the_kernels(fresh, monkeypatch):
    def broken(name):
        raise AttributeError("module 'triton' has no attribute 'constexpr_function'")

    monkeypatch.setattr(_triton.backends, "triton_problem", lambda: "")
    monkeypatch.setattr(_triton.importlib, "import_module", broken)
    with pytest.raises(RuntimeError, match=r"Triton .* is installed.*3\.6 or newer.*constexpr_function"):
        _triton.kernels("activation")


def test_choice_on_cuda(monkeypatch):
    """Measured ops go where the table says, others to Triton, and to what there is where there is no Triton."""

    def there(*names):
        state = {n: backends.Backend(n, "cuda", "" if n in names else "planted") for n in ("cuda", "triton")}
        state["reference"] = backends.Backend("reference", None)
        monkeypatch.setattr(backends, "_backends", state)

    monkeypatch.setattr(backends, "ON_CUDA", {"gelu": ("cuda", "bench/results/some.json")})
    monkeypatch.setattr(torch.version, "hip", None)
    chosen = {
        (): ("reference", "reference"),
        ("cuda",): ("cuda", "cuda"),
        ("triton",): ("triton", "triton"),
        ("cuda", "triton"): ("cuda", "triton"),
    }
    for names, expected in chosen.items():
        there(*names)
        assert (backends.select("cuda", "gelu"), backends.select("cuda", "softmax")) == expected
        assert backends.select("cuda", "softmax", without="cuda") == (
            "triton" if "triton" in names else "reference"
        )
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert backends.select("cuda", "gelu") == "triton"


def test_choices_have_evidence():
    root = Path(__file__).parents[1]
    families = {op.family for op in Op.all}
    assert families == set(F.__all__)
    for op, (backend, evidence) in backends.ON_CUDA.items():
        assert op in families
        kernels = set.intersection(*(set(o.kernels) for o in Op.all if o.family == op))
        assert backend in kernels and evidence and (root / evidence).exists()


# Limits


@pytest.mark.parametrize("name", ["layer_norm_plain", "rms_norm_plain", "softmax", "softmax_keep"])
def test_more_rows_than_a_grid_holds(name, interpreted, monkeypatch):
    case = BY_NAME[name]
    x, grad = draw(200, 96), draw(200, 96)
    parameters = case.make_parameters(torch.float32, 96)
    expected = run(case.call, x, parameters, grad)
    monkeypatch.setattr(interpreted["_common"], "MAX_GRID", 3)
    for actual, right in zip(run(case.call, x, parameters, grad), expected, strict=True):
        assert torch.equal(actual, right)


def test_more_long_rows_than_a_grid_holds(interpreted, pieces, monkeypatch):
    for name in ("layer_norm", "softmax", "softmax_bias"):
        case = BY_NAME[name]
        x, grad = draw(7, 150), draw(7, 150)
        parameters = case.make_parameters(torch.float32, 150)
        expected = run(case.call, x, parameters, grad)
        with monkeypatch.context() as patch:
            patch.setattr(interpreted["_common"], "MAX_GRID", 3)
            for actual, right in zip(run(case.call, x, parameters, grad), expected, strict=True):
                assert torch.equal(actual, right)


@pytest.mark.parametrize(
    "case", [c for c in CASES if "norm" in c.name or c.masked or c.name == "softmax"], ids=lambda c: c.name
)
def test_rows_in_pieces(case, pieces):
    for dtype, columns in ((torch.float32, 389), (torch.bfloat16, 256), (torch.float64, 389)):
        compare(
            case,
            lambda n=columns: torch.randn((3, n), dtype=torch.float64),
            dtype,
            draws=3,
            what=str(columns),
        )


@pytest.mark.parametrize("columns", [129, 256, 390])
def test_dropout_of_rows_in_pieces(columns, pieces):
    """Blocks of four random words end neither with the rows nor with the pieces."""
    x, grad = draw(2, 3, columns), draw(2, 3, columns)
    mask = torch.rand(3, columns) > 0.3
    mask[1] = False
    results = []
    for backend in (_interpreter.NAME, "reference"):
        with backends.use(backend):
            torch.manual_seed(3)
            leaf = x.clone().requires_grad_()
            y = F.softmax(
                leaf, mask=mask, scale=0.7, is_causal=True, causal_alignment="bottom_right", dropout_p=0.3
            )
            again = type(y.grad_fn)._forward_cls.recompute(y.grad_fn, *y.grad_fn.saved_tensors)
            assert torch.equal(again, y) or backend == "reference"
            results.append((y.detach(), *torch.autograd.grad(y, leaf, grad)))
    for ours, reference in zip(*results, strict=True):
        assert torch.equal(ours == 0, reference == 0)
        torch.testing.assert_close(ours, reference)


def test_nan_and_infinity_in_pieces(pieces):
    """As in one piece: a row of -inf is NaN without a mask, infinity makes its row NaN, and what is hidden stays out."""
    x = draw(6, 300)
    x[1] = -float("inf")
    x[2, 200], x[3, 7], x[4, 150:] = float("nan"), float("inf"), -float("inf")
    torch.testing.assert_close(F.softmax(x), torch.softmax(x, -1), equal_nan=True)
    keep = torch.ones(300, dtype=torch.bool)
    keep[[7, 200]] = False
    y = F.softmax(x, mask=keep)
    torch.testing.assert_close(y, torch.softmax(x.masked_fill(~keep, -float("inf")), -1), equal_nan=True)


def test_leading_dimensions_that_do_not_merge(interpreted):
    """More than three of them, through copies; a mask with strides of its own."""
    x = draw(3, 2, 4, 5, 6, 7).permute(4, 0, 3, 2, 1, 5)
    mask = (torch.rand(3, 1, 4, 1, 7) > 0.3).expand(3, 5, 4, 2, 7)
    grad = draw(*x.shape[:-2], x.shape[-1], x.shape[-2]).transpose(-1, -2)
    results = []
    for backend in (_interpreter.NAME, "reference"):
        with backends.use(backend):
            for options in ({"mask": mask}, {"is_causal": True}, {"mask": mask, "dropout_p": 0.4}):
                torch.manual_seed(1)
                leaf = x.detach().requires_grad_()
                y = F.softmax(leaf, **options)
                results.append((backend, [y.detach(), *torch.autograd.grad(y, leaf, grad)]))
    half = len(results) // 2
    for (_, ours), (_, reference) in zip(results[:half], results[half:], strict=True):
        for a, b in zip(ours, reference, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", ["gelu", "silu", "relu"])
def test_elementwise_dimensions_that_do_not_merge(name, interpreted):
    x = draw(3, 2, 4, 5, 6).permute(4, 0, 3, 2, 1)[::2, :, ::3]
    grad = draw(6, 3, 5, 4, 4)[::2, :, ::3, :, ::2]
    ours = run(BY_NAME[name].call, x, [], grad)
    for a, b in zip(ours, run(BY_NAME[name].call, x.contiguous(), [], grad.contiguous()), strict=True):
        assert torch.equal(a, b)
    seed = torch.tensor([5])
    from pyckpt.ops.dropout import dropout_op

    assert torch.equal(dropout_op(_interpreter.NAME, x, seed, 0.3), dropout_op("reference", x, seed, 0.3))


@pytest.mark.parametrize("name", ["gelu", "layer_norm", "rms_norm", "softmax_keep", "softmax_causal"])
def test_rows_two_to_the_31_elements_apart(name, interpreted):
    """Offsets must not be 32-bit. The memory between the rows is not touched."""
    case, stride = BY_NAME[name], 2**31
    tensors = [
        torch.empty(stride + 64, dtype=torch.bfloat16).as_strided((2, 64), (stride, 1)) for _ in range(2)
    ]
    x, grad = (tensor.copy_(draw(2, 64)) for tensor in tensors)
    parameters = case.make_parameters(torch.bfloat16, 64)
    leaves = [x.detach().requires_grad_(), *parameters]
    y = case.call(*leaves)
    actual = [y.detach(), *torch.autograd.grad(y, leaves, grad)]
    expected = run(case.call, x.contiguous(), parameters, grad.contiguous())
    assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))


def test_tuning_behind_an_option(interpreted, monkeypatch):
    """Every number of warps is timed once for a shape; the result is the same."""
    from triton.runtime.autotuner import Autotuner

    timed = []

    def bench(self, *args, config, **meta):
        timed.append(config.num_warps)
        return [abs(config.num_warps - 8)] * 3

    monkeypatch.setattr(Autotuner, "_bench", bench)
    x = draw(8, 96)
    expected = F.rms_norm(x, (96,))
    monkeypatch.setattr(interpreted["_common"], "autotune", True)
    interpreted["_common"]._tuned.cache_clear()
    assert torch.equal(F.rms_norm(x, (96,)), expected)
    assert sorted(timed) == [2, 4, 8, 16]
    assert torch.equal(F.rms_norm(x, (96,)), expected) and len(timed) == 4
    F.rms_norm(draw(8, 97), (97,))
    assert len(timed) == 8
