"""The recompute engine beside others that reach into autograd: checkpoints, offloading, compilers, transforms, sharding."""

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, jvp, vmap
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import pyckpt.nn as fused
from pyckpt import engine, recompute
from pyckpt.memory import saved_bytes
from tests._engine import Watched, allocated, assert_same, blocks, gelu_then, gradients, region

pytestmark = pytest.mark.usefixtures("unlearned")

ENGINE_INSIDE = {
    "checkpoint": lambda run, x: checkpoint(run, x, use_reentrant=False),
    "reentrant": lambda run, x: checkpoint(run, x, use_reentrant=True),
    "nested checkpoints": lambda run, x: checkpoint(
        lambda x: checkpoint(run, x, use_reentrant=False) * 2, x, use_reentrant=False
    ),
    "no early stop": lambda run, x: _without_early_stop(run, x),
    "save_on_cpu": lambda run, x: _under(torch.autograd.graph.save_on_cpu(), run, x),
    "hooks that clone": lambda run, x: _under(
        torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t), run, x
    ),
    "region": lambda run, x: _under(recompute(), run, x),
    "user hooks between regions": lambda run, x: _under(
        recompute(),
        lambda x: _under(torch.autograd.graph.saved_tensors_hooks(lambda t: [t], lambda b: b[0]), run, x),
        x,
    ),
}


def _under(context, run, x):
    with context:
        return run(x)


def _without_early_stop(run, x):
    with torch.utils.checkpoint.set_checkpoint_early_stop(False):
        return checkpoint(run, x, use_reentrant=False)


@pytest.mark.parametrize("norm", [nn.LayerNorm, fused.LayerNorm])
@pytest.mark.parametrize("outer", ENGINE_INSIDE)
def test_region_inside(outer, norm):
    """Same gradients, also of inputs; twice, as a checkpoint must replay what the first run learnt."""
    data = torch.randn(4, 8, 32)

    def run(model, on):
        def forward(x):
            with region(on):
                return model(x)

        results = []
        for _ in range(2):
            x = data.clone().requires_grad_()
            torch.manual_seed(3)
            loss = ENGINE_INSIDE[outer](forward, x).square().mean()
            results += [*gradients(model, lambda loss=loss: loss), x.grad]
        return results

    make = lambda: nn.Sequential(blocks(2, norm=norm), fused.Dropout(0.1), blocks(1))  # noqa: E731
    torch.manual_seed(0)
    model = make()
    assert_same(run(model, True), run(model, False))


@pytest.mark.parametrize("outer", ENGINE_INSIDE)
def test_region_around(outer):
    """The other way round: what is inside packs for itself, what is outside is the region's."""
    data = torch.randn(4, 8, 32)

    def run(model, on):
        x = data.clone().requires_grad_()
        with region(on):
            y = model[0](x)
            y = ENGINE_INSIDE[outer](model[1], y)
            loss = model[2](y).square().mean()
        return [*gradients(model, lambda: loss), x.grad]

    model = blocks(3)
    assert_same(run(model, True), run(model, False))


def test_hooks_below_see_what_is_kept():
    seen = []

    def pack(tensor):
        seen.append(tensor)
        return tensor

    model, x = blocks(2), torch.randn(4, 8, 32)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model(x)
    alone = len(seen)
    seen.clear()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), Watched() as watched:
        model(x)
    assert len(seen) == alone - watched.rebuilt and watched.rebuilt > 0


def test_segments_keep_the_cheap_set_while_replayed():
    """Inside a checkpoint the engine keeps nothing in forward, and in the replay less than eager: peak and products counted."""
    model = blocks(4, 64, norm=fused.LayerNorm)
    x = torch.randn(512, 64)
    unit = 4 * x.numel()

    def forward(on):
        def run(x):
            with region(on):
                return model(x)

        return checkpoint(run, x.requires_grad_(), use_reentrant=False).square().mean()

    assert saved_bytes(lambda: forward(True)) < 3 * unit
    peaks = {}
    for on in (False, True):
        for _ in range(2):
            for p in model.parameters():
                p.grad = torch.zeros_like(p)
            x.grad = None
            loss = forward(on)
            gc.collect()
            before, peak = allocated(), []
            hook = lambda p, peak=peak, before=before: peak.append(allocated() - before)  # noqa: E731
            handles = [p.register_post_accumulate_grad_hook(hook) for p in model.parameters()]
            loss.backward()
            for h in handles:
                h.remove()
        peaks[on] = max(peak) / unit
    # A replayed block keeps x, norm, fc1 and gelu (1 + 1 + 4 + 4), or x and fc1 (1 + 4); the one under way rebuilds the rest.
    assert peaks[True] < peaks[False] - 3 * (1 + 4)

    def products(run):
        with FlopCounterMode(display=False) as counter:
            run().backward()
        return counter.get_total_flops()

    assert products(lambda: forward(True)) == products(lambda: forward(False))


@pytest.mark.parametrize("reentrant", [False, True])
def test_hugging_face_gradient_checkpointing(reentrant):
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=64, vocab_size=50,
        hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.0, max_position_embeddings=64,
    )  # fmt: skip
    ids = torch.randint(50, (2, 16))
    torch.manual_seed(0)
    model = transformers.BertModel(config, add_pooling_layer=False).train()

    def step(on):
        torch.manual_seed(1)
        with region(on):
            loss = model(ids).last_hidden_state.square().mean()
        return gradients(model, lambda: loss)

    plain = step(False)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert_same(step(True), plain)


def test_compiled_module_inside_a_region():
    model, x = blocks(2), torch.randn(4, 8, 32)
    compiled = torch.compile(model, backend="aot_eager")
    expected = gradients(model, lambda: compiled(x).square().mean())
    with Watched() as watched:
        loss = F.gelu(compiled(x)).mul(2).square().mean()
    assert watched.rebuilt
    plain = gradients(model, lambda: F.gelu(compiled(x)).mul(2).square().mean())
    assert_same(gradients(model, lambda: loss), plain)
    assert len(expected) == len(plain)


def test_region_inside_a_compiled_function():
    model, x = blocks(2), torch.randn(4, 8, 32)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def forward(x):
        with recompute():
            return model(x).square().mean()

    expected = gradients(model, lambda: model(x).square().mean())
    with pytest.warns(UserWarning, match=r"does nothing inside torch\.compile"):
        loss = forward(x)
    for a, b in zip(gradients(model, lambda: loss), expected, strict=True):
        torch.testing.assert_close(a, b)
    assert not engine.regions.stack


def test_transforms_around_a_region():
    model, x = blocks(1), torch.randn(8, 32)
    weights = dict(model.named_parameters())

    def loss(weights, x):
        with recompute():
            return functional_call(model, weights, (x,)).square().mean()

    def plain(weights, x):
        return functional_call(model, weights, (x,)).square().mean()

    with pytest.warns(UserWarning, match=r"a torch\.func transform encloses the region"):
        actual = grad(loss)(weights, x)
    expected = grad(plain)(weights, x)
    assert_same(list(actual.values()), list(expected.values()))
    assert_same(
        [vmap(lambda x: loss(weights, x))(x[:, None])], [vmap(lambda x: plain(weights, x))(x[:, None])]
    )


def test_transforms_inside_a_region():
    w = torch.randn(64, 64, requires_grad=True)
    x = torch.randn(3, 64, 64)
    with recompute():
        a = vmap(lambda t: gelu_then(lambda y: y @ w, t).sum())(x)
        jvp(F.gelu, (x,), (x,))
        with pytest.raises(RuntimeError, match="saved tensor hooks"):
            grad(lambda t: F.gelu(t).sum())(x)
    (actual,) = torch.autograd.grad(a.sum(), w)
    (expected,) = torch.autograd.grad(vmap(lambda t: gelu_then(lambda y: y @ w, t).sum())(x).sum(), w)
    assert_same([actual], [expected])


def test_jit_trace_around_a_region():
    model, x = blocks(1), torch.randn(4, 32)

    handle = model.register_forward_pre_hook(lambda module, args: recompute().__enter__() and None)
    with pytest.warns(UserWarning, match=r"torch\.jit\.trace is recording"):
        traced = torch.jit.trace(model, x, check_trace=False)
    handle.remove()
    assert_same([traced(x)], [model(x)])


def test_data_parallel_threads():
    """As nn.DataParallel runs its replicas: the same module in several threads, each with a region of its own."""
    model = blocks(2)
    inputs = [(torch.randn(4, 8, 32),) for _ in range(3)]

    class Forward(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x):
            with recompute():
                return self.model(x).square().mean()

    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(3) as pool:
        losses = list(pool.map(lambda a: Forward()(*a), inputs))
    actual = gradients(model, lambda: sum(losses))
    expected = gradients(model, lambda: sum(model(x).square().mean() for (x,) in inputs))
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b)
