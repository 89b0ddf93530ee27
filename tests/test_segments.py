"""Segments: torch.utils.checkpoint with the engine inside. What is kept, how high backward peaks, how many products run."""

import copy
import functools
import gc
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.flop_counter import FlopCounterMode

import pyckpt
import pyckpt.nn as fused
from pyckpt import checkpoint, checkpoint_sequential, checkpoint_wrapper
from pyckpt.checkpointing import unwrap
from pyckpt.memory import saved_bytes
from tests._engine import Block, allocated, assert_same, blocks, gradients

pytestmark = pytest.mark.usefixtures("unlearned")

WAYS = {"checkpoint": checkpoint, "torch": functools.partial(torch_checkpoint, use_reentrant=False)}


def flops(run):
    run()
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def both(model, forward, *inputs):
    """Gradients by torch's checkpoint and ours, from the same random state."""
    results = []
    for way in (lambda fn, *a, **k: fn(*a, **k), WAYS["torch"], checkpoint):
        torch.manual_seed(3)
        for x in inputs:
            x.grad = None
        loss = forward(way)
        results.append([*gradients(model, lambda loss=loss: loss), *(x.grad for x in inputs)])
    return results


def same(model, forward, *inputs):
    plain, torchs, ours = both(model, forward, *inputs)
    assert_same(ours, plain)
    assert_same(torchs, plain)


def leaf(*shape):
    return torch.randn(*shape, requires_grad=True)


def test_arguments():
    """Keyword arguments (also such as torch's own are called), None, tensors in containers, several results."""
    model, x, y = blocks(1), leaf(8, 32), leaf(8, 32)

    def fn(a, nothing, pair, *, debug, use_reentrant=None, scale):
        assert nothing is None and debug == "mine"
        return model(a) * scale, pair["y"] * use_reentrant

    def forward(way):
        if way is not checkpoint:
            way = functools.partial(lambda way, fn, *a, **k: way(lambda *a: fn(*a, **k), *a), way)
        a, b = way(fn, x, None, {"y": y}, debug="mine", use_reentrant=y, scale=2.0)
        return a.square().mean() + b.mean()

    same(model, forward, x, y)


def test_nested_autocast_and_random_numbers():
    model, x = nn.Sequential(blocks(2), fused.Dropout(0.1), nn.Dropout(0.1), blocks(1)), leaf(8, 32)

    def forward(way):
        with torch.autocast("cpu", torch.bfloat16):
            return way(lambda x: way(model, x).float() * 2, x).square().mean()

    same(model, forward, x)


def test_inputs_without_gradient_and_partial_graphs():
    model, x = blocks(3), torch.randn(8, 32)
    same(model, lambda way: way(model, x).square().mean())
    y = checkpoint(model, x)
    first = torch.autograd.grad(y.sum(), model[2].fc2.weight, retain_graph=True)
    again = torch.autograd.grad(y.sum(), model[2].fc2.weight)
    assert_same(first, again)
    assert_same(first, torch.autograd.grad(model(x).sum(), model[2].fc2.weight))


def test_no_grad_and_evaluation():
    model, x = blocks(1), torch.randn(8, 32)
    with torch.no_grad():
        assert_same([checkpoint(model, x)], [model(x)])
        assert_same([checkpoint_sequential(model, x)], [model(x)])


def test_a_cut_graph_warns_once(recwarn):
    x = leaf(8, 32)
    checkpoint(lambda x: F.gelu(x.detach()), x)
    checkpoint(lambda x: F.gelu(x.detach()), x)
    assert sum("requires a gradient" in str(w.message) for w in recwarn) == 1


@pytest.mark.parametrize("fn", ["module", "method", "closure", "partial", "nested", "wrapped"])
def test_statistics_move_once(fn):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.InstanceNorm2d(4, track_running_stats=True)
    )
    plain, x = copy.deepcopy(model), leaf(4, 3, 8, 8)
    calls = {
        "module": lambda: checkpoint(model, x),
        "method": lambda: checkpoint(model.forward, x),
        "closure": lambda: checkpoint(lambda x: model(x) * 1.0, x),
        "partial": lambda: checkpoint(functools.partial(nn.Module.__call__, model), x),
        "nested": lambda: checkpoint(lambda x: checkpoint(model, x), x),
        "wrapped": lambda: checkpoint_wrapper(model)(x),
    }
    for _ in range(2):
        actual = gradients(model, lambda: calls[fn]().square().mean())
        assert_same(actual, gradients(plain, lambda: plain(x).square().mean()))
    for (name, a), (_, b) in zip(model.named_buffers(), plain.named_buffers(), strict=True):
        assert torch.equal(a, b), name
    assert model[1].num_batches_tracked == 2


def test_not_one_product_more_than_torchs():
    """And one fewer where dropout comes last, whose seed is no saved tensor: the replay stops before its product."""
    width = 64

    class Last(nn.Module):
        def __init__(self, dropout):
            super().__init__()
            self.body = Block(width)
            self.dropout = dropout(0.1)

        def forward(self, x):
            body = self.body
            return x + self.dropout(body.fc2(body.activation(body.fc1(body.norm(x)))))

    x = leaf(32, width)

    def products(make, way, convert):
        torch.manual_seed(0)
        model = make()
        if convert:
            pyckpt.convert(model, recompute=False)
        return flops(lambda: way(model, x).square().mean().backward())

    one = 2 * 32 * width * 4 * width
    plain = products(lambda: Last(nn.Dropout), lambda fn, x: fn(x), False)
    torchs = products(lambda: Last(nn.Dropout), WAYS["torch"], False)
    assert torchs - plain == 2 * one  # fc1 and fc2
    for way in WAYS.values():
        assert products(lambda: Last(nn.Dropout), way, True) - plain == one
    # Without dropout the last product is not run again by either.
    for way in WAYS.values():
        for convert in (False, True):
            assert products(lambda: blocks(2, width), way, convert) == products(
                lambda: blocks(2, width), WAYS["torch"], False
            )


def peak(model, forward, x):
    """Above what is there before, with gradients there already: kept bytes, and the peak seen when a parameter's gradient is."""
    peaks = []
    for _ in range(2):
        x.grad = None
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        gc.collect()
        before = allocated()
        loss = forward()
        kept = allocated() - before
        peaks.clear()
        hook = lambda p: peaks.append(allocated() - before)  # noqa: B023, E731
        handles = [p.register_post_accumulate_grad_hook(hook) for p in model.parameters()]
        loss.backward()
        for handle in handles:
            handle.remove()
    return kept, max(peaks)


class Transformer(nn.Module):
    """GPT-2's block with dropout left out."""

    def __init__(self, width, heads=4):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.ln_1(x)).chunk(3, -1)
        )
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.ln_2(x))


@pytest.mark.usefixtures("counted")
def test_peak_of_a_segment():
    """Four blocks a segment: about 2 sbh kept, and a peak of 4 x 20 and what is under way, where torch's has 4 x 32 and more."""
    torch.manual_seed(0)
    model = pyckpt.convert(nn.Sequential(*(Transformer(128) for _ in range(4))), recompute=False)
    x = leaf(4, 128, 128)
    unit = x.nbytes / 2
    kept, ours = (b / unit for b in peak(model, lambda: checkpoint(model, x).square().mean(), x))
    torch_kept, torchs = (b / unit for b in peak(model, lambda: WAYS["torch"](model, x).square().mean(), x))
    assert kept < 3 and torch_kept < 3
    assert torchs > 128 and ours < 100


def test_sequential():
    model, x = blocks(5), leaf(8, 32)
    expected = gradients(model, lambda: model(x).square().mean())
    for count in (1, 2, 3, 5, 100, "auto"):
        run = lambda count=count: checkpoint_sequential(model, x, segments=count).square().mean()  # noqa: E731
        assert_same(gradients(model, run), expected)
    as_list = lambda: checkpoint_sequential(list(model), x, segments=2).square().mean()  # noqa: E731
    assert_same(gradients(model, as_list), expected)
    # A segment of three is replayed, but for its last product; the last two are not.
    one = 2 * 8 * 32 * 128
    more = flops(lambda: checkpoint_sequential(model, x, segments=2).square().mean().backward())
    assert more - flops(lambda: model(x).square().mean().backward()) == (2 * 3 - 1) * one
    functions = [lambda x, mask, scale: F.gelu(x) * mask * scale] * 3
    y = checkpoint_sequential(functions, x, x, segments=3, scale=2.0)
    (actual,) = torch.autograd.grad(y.sum(), x)
    z = x
    for function in functions:
        z = function(z, x, scale=2.0)
    assert_same([actual], torch.autograd.grad(z.sum(), x))


@pytest.mark.parametrize("segments", ["auto", 1, 2, 3, 4, 5, 9])
def test_layers_that_work_in_place(segments):
    """A segment that began with one would find its input changed."""
    model = nn.Sequential(
        nn.Linear(32, 32), nn.ReLU(inplace=True), nn.Linear(32, 32), nn.SiLU(inplace=True), nn.Dropout(0.3, inplace=True),
        nn.Linear(32, 32), nn.Sequential(nn.LeakyReLU(inplace=True), nn.Linear(32, 32)),
    )  # fmt: skip
    x, results = torch.randn(40, 32), []
    for run in (model, lambda x: checkpoint_sequential(model, x, segments=segments)):
        torch.manual_seed(0)
        results.append(gradients(model, lambda run=run: run(x).square().mean()))
    assert_same(*results)


def test_caches_of_keys_and_values_are_refused():
    """Replayed, a block would append to it again; Hugging Face's decoders make one unless they are told not to."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2
    )
    model, ids = transformers.LlamaForCausalLM(config).train(), torch.randint(50, (2, 16))
    with pytest.raises(ValueError, match="use_cache = False"):
        pyckpt.plan(model, ids, budget=0.8, rounds=1)
    pyckpt.checkpoint_wrapper(model.model.layers[1])
    with pytest.raises(ValueError, match="use_cache = False"):
        model(ids)
    model.config.use_cache = False
    expected = gradients(model, lambda: model(ids).logits.square().mean())
    assert all(g.isfinite().all() for g in expected)


def test_misuse():
    with pytest.raises(TypeError, match="at least one block"):
        checkpoint_sequential([], torch.ones(1))
    with pytest.raises(TypeError, match="at least one block"):
        checkpoint_sequential(blocks(1))
    for wrong in (0, -1, "all", 1.5):
        with pytest.raises(ValueError, match="segments must be 'auto' or a positive number"):
            checkpoint_sequential(blocks(1), torch.ones(1, 32), segments=wrong)
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module"):
        checkpoint_wrapper(F.gelu)
    patched = blocks(1)
    patched.forward = lambda x: x
    with pytest.raises(TypeError, match="is not its class's"):
        checkpoint_wrapper(patched)


def test_wrapper_changes_no_name():
    plain, wrapped, x = blocks(3), blocks(3), leaf(8, 32)
    calls = []
    for block in wrapped:
        block.register_forward_hook(lambda *_: calls.append(1) and None)
        assert checkpoint_wrapper(checkpoint_wrapper(block)) is block
        assert isinstance(block, Block) and type(block).__name__ == "Block"
    assert list(wrapped.state_dict()) == list(plain.state_dict())
    assert [n for n, _ in wrapped.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert [n for n, _ in wrapped.named_modules()] == [n for n, _ in plain.named_modules()]
    assert repr(wrapped) == repr(plain)
    wrapped.load_state_dict(plain.state_dict())
    expected = gradients(plain, lambda: plain(x).square().mean())
    assert_same(gradients(wrapped, lambda: wrapped(x).square().mean()), expected)
    assert len(calls) == 3  # hooks of a block lie outside its checkpoint
    with torch.no_grad():
        assert_same([wrapped(x)], [plain(x)])
    for block in wrapped:
        assert type(unwrap(block)) is Block and unwrap(block) is block


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "data parallel"])
def test_copies_of_wrapped_modules(how):
    model, x = blocks(2), leaf(8, 32)
    expected = gradients(model, lambda: model(x).square().mean())
    products = flops(lambda: model(x).square().mean().backward())
    for block in model:
        checkpoint_wrapper(block)
    again = {
        "deepcopy": copy.deepcopy,
        "pickle": lambda m: pickle.loads(pickle.dumps(m)),
        "data parallel": nn.DataParallel,
    }[how](model)
    assert_same(gradients(again, lambda: again(x).square().mean()), expected)
    assert flops(lambda: again(x).square().mean().backward()) > products
    if how != "data parallel":
        assert again[0].fc1.weight is not model[0].fc1.weight
        assert type(unwrap(again[0])) is Block


def test_wrapped_and_converted():
    model, x = blocks(3), leaf(64, 32)
    plain = pyckpt.convert(copy.deepcopy(model), recompute=False)
    for block in model:
        checkpoint_wrapper(block)
    pyckpt.convert(model)
    assert pyckpt.report(model).to_dict()["counts"]["swapped"] == 6
    assert_same(
        gradients(model, lambda: model(x).square().mean()), gradients(plain, lambda: plain(x).square().mean())
    )


def test_compiled():
    model, x = blocks(2), leaf(8, 32)
    expected = gradients(model, lambda: model(x).square().mean())
    compiled = torch.compile(lambda x: checkpoint(model, x), backend="aot_eager", fullgraph=True)
    for a, b in zip(gradients(model, lambda: compiled(x).square().mean()), expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.usefixtures("counted")
def test_kept_bytes():
    model, x = pyckpt.convert(blocks(8, 64), recompute=False), leaf(512, 64)
    unit = x.nbytes
    kept = saved_bytes(lambda: checkpoint_sequential(model, x, segments=4).square().mean())
    # Three inputs of segments (the first is the model's), the last segment's two cheap sets, and the loss's.
    assert kept < (2 + 2 * 6 + 2) * unit
