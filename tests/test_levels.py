"""Levels of the engine: which matrix products are rebuilt, how many, what stays, and that gradients keep their bits."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import pyckpt
from pyckpt import explain, recompute
from pyckpt._records import Source
from pyckpt.memory import peak_bytes, saved_bytes
from tests._engine import Watched, assert_same, blocks, gradients, region
from tests._levels import (
    BATCH,
    LAYERS,
    LEVELS,
    SEQUENCE,
    UNIT,
    WIDTH,
    GPT2Block,
    LlamaBlock,
    flops,
    sample,
    stack,
    step,
)

pytestmark = pytest.mark.usefixtures("unlearned")


@pytest.fixture
def nothing_left():
    known = set(Source.known)
    yield
    assert Source.known.keys() <= known


# Per token and layer, in units of width^2: a product of (n, k) by (k, m) and its two gradients are 3 k m.
@pytest.mark.parametrize(
    ("block", "kwargs", "extra"),
    [
        # fc1: 4 of 36; queries, keys and values: 3 more.
        (GPT2Block, {}, {"pointwise": 0, "mlp": 4 / 36, "linear": 7 / 36}),
        # gate and up: 8 of 45; q, k and v: 2 more.
        (LlamaBlock, {}, {"pointwise": 0, "mlp": 8 / 45, "linear": 10 / 45}),
        (LlamaBlock, {"fused": True}, {"pointwise": 0, "mlp": 8 / 45, "linear": 10 / 45}),
    ],
    ids=["gpt2", "llama", "llama with one gate-up product"],
)
@pytest.mark.parametrize("converted", [False, True])
@pytest.mark.usefixtures("nothing_left")
def test_products(block, kwargs, extra, converted):
    """Exactly the products of the table, and the bits of the model without the engine."""
    model = stack(block, **kwargs)
    if converted:
        pyckpt.convert(model, recompute=False)
    x = sample()
    expected, plain = step(model, x), flops(lambda: step(model, x))
    for level in LEVELS:
        assert_same(step(model, x, level), expected)
        assert flops(lambda level=level: step(model, x, level)) == round((1 + extra[level]) * plain)


@pytest.mark.parametrize("kind", ["bf16", "autocast"])
@pytest.mark.parametrize("block", [GPT2Block, LlamaBlock])
def test_lower_precision(block, kind):
    model = pyckpt.convert(stack(block), recompute=False)
    if kind == "bf16":
        model.bfloat16()
    x = sample(torch.bfloat16 if kind == "bf16" else torch.float32)
    run = lambda level: step(model, x, level, kind == "autocast")  # noqa: E731
    expected = run(None)
    plain = flops(lambda: run(None))
    for level in LEVELS:
        assert_same(run(level), expected)
    more = (7 / 36 if block is GPT2Block else 10 / 45) * plain
    assert flops(lambda: run("linear")) == round(plain + more)


class _Fresh(torch.autograd.Function):
    """What no rule rebuilds, so that the first block keeps its input as the others do."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad


@pytest.mark.usefixtures("counted")
def test_bytes():
    """20, 12 and 6 sbh; and the peak of the backward does not give them back."""
    model = pyckpt.convert(stack(), recompute=False)
    x = sample()

    def forward(level):
        with region(level is not None, policy=level):
            return model(_Fresh.apply(x))

    kept = {
        level: saved_bytes(lambda level=level: forward(level)) / UNIT / LAYERS for level in (None, *LEVELS)
    }
    # Statistics, autograd's nodes and the engine's records come on top.
    for level, expected in {None: 32, "pointwise": 20, "mlp": 12, "linear": 6}.items():
        assert expected <= kept[level] < expected + 0.9
    grad = torch.ones_like(x)
    peaks = {
        level: peak_bytes(lambda level=level: torch.autograd.grad(forward(level), x, grad)) / UNIT
        for level in ("pointwise", "mlp", "linear")
    }
    # A block under way holds fc1's product, GELU's output and the gradient of it: 24 and less.
    assert peaks["mlp"] < peaks["pointwise"] - LAYERS * 8 + 16
    assert peaks["linear"] < LAYERS * 6 + 2 * 8 + 8 + 6


def test_mlp_keeps_products_that_others_read_too():
    """A product is rebuilt when all who save it are pointwise; whatever order they come in."""
    x, w = torch.randn(64, 64, requires_grad=True), torch.randn(64, 64, requires_grad=True)
    out = torch.randn(64, 64, requires_grad=True)

    def only(h):
        return F.gelu(h) @ out

    def before(h):
        return (h @ out).sum() + F.gelu(h) @ out

    def after(h):
        return F.gelu(h) @ out + (h @ out).sum()

    def norm(h):
        return F.layer_norm(h, (64,)) @ out

    for function, extra in ((only, 1), (before, 0), (after, 0), (norm, 0)):
        run = lambda policy=None, function=function: torch.autograd.grad(  # noqa: E731
            _in_region(policy, lambda: function(x @ w).square().sum()), [x, w, out]
        )
        assert_same(run("mlp"), run())
        assert flops(lambda run=run: run("mlp")) - flops(run) == extra * 2 * 64**3


def _in_region(policy, function):
    with region(policy is not None, policy=policy):
        return function()


def test_products_do_not_chain():
    """Of a stack of linear layers every other product is rebuilt, from one that is kept: no long replay."""
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.GELU())])
    x = torch.randn(64, 64, requires_grad=True)
    for level in ("mlp", "linear"):
        assert_same(step(model, x, level), step(model, x))
        more = flops(lambda level=level: step(model, x, level)) - flops(lambda: step(model, x))
        assert more == 3 * 2 * 64**3
    with Watched(policy="mlp") as watched:
        model(x)
    assert sum("another matrix product" in reason for reason in watched.reasons) == 3


@pytest.mark.parametrize("level", ["mlp", "linear"])
def test_residual_sums_are_kept(level):
    """The stream is kept where a norm reads it, though one product more would rebuild it; a bias is not a stream."""
    x, w, out = (torch.randn(64, 64, requires_grad=True) for _ in range(3))
    bias = torch.randn(64, requires_grad=True)
    run = lambda level, other: torch.autograd.grad(  # noqa: E731
        _in_region(level, lambda: (F.gelu(other + x.sin() @ w) @ out).sum()), [x, w, out]
    )
    assert_same(run(level, x), run(None, x))
    assert flops(lambda: run(level, x)) == flops(lambda: run(None, x))
    assert_same(run("linear", bias), run(None, bias))
    assert flops(lambda: run("linear", bias)) - flops(lambda: run(None, bias)) == 2 * 64**3


class Lora(nn.Module):
    def __init__(self, base, rank=4):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a, self.b = nn.Linear(WIDTH, rank, bias=False), nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x)) * 2.0


@pytest.mark.parametrize("converted", [False, True])
def test_frozen_weights(converted):
    """LoRA on queries and values: frozen layers save no input, so that it is not rebuilt either; queries are."""
    model = stack(LlamaBlock).requires_grad_(False)
    for block in model:
        block.q, block.v = Lora(block.q), Lora(block.v)
    if converted:
        pyckpt.convert(model, recompute=False)
    x = sample()
    expected, plain = step(model, x), flops(lambda: step(model, x))
    extra = {}
    for level in LEVELS:
        assert_same(step(model, x, level), expected)
        extra[level] = (flops(lambda level=level: step(model, x, level)) - plain) / (
            2 * LAYERS * BATCH * SEQUENCE * WIDTH**2
        )
    rank = 4 * 1.5 / WIDTH  # the second factors of q and v, whose first factors' products are kept
    assert extra == {
        "pointwise": 0,
        "mlp": 8,
        "linear": pytest.approx(10 + rank, abs=1e-9),
    }


@pytest.mark.filterwarnings("ignore:pyckpt.recompute. nothing in this region")
@pytest.mark.usefixtures("nothing_left")
def test_linear_probing_rebuilds_nothing():
    model = stack().requires_grad_(False)
    head = nn.Linear(WIDTH, 8)
    x = sample(requires_grad=False)
    run = lambda level: _in_region(level, lambda: head(model(x)).square().mean()).backward()  # noqa: E731
    for level in LEVELS:
        assert flops(lambda level=level: run(level)) == flops(lambda: run(None))


@pytest.mark.parametrize("level", ["mlp", "linear"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_inside_a_checkpoint_no_product_is_run_a_third_time(level, reentrant):
    model, x = stack(), sample()

    def run(level):
        def forward(x):
            with region(level is not None, policy=level):
                return model(x)

        x.grad = None
        model.zero_grad()
        checkpoint(forward, x, use_reentrant=reentrant).square().mean().backward()
        return [x.grad, *(p.grad for p in model.parameters())]

    assert_same(run(level), run(None))
    assert flops(lambda: run(level)) == flops(lambda: run(None))


@pytest.mark.parametrize("level", ["mlp", "linear"])
def test_offloaded(level):
    """What is kept goes to the hooks below."""
    model, x = pyckpt.convert(stack(LlamaBlock), recompute=False), sample()

    def run(level):
        with torch.autograd.graph.save_on_cpu():
            return step(model, x, level)

    assert_same(run(level), run(None))
    assert flops(lambda: run(level)) > flops(lambda: run(None))


@pytest.mark.usefixtures("nothing_left")
def test_uses_of_the_graph():
    """retain_graph, the gradient of a part, double backward, several forwards."""
    model, x = pyckpt.convert(stack(), recompute=False), sample()

    def run(level):
        with region(level is not None, policy=level):
            first, second = model(x).square().mean(), model(x * 2).square().mean()
        grads = [*torch.autograd.grad(first, x, retain_graph=True)]
        grads += torch.autograd.grad(first + second, [x, *model.parameters()], retain_graph=True)
        grads += torch.autograd.grad(first, [model[1].fc1.weight])
        return grads

    for level in LEVELS:
        assert_same(run(level), run(None))
    small = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    y = torch.randn(16, 32, requires_grad=True)

    def twice(level):
        with region(level is not None, policy=level):
            (g,) = torch.autograd.grad(small(y).square().sum(), y, create_graph=True)
            penalty = g.square().sum()
        return torch.autograd.grad(penalty, [y, *small.parameters()])

    for level in LEVELS:
        assert_same(twice(level), twice(None))


@pytest.mark.parametrize("level", ["mlp", "linear"])
def test_changed_products_raise(level):
    """In place after they were saved: PyTorch's own error, as in eager; a changed weight: ours."""
    x, w, out = (torch.randn(64, 64, requires_grad=True) for _ in range(3))
    with recompute(level):
        h = x @ w
        y = F.gelu(h) @ out
    h.data.add_(0)  # not counted
    with torch.no_grad():
        h.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    with recompute(level):
        y = F.gelu(x @ w) @ out
    with torch.no_grad():
        w.add_(1)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation|changed in place"):
        y.sum().backward()


def test_convert():
    model, x = stack(), sample()
    plain = pyckpt.convert(copy.deepcopy(model), recompute=False)
    expected, products = step(plain, x), flops(lambda: step(plain, x))
    for level, extra in (("linear", 7 / 36), ("mlp", 4 / 36), (True, 0)):
        assert pyckpt.convert(model, recompute=level) is model
        assert len(model._forward_pre_hooks) == 1 and pyckpt.report(model).recompute is True
        for again in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert_same(step(again, x), expected)
            assert flops(lambda again=again: step(again, x)) == round((1 + extra) * products)
    pyckpt.convert(model, recompute="mlp")
    with pytest.raises(ValueError, match="convert: policy must be one of"):
        pyckpt.convert(model, recompute="all")
    pyckpt.revert(model)
    assert not model._forward_pre_hooks and not model._forward_hooks


def test_convert_with_a_policy_then_compile():
    model, x = pyckpt.convert(stack(), recompute="mlp"), sample()
    with pytest.warns(UserWarning, match=r"does nothing inside torch\.compile"):
        y = torch.compile(model, backend="aot_eager", fullgraph=True)(x)
    torch.testing.assert_close(y, model(x))
    torch.testing.assert_close(torch.export.export(model, (x,)).module()(x), model(x))


@pytest.mark.usefixtures("counted")
@pytest.mark.parametrize("level", LEVELS)
def test_explain(level):
    told = explain(stack(), sample(), policy=level)
    assert abs(told.measured_after - told.after) < 0.02 * told.after + LAYERS * (20 << 10)
    reasons = " ".join(told.reasons())
    assert ("others than pointwise" in reasons) is (level == "mlp")


def test_gradients_accumulate():
    model, x = pyckpt.convert(stack(), recompute="linear"), sample()
    plain = pyckpt.convert(stack(), recompute=False)
    run = lambda m: gradients(m, lambda: m(x).square().mean() + m(x.detach()).mean())  # noqa: E731
    assert_same(run(model), run(plain))


@pytest.mark.parametrize("policy", ["mlp", "linear"])
@pytest.mark.usefixtures("counted")
def test_products_of_an_outer_region_are_not_rebuilt(policy):
    """A plan's region in that of the model, say: what the outer one keeps is where the inner one's products begin."""
    project, model, x = nn.Linear(8, 32), blocks(2), torch.randn(512, 8)

    def forward(outer):
        with region(outer):
            y = project(x)
            with recompute(policy):
                y = model(y)
            return y.square().mean()

    alone, nested = (saved_bytes(lambda outer=outer: forward(outer)) for outer in (False, True))
    ends = 2 * 512 * 32 * 4  # the projection's output, and the loss' input
    assert nested == pytest.approx(alone, abs=ends + 2048)
    results = [gradients(model, lambda outer=outer: forward(outer)) for outer in (False, True)]
    assert_same(*results)
