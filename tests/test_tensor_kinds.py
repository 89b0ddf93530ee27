"""Dispatch modes, fake and meta tensors, subclasses, DTensor, nested tensors, lazily negated tensors, autocast."""

import tempfile
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import pyckpt.functional as F
import pyckpt.nn as fused
from tests._layers import COLUMNS, EXACT, LAYERS, assert_close, assert_equal, by_name, gradients, perturb

exact = pytest.mark.parametrize("layer", **by_name(EXACT))
every = pytest.mark.parametrize("layer", **by_name(LAYERS))
SAME_CLASS = [layer for layer in EXACT if not layer.name.startswith("softmax_")]


def _input(dtype=torch.float32, rows=(2, 5)):
    return torch.randn(*rows, COLUMNS, dtype=torch.float64).to(dtype)


# Modes, devices, subclasses


class _Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@every
def test_dispatch_mode_sees_the_ops(layer, backend):
    module = perturb(layer.ours())
    x = _input()
    plain = gradients(module, x)
    with _Seen() as seen:
        under = gradients(module, x)
    assert_equal(under, plain)
    assert sum(name.startswith("pyckpt.") for name in seen.names) >= 2, seen.names


@every
def test_dispatch_mode_on_the_backward_only(layer, backend):
    module = perturb(layer.ours())
    x = _input().requires_grad_()
    y = module(x)
    grad = torch.randn_like(y)
    plain = torch.autograd.grad(y, x, grad, retain_graph=True)
    with _Seen() as seen:
        under = torch.autograd.grad(y, x, grad)
    assert_equal(under, plain)
    assert any(name.startswith("pyckpt.") for name in seen.names), seen.names


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fake_and_meta_tensors(layer, dtype):
    from torch._subclasses.fake_tensor import FakeTensorMode

    module = perturb(layer.ours()).to(dtype)
    real = module(_input(dtype))
    state = dict(module.named_parameters()) | dict(module.named_buffers())
    x = torch.empty(2, 5, COLUMNS, dtype=dtype)
    mode = FakeTensorMode()
    for convert in (mode.from_tensor, lambda t: t.to("meta")):
        moved = {k: convert(v) for k, v in state.items()}
        leaf = convert(x).requires_grad_()
        with mode if convert == mode.from_tensor else torch.enable_grad():
            y = torch.func.functional_call(module, moved, (leaf,))
            (dx,) = torch.autograd.grad(y.sum(), leaf)
        assert (y.shape, y.dtype, y.stride()) == (real.shape, real.dtype, real.stride())
        assert (dx.shape, dx.dtype) == (leaf.shape, leaf.dtype)


@exact
def test_tensor_that_outlived_its_transform(layer):
    """torch.func leaves a wrapper of type torch.Tensor behind."""
    left = []
    x, module = _input(), perturb(layer.ours())
    torch.func.grad(lambda t: left.append(t) or t.sum())(x)
    assert_close([module(left[0])], [module(x)])


def test_parameter_that_outlived_its_transform(backend):
    left = []
    x, weight = _input().requires_grad_(), torch.randn(COLUMNS)
    torch.func.grad(lambda t: left.append(t) or t.sum())(weight)
    y, expected = F.rms_norm(x, (COLUMNS,), left[0]), F.rms_norm(x, (COLUMNS,), weight)
    assert_close([y, *torch.autograd.grad(y.sum(), x)], [expected, *torch.autograd.grad(expected.sum(), x)])


@every
def test_flop_counter(layer):
    from torch.utils.flop_counter import FlopCounterMode

    module, linear = perturb(layer.ours()), torch.nn.Linear(COLUMNS, COLUMNS)
    with FlopCounterMode(display=False) as counter:
        module(linear(_input().requires_grad_())).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * 10 * COLUMNS * COLUMNS


@exact
def test_inference_mode(layer):
    module = perturb(layer.ours())
    x = _input()
    expected = module(x).detach()
    with torch.inference_mode():
        y = module(x)
        inside = _input()
    assert y.is_inference() and torch.equal(y, expected)
    if list(module.parameters()):  # torch: inference tensors cannot be saved for backward
        theirs = layer.pair()[1]
        errors = []
        for m in (module, theirs):
            try:
                m(inside)
                errors.append(None)
            except RuntimeError as error:
                errors.append(type(error))
        assert errors[0] == errors[1]


class _Plain(torch.Tensor):
    """A subclass without behaviour of its own."""


@every
def test_tensor_subclass(layer):
    module = perturb(layer.ours())
    x = _input()
    results = [gradients(module, t) for t in (x, x.as_subclass(_Plain))]
    assert all(type(t) is _Plain for t in results[1][:2])
    assert_close([t.as_subclass(torch.Tensor) for t in results[1]], results[0])


@every
def test_wrapper_subclass(layer):
    from torch.testing._internal.two_tensor import TwoTensor

    module = perturb(layer.ours())
    x = _input()
    seed = 7
    torch.manual_seed(seed)
    expected = module(x)
    torch.manual_seed(seed)
    y = module(TwoTensor(x, x.clone()))
    assert isinstance(y, TwoTensor)
    assert_close([y.a, y.b], [expected, expected])


@exact
def test_neg_view_gradient_and_input(layer, backend):
    """A lazily negated tensor: raw memory holds the opposite sign."""
    module = perturb(layer.ours())
    x, grad = _input(), _input()
    leaf = x.clone().requires_grad_()
    y = module(leaf)
    leaves = [leaf, *module.parameters()]
    lazy = torch.autograd.grad(y, leaves, torch._neg_view(grad), retain_graph=True)
    assert_equal(lazy, torch.autograd.grad(y, leaves, -grad))
    with torch.no_grad():
        assert_close([module(torch._neg_view(x))], [module(-x)])


def test_neg_view_parameters_and_mask(backend):
    x, p = _input(), torch.randn(COLUMNS)
    lazy = torch._neg_view(p)
    assert_equal([F.layer_norm(x, (COLUMNS,), lazy, lazy)], [F.layer_norm(x, (COLUMNS,), -p, -p)])
    assert_equal([F.rms_norm(x, (COLUMNS,), lazy)], [F.rms_norm(x, (COLUMNS,), -p)])
    mask = torch.complex(p, p).conj().imag
    assert_equal([F.softmax(x, mask=mask)], [F.softmax(x, mask=-p)])


# DTensor


@pytest.fixture(scope="module")
def mesh():
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    if not dist.is_available() or dist.is_initialized():
        pytest.skip("no process group to be had")
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{Path(folder) / 'store'}", rank=0, world_size=1)
        yield init_device_mesh("cpu", (1,))
        dist.destroy_process_group()


@every
@pytest.mark.parametrize("dim", [0, 1])
def test_dtensor(layer, dim, mesh):
    """A sharded input, as in sequence parallelism, through every layer."""
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor

    plain = perturb(layer.ours())
    x = _input()
    expected = gradients(plain, x)
    module = distribute_module(plain, mesh)  # replicates parameters and buffers
    leaf = distribute_tensor(x, mesh, [Shard(dim)]).requires_grad_()
    torch.manual_seed(0)
    y = module(leaf)
    assert isinstance(y, DTensor)
    grad = distribute_tensor(torch.linspace(-1, 2, y.numel()).reshape(y.shape), mesh, [Replicate()])
    y.backward(grad)
    if not layer.random:
        actual = [y.detach(), leaf.grad, *(p.grad for p in module.parameters())]
        assert_close([t.full_tensor() for t in actual], expected)
    else:
        assert ((y.full_tensor() == 0) == (leaf.grad.full_tensor() == 0)).float().mean() > 0.6


# Nested tensors


def _nested_layers():
    return [
        layer for layer in LAYERS if layer.name != "softmax_dropout" and not layer.name.startswith("softmax_")
    ]


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
@pytest.mark.parametrize("layer", **by_name(_nested_layers()))
def test_nested_tensor(layer, layout):
    """Where torch.nn serves a nested tensor, so do we, with its numbers."""
    parts = [torch.randn(n, COLUMNS) for n in (2, 4)]
    results = []
    for module in (layer.ours, layer.torchs):
        module = perturb(module())
        leaf = torch.nested.nested_tensor(parts, layout=layout).requires_grad_()
        try:
            y = module(leaf)
            assert y.is_nested
            parts_of_y = [t.detach() for t in y.unbind()]
            sum(t.square().sum() for t in y.unbind()).backward()
            results.append([*parts_of_y, *leaf.grad.unbind()])
        except Exception as error:
            results.append(error)
    ours, theirs = results
    if isinstance(theirs, Exception):
        assert not isinstance(ours, Exception) or isinstance(ours, type(theirs)), (ours, theirs)
        return
    if isinstance(ours, Exception):
        raise ours
    if layer.random:
        assert [t.shape for t in ours] == [t.shape for t in theirs]
    else:
        assert_close(ours, theirs)


@exact
def test_sparse_and_mkldnn_inputs(layer):
    """Where torch.nn serves them, so do we; else its error type."""
    x = torch.relu(_input(rows=(3,)))
    for convert in (torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr, torch.Tensor.to_mkldnn):
        results = []
        for module in layer.pair():
            try:
                with torch.no_grad():
                    results.append(module(convert(x)).to_dense())
            except Exception as error:
                results.append(error)
        ours, theirs = results
        if isinstance(theirs, Exception):
            assert isinstance(ours, Exception) and not isinstance(ours, AttributeError), (
                f"{ours!r} instead of {theirs!r}"
            )
        elif isinstance(ours, Exception):
            raise ours
        else:
            assert_close([ours], [theirs])


@pytest.mark.parametrize("layer", **by_name([layer for layer in LAYERS if layer.torchs]))
def test_sparse_gradient(layer, backend):
    """The gradient that reaches a layer may be sparse (an embedding of an activated table): served where torch does."""
    index = torch.tensor([0, 2, 2])
    table = torch.randn(4, COLUMNS, requires_grad=True)
    results = []
    for make in (layer.ours, layer.torchs):
        y = torch.nn.functional.embedding(index, perturb(make())(table), sparse=True)
        try:
            (g,) = torch.autograd.grad(y.sum(), table)
            results.append(g.to_dense())
        except RuntimeError as error:
            results.append(error)
    if isinstance(results[1], Exception):
        return
    if isinstance(results[0], Exception):
        raise results[0]
    if not layer.random:
        assert_close(results[:1], results[1:])


# Autocast


@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("layer", **by_name(SAME_CLASS))
def test_autocast_and_mixed_dtypes(layer, autocast, backend):
    """Every input dtype beside every parameter dtype: torch.nn's output and gradient dtypes, or its error type."""
    dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
    parametrised = bool(list(layer.ours().parameters()))
    for x_dtype in dtypes:
        for p_dtype in dtypes if parametrised else [torch.float32]:
            x = _input(x_dtype)
            outcomes = []
            for module in layer.pair():
                with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
                    try:
                        leaf = x.clone().requires_grad_()
                        y = module.to(p_dtype)(leaf)
                        y.sum().backward()
                        found = [y.dtype, leaf.grad.dtype, *(p.grad.dtype for p in module.parameters())]
                        outcomes.append((found, y.detach().double()))
                    except (RuntimeError, TypeError) as error:
                        outcomes.append((type(error), None))
            (ours, y), (theirs, z) = outcomes
            what = f"input {x_dtype}, parameters {p_dtype}"
            assert ours == theirs, f"{what}: {ours} instead of torch's {theirs}"
            if z is not None:
                tolerance = 2e-2 if torch.finfo(x_dtype).bits == 16 else 1e-5
                assert_close([y], [z], what, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_in_a_model(autocast, backend):
    """Linear gives the low precision, norms and parameters stay float32: dtypes are those of torch.nn."""
    results = []
    for library in (fused, torch.nn):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            library.LayerNorm(COLUMNS), torch.nn.Linear(COLUMNS, COLUMNS), library.GELU(), library.LayerNorm(COLUMNS),
            library.RMSNorm(COLUMNS), torch.nn.Linear(COLUMNS, COLUMNS), library.Softmax(-1), library.Dropout(0.0),
        )  # fmt: skip
        x = _input().requires_grad_()
        seen = []
        for layer in model:
            layer.register_forward_hook(lambda m, a, y, seen=seen: seen.append(y.dtype))
        with torch.autocast("cpu", autocast):
            y = model(x)
        y.float().square().sum().backward()
        seen += [x.grad.dtype, *(p.grad.dtype for p in model.parameters())]
        results.append(seen)
    assert results[0] == results[1]


# Errors that are not about our arguments


class _OddError(RuntimeError):
    def __init__(self, code, reason):
        super().__init__(f"{code}: {reason}")


class _Raising(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if "gelu" in getattr(func, "__name__", "") or "norm" in getattr(func, "__name__", ""):
            raise _OddError(7, "out of quota")
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize(
    "call", [F.gelu, lambda x: F.layer_norm(x, (COLUMNS,)), lambda x: F.rms_norm(x, (COLUMNS,))]
)
def test_errors_of_a_subclass_come_through(call):
    """With their type, and without advice on an argument that nothing is wrong with."""
    with pytest.raises(_OddError, match="out of quota") as caught:
        call(_input().as_subclass(_Raising))
    assert "floating-point" not in str(caught.value)


@exact
def test_mutation_of_saved_tensors_when_allowed(layer, backend):
    module = perturb(layer.ours())
    x = _input()
    plain = gradients(module, x)
    leaf = x.clone().requires_grad_()
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        h = leaf * 1
        y = module(h)
        with torch.no_grad():
            h.zero_()
            y.zero_()
        (dx,) = torch.autograd.grad(y, leaf, torch.linspace(-1, 2, y.numel()).reshape(y.shape))
    assert_equal([dx], plain[1:2])
