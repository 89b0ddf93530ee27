"""torch.compile, export, jit.trace and fx: one graph, eager's results and gradients, dropout's masks by the same seed."""

import contextlib
import copy
import warnings

import pytest
import torch
import torch._dynamo.testing
from torch import nn
from torch.utils.checkpoint import checkpoint

import pyckpt.functional as F
from tests._layers import COLUMNS, LAYERS, RANDOM, assert_close, assert_equal, by_name, gradients, perturb

every = pytest.mark.parametrize("layer", **by_name(LAYERS, costly=True))
random = pytest.mark.parametrize("layer", **by_name(RANDOM))


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _input(batch=3, dtype=torch.float32):
    return torch.randn(batch, 5, COLUMNS, dtype=torch.float64).to(dtype)


@every
def test_one_graph_serves_every_batch_size(layer):
    """fullgraph, at most two compilations for five batch sizes, results and gradients (and masks) of eager."""
    module = perturb(layer.ours())
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, backend=counter, fullgraph=True)
    for batch in (3, 5, 6, 9, 12):
        x = _input(batch)
        assert_close(gradients(compiled, x, seed=batch), gradients(module, x, seed=batch), f"batch {batch}")
    assert counter.frame_count <= 2, f"{counter.frame_count} compilations for 5 batch sizes"


@pytest.mark.slow
@every
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_compiled_dtypes(layer, dtype):
    module = perturb(layer.ours()).to(dtype)
    x = _input(dtype=dtype)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    tolerance = 4e-2 if dtype == torch.bfloat16 else 1e-10
    assert_close(gradients(compiled, x), gradients(module, x), rtol=tolerance, atol=tolerance)


@pytest.mark.slow
@every
def test_compiled_without_gradients(layer):
    module = perturb(layer.ours())
    x = _input()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            torch.manual_seed(1)
            expected = module(x)
            torch.manual_seed(1)
            assert_close([compiled(x)], [expected])
    if layer.name == "dropout":
        assert compiled.eval()(x).equal(x)


@pytest.mark.slow
@every
@pytest.mark.parametrize("dynamic", [False, True])
def test_inductor(layer, dynamic):
    module = perturb(layer.ours())
    x = _input()
    compiled = torch.compile(module, fullgraph=True, dynamic=dynamic)
    with torch._inductor.config.patch(
        fallback_random=True
    ):  # eager's generator, so that masks can be compared
        assert_close(gradients(compiled, x), gradients(module, x), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@random
def test_inductor_with_its_own_random_numbers(layer):
    """Another mask at each call, and the same one in backward."""
    module = layer.ours()
    compiled = torch.compile(module, fullgraph=True)
    torch.manual_seed(0)
    masks = []
    for _ in range(4):
        x = torch.full((64, COLUMNS), 2.0, requires_grad=True)
        y = compiled(x)
        (dx,) = torch.autograd.grad(y, x, torch.arange(1.0, COLUMNS + 1).expand(64, COLUMNS))
        masks.append(y != 0)
        if layer.name == "dropout":
            assert_close([dx], [y.detach() / 2 * torch.arange(1.0, COLUMNS + 1)])
        assert 0.2 < masks[-1].float().mean() < 0.9
    assert all(not torch.equal(masks[0], m) for m in masks[1:])


@pytest.mark.parametrize("p", [0.0, 0.25, 1.0])
def test_compiled_raw_dropout_gives_the_seeds_mask(p):
    """The mask is a function of the seed, whoever runs it."""
    seed = torch.tensor([123456789012345], dtype=torch.int64)

    def f(x, seed):
        return torch.ops.pyckpt.dropout(x * 1, seed, p)

    x = torch.randn(7, 33, requires_grad=True)
    compiled = torch.compile(f, backend="aot_eager", fullgraph=True)
    results = []
    for function in (f, compiled):
        y = function(x, seed)
        results.append([y, *torch.autograd.grad(y, x, torch.ones_like(y))])
    assert_equal(*results)


@random
def test_compiled_checkpoint_repeats_the_mask(layer):
    module = layer.ours()

    def f(x):
        return checkpoint(lambda t: torch.sin(module(t * 2)), x, use_reentrant=False)

    x = _input()
    compiled = torch.compile(f, backend="aot_eager_decomp_partition", fullgraph=True)
    leaf = x.clone().requires_grad_()
    y = compiled(leaf)
    (dx,) = torch.autograd.grad(y.sum(), leaf)
    if layer.name == "dropout":
        factors = torch.where(y != 0, 1 / 0.6, 0.0)
        assert_close([y], [torch.sin(2 * x * factors)])
        assert_close([dx], [torch.cos(2 * x * factors) * 2 * factors])
    assert ((dx != 0).any(-1)).any()


@random
def test_compiled_vmap_of_dropout(layer):
    module = layer.ours()
    compiled = torch.compile(
        torch.func.vmap(module, randomness="different"), backend="aot_eager", fullgraph=True
    )
    x = torch.ones(3, 5, COLUMNS)
    y = compiled(x)
    assert y.shape == x.shape
    assert (y == 0).any() and not torch.equal(y[0] == 0, y[1] == 0)


@every
def test_compiled_func_grad(layer):
    module = perturb(layer.ours())

    def f(x):
        return torch.func.grad(lambda t: (module(t) ** 2).sum())(x)

    x = _input()
    torch.manual_seed(1)
    expected = f(x)
    torch.manual_seed(1)
    assert_close([torch.compile(f, backend="aot_eager", fullgraph=True)(x)], [expected])


def _train_model(layer):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.inner, self.linear = perturb(layer.ours()), nn.Linear(COLUMNS, COLUMNS)

        def forward(self, x):
            return self.inner(self.linear(x))

    return Model()


def _parameter_gradients(module, x, seed=3):
    module.zero_grad()
    torch.manual_seed(seed)
    y = module(x)
    y.backward(torch.linspace(-1, 2, y.numel()).reshape(y.shape))
    return {name: p.grad for name, p in module.named_parameters()}, y.detach()


def _check_trained(result, model, x, what):
    """The exported or traced model trains with eager's gradients, every one there and not all zero."""
    expected, y = _parameter_gradients(model, x)
    expected = {k: v.clone() for k, v in expected.items()}
    actual, z = _parameter_gradients(result, x)
    assert_close([z], [y], what)
    assert set(actual) >= set(expected), what
    for name, gradient in expected.items():
        assert actual[name] is not None, f"{what}: {name} has no gradient"
        assert_close([actual[name]], [gradient], f"{what} {name}", rtol=1e-4, atol=1e-5)
        assert gradient.abs().max() > 0


@every
@pytest.mark.parametrize(
    "strict", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["non-strict", "strict"]
)
def test_export_and_train(layer, strict):
    model = _train_model(layer).train()
    x = _input()
    dynamic = {"x": {0: torch.export.Dim("batch", min=2, max=64)}}
    program = torch.export.export(model, (x,), dynamic_shapes=dynamic, strict=strict)
    _check_trained(program.module(), copy.deepcopy(model), x, "export")
    _check_trained(program.module(), copy.deepcopy(model), _input(7), "export at another batch size")
    if not layer.random:
        decomposed = program.run_decompositions()
        assert_close([decomposed.module()(x)], [model(x)])


@every
def test_jit_trace_and_train(layer):
    model = _train_model(layer)
    x = _input()
    with _ignored_deprecation():
        if not layer.name.startswith("softmax_"):  # masks are compared with the input's shape
            warnings.simplefilter("error", torch.jit.TracerWarning)
        traced = torch.jit.trace(model, (x,), check_trace=not layer.random)
        if layer.random:
            y = traced(x)
            assert (y == 0).any() and y.requires_grad
            assert all(g is not None for g in _parameter_gradients(traced, x)[0].values())
            assert not torch.equal(traced(x) == 0, y == 0), "the mask was traced as a constant"
        else:
            _check_trained(traced, model, x, "trace")


@contextlib.contextmanager
def _ignored_deprecation():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


@every
def test_fx_symbolic_trace(layer):
    """Tools that rewrite models by fx trace nn.Module's of torch; ours must be traceable too."""
    if layer.name.startswith("softmax_"):
        pytest.skip("options of pyckpt's own, which a Proxy cannot answer")
    model = _train_model(layer).eval()
    x = _input()
    assert_close([torch.fx.symbolic_trace(model)(x)], [model(x)])


@every
def test_make_fx(layer):
    from torch.fx.experimental.proxy_tensor import make_fx

    module = perturb(layer.ours())
    x, grad = _input(), torch.randn(3, 5, COLUMNS)

    def f(x, grad):
        y = module(x)
        return y, torch.autograd.grad(y, x, grad)[0]

    for mode in ("real", "fake"):
        graph = make_fx(f, tracing_mode=mode, _allow_non_fake_inputs=True)(x.clone().requires_grad_(), grad)
        leaf = x.clone().requires_grad_()
        if not layer.random:
            assert_close(graph(leaf, grad), f(leaf, grad))


@pytest.mark.parametrize("stage", ["forward", "step"])
def test_mixed_model(stage):
    """Several fused layers, residuals and tied sizes in one graph; also a whole step with backward after a graph break."""
    import pyckpt.nn as fused

    torch.manual_seed(0)
    model = nn.Sequential(
        fused.LayerNorm(COLUMNS),
        nn.Linear(COLUMNS, COLUMNS),
        fused.GELU(),
        fused.RMSNorm(COLUMNS),
        fused.Softmax(-1),
    )
    x = _input()
    expected = gradients(model, x, torch.ones(3, 5, COLUMNS).cumsum(-1))
    if stage == "forward":
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        assert_close(gradients(compiled, x, torch.ones(3, 5, COLUMNS).cumsum(-1)), expected)
        return

    @torch.compile(backend="aot_eager")
    def step(x):
        y = model(x)
        torch._dynamo.graph_break()
        y.backward(torch.ones(3, 5, COLUMNS).cumsum(-1))
        return y

    model.zero_grad()
    leaf = x.clone().requires_grad_()
    y = step(leaf)
    assert_close([y.detach(), leaf.grad, *(p.grad for p in model.parameters())], expected)


def test_functional_options_do_not_break_the_graph():
    def f(x, mask):
        y = F.softmax(x, dim=-2, mask=mask, scale=0.5) + F.softmax(x, -1, torch.float64).to(x.dtype)
        y = F.gelu(F.silu(F.relu(y, inplace=True), inplace=True), approximate="tanh")
        y = F.softmax(y, is_causal=True, causal_alignment="bottom_right") + F.dropout(y, 0.5, training=False)
        return F.rms_norm(F.layer_norm(y, (COLUMNS,)), [5, COLUMNS])

    x, mask = _input(), torch.rand(5, 1) > 0.2
    compiled = torch.compile(f, backend="aot_eager", fullgraph=True)
    assert_close([compiled(x, mask)], [f(x, mask)])
