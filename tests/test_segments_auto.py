"""``checkpoint_sequential(segments="auto")``: the length that it finds, where it can be found, and that nobody sees it look."""

import math

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import pyckpt
from pyckpt import checkpoint, checkpoint_sequential
from pyckpt.checkpointing import segments
from tests._engine import assert_same, blocks, gradients
from tests.test_segments import Transformer, leaf, peak

pytestmark = pytest.mark.usefixtures("unlearned")


@pytest.fixture
def lengths(monkeypatch):
    """Of the segments that are checkpointed, as they run."""
    found, original = [], segments.segment

    def segment(part, *args, **kwargs):
        found.append(len(part))
        return original(part, *args, **kwargs)

    monkeypatch.setattr(segments, "segment", segment)
    return found


def linears(count=16):
    """Each keeps its input, so that the best length of segments is sqrt(count)."""
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(count)))


@pytest.mark.usefixtures("counted")
def test_automatic_length():
    """sqrt(2 N / A) blocks a segment, A being 20 sbh under the engine; and the lowest peak of all lengths."""
    torch.manual_seed(0)
    count = 16
    model = pyckpt.convert(nn.Sequential(*(Transformer(64) for _ in range(count))), recompute=False)
    x = leaf(4, 128, 64)
    before = torch.get_rng_state()
    length = segments.segment_length(model[0], count, (x,), {})
    assert torch.equal(torch.get_rng_state(), before)
    assert length == round(math.sqrt(2 * count / 20.5))  # 1
    # A chain of cheap blocks: 2 sbh kept each, so that the best is sqrt(N).
    cheap = linears(count)
    assert segments.segment_length(cheap[0], count, (x,), {}) == 4

    def kept(n):
        return peak(cheap, lambda: checkpoint_sequential(cheap, x, segments=n).square().mean(), x)[1]

    best = kept("auto")
    assert best <= min(kept(n) for n in (1, 2, 8, 16)) + (64 << 10)


@pytest.mark.usefixtures("counted")
@pytest.mark.parametrize("first", ["embedding", "frozen embedding", "frozen body", "flatten", "identity"])
def test_automatic_length_behind_what_keeps_nothing(first, lengths, recwarn):
    """Such blocks are run as they are; the length is right for the others."""
    x = torch.randint(50, (512,)) if "embedding" in first else torch.randn(512, 8, 8).reshape(-1, 64)
    front = {
        "embedding": [nn.Embedding(50, 64)],
        "frozen embedding": [nn.Embedding(50, 64).requires_grad_(False)],
        "frozen body": linears(3).requires_grad_(False),
        "flatten": [nn.Unflatten(1, (8, 8)), nn.Flatten()],
        "identity": [nn.Identity()],
    }[first]
    model = nn.Sequential(*front, *linears())
    expected = gradients(model, lambda: model(x).square().mean())
    run = lambda: checkpoint_sequential(model, x).square().mean()  # noqa: E731
    for _ in range(2):
        lengths.clear()
        assert_same(gradients(model, run), expected)
        assert lengths == [4, 4, 4]
    assert not recwarn
    if first == "frozen body":  # no more
        model.requires_grad_(True)
        expected = gradients(model, lambda: model(x).square().mean())
        lengths.clear()
        assert_same(gradients(model, run), expected)
        assert lengths == [4, 4, 4, 4]


@pytest.mark.usefixtures("counted")
def test_automatic_length_of_tuples(lengths):
    """What is in them counts as a block's input; and nothing needs a checkpoint where no block keeps anything."""

    class Pair(nn.Linear):
        def forward(self, pair):
            return super().forward(pair[0]), pair[1]

    model, pair = nn.Sequential(*(Pair(64, 64) for _ in range(16))), (torch.randn(512, 64), None)
    expected = gradients(model, lambda: model(pair)[0].square().mean())
    assert_same(gradients(model, lambda: checkpoint_sequential(model, pair)[0].square().mean()), expected)
    assert lengths == [4, 4, 4]
    lengths.clear()
    frozen = linears().requires_grad_(False)
    assert_same([checkpoint_sequential(frozen, pair[0])], [frozen(pair[0])])
    assert not lengths


def test_automatic_length_where_nothing_is_counted(lengths, monkeypatch, recwarn):
    def no_counter(device):
        raise RuntimeError("cannot count CPU memory")

    monkeypatch.setattr(segments.memory, "allocated_bytes", no_counter)
    x = torch.randn(512, 64)
    for model in (linears(), linears()):
        expected = gradients(model, lambda model=model: model(x).square().mean())
        run = lambda model=model: checkpoint_sequential(model, x).square().mean()  # noqa: E731
        assert_same(gradients(model, run), expected)
    assert lengths == [4, 4, 4] * 2
    assert sum("cannot be counted here" in str(w.message) for w in recwarn) == 1


def test_measuring_is_not_seen():
    """Not by a flop counter, by hooks or by a checkpoint outside, whose forward and replay must keep the same."""
    model, x = blocks(4), leaf(8, 32)
    expected = gradients(model, lambda: model(x).square().mean())
    seen = []
    with FlopCounterMode(display=False) as counter:
        checkpoint_sequential(model, x).sum()
    assert counter.get_total_flops() == 4 * 2 * 2 * 8 * 32 * 128
    model = blocks(4)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t):
        checkpoint_sequential(model, x)
        first = len(seen)
        checkpoint_sequential(model, x)
    assert len(seen) == 2 * first
    model = blocks(4)
    outer = lambda: checkpoint(lambda x: checkpoint_sequential(model, x), x).square().mean()  # noqa: E731
    assert_same(gradients(model, outer), expected)
    with torch.autocast("cpu", torch.bfloat16):
        checkpoint_sequential(model, x)
