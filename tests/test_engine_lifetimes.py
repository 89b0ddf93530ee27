"""How long the recompute engine keeps what alive: graphs, rebuilt tensors, outputs of their own nodes."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pyckpt
from pyckpt import _records, recompute
from pyckpt._records import Source
from pyckpt.memory import no_collection, saved_bytes
from tests._engine import allocated, blocks

pytestmark = pytest.mark.usefixtures("unlearned")


def test_dropped_graph_is_freed_at_once():
    model = blocks(8, 64)
    x = torch.randn(64, 64)

    def forward():
        with recompute():
            return model(x).square().mean()

    forward().backward()
    model.zero_grad()
    forward()
    with no_collection():
        before, known = allocated(), set(Source.known)
        loss = forward()
        node = Source.known[(Source.known.keys() - known).pop()]
        kept = allocated() - before
        del loss
        assert node() is None
        assert allocated() - before < 0.02 * kept


@pytest.mark.parametrize("within", ["region", "checkpoint", "model"])
def test_region_is_gone_when_it_ends(within):
    """What it holds (in a checkpoint its hooks, and with them all of its arguments) is let go without the garbage collector."""
    seen = []

    class Looks(nn.Module):
        def forward(self, x):
            seen.extend(weakref.ref(region) for _, region in _records.regions.stack)
            return F.gelu(x * 2)

    model, x = nn.Sequential(Looks()), torch.randn(64, 64, requires_grad=True)
    if within == "model":
        pyckpt.convert(model)

    def step():
        h = x * 1.0
        if within == "region":
            with recompute():
                y = model(h)
        else:
            y = pyckpt.checkpoint(model, h) if within == "checkpoint" else model(h)
        y.sum().backward()
        return weakref.ref(h)

    step()
    seen.clear()
    with no_collection():
        assert step()() is None
        assert seen and all(region() is None for region in seen)


def test_output_in_place_of_a_view_is_no_cycle():
    """Its node saves the view, whose own node is another: it would hold itself all the same."""
    x = torch.randn(64, 64, requires_grad=True)

    def forward():
        with recompute():
            h = x * 2
            h[:, :16].sigmoid_()

    forward()
    with no_collection():
        before = allocated()
        for _ in range(8):
            forward()
        assert allocated() - before < x.nbytes


def test_backward_frees_as_it_goes():
    """Alive at any one time in backward: one block's rebuilt tensors, not all of them."""
    model = blocks(8, 64)
    x = torch.randn(256, 64)
    unit = x.numel() * 4

    def forward():
        with recompute():
            return model(x).square().mean()

    forward().backward()
    for keep in (False, True):
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        gc.collect()
        before = allocated()
        loss = forward()
        kept = allocated() - before
        peak = []
        note = lambda p, peak=peak, before=before: peak.append(allocated() - before)  # noqa: E731
        handles = [p.register_post_accumulate_grad_hook(note) for p in model.parameters()]
        loss.backward(retain_graph=keep)
        for handle in handles:
            handle.remove()
        # The gradients under way, one gelu (4 units), its gradient (4) and one norm (1), and a step's workspace.
        assert max(peak) < kept + 16 * unit
        assert allocated() - before <= (kept if keep else 0) + unit


def test_rebuilt_once_for_all_consumers(monkeypatch):
    calls = []
    norm = nn.LayerNorm(32)
    heads = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
    x = torch.randn(16, 32, requires_grad=True)
    with recompute():
        y = norm(x)
        loss = sum(head(y).square().mean() for head in heads)
    source = Source.find(y.grad_fn, 0)
    function = source.function
    source.function = lambda *operands: (calls.append(1), function(*operands))[1]
    del y
    loss.backward()
    assert len(calls) == 1
    assert source.value is None or weakref.ref(source)() is source


def test_partial_gradients_leave_no_caches():
    model = blocks(6, 64)
    x = torch.randn(2048, 64)  # one norm's output: 512 KiB, far above what else the process may come to hold
    with recompute():
        loss = model(x).square().mean()
    torch.autograd.grad(loss, model[5].fc2.weight, retain_graph=True)
    before = allocated()
    for i in (4, 2, 0):
        torch.autograd.grad(loss, model[i].fc2.weight, retain_graph=True)
        assert allocated() - before < x.nbytes / 2
    assert all(source is None or source.value is None for source in [ref() for ref in Source.known.values()])


@pytest.mark.parametrize("function", [torch.exp, torch.sigmoid, torch.relu, lambda x: x.softmax(-1)])
def test_own_outputs_of_a_dropped_graph_are_freed(function):
    """A node that saves its output, and the record of it, must not keep each other alive. No collector sees such a cycle."""
    x = torch.randn(32, 32, requires_grad=True)
    with recompute():
        y = function(x)
    reference = weakref.ref(y)
    del y
    gc.collect()
    assert reference() is None


def test_relu_at_the_end_keeps_no_more_than_eager():
    x = torch.randn(4, 8, 64, 64)

    def kept(convert):
        model = nn.Sequential(nn.Conv2d(8, 32, 3, padding=1), nn.ReLU())
        model = pyckpt.convert(model) if convert else model
        return saved_bytes(lambda: model(x).square().mean(), warmup=1)

    assert kept(True) < 1.1 * kept(False)


def test_failed_backward_leaves_no_caches():
    model = blocks(3)
    with recompute():
        loss = model(F.gelu(torch.randn(32, 32, requires_grad=True) * 2)).sum()
    before = len(_records._cached)

    def fail(grad):
        raise ValueError("stop")

    handle = model[0].fc2.weight.register_hook(fail)
    with pytest.raises(ValueError, match="stop"):
        loss.backward(retain_graph=True)
    handle.remove()
    assert len(_records._cached) == before
    assert all(reference().value is None for reference in list(Source.known.values()))


def test_explain_leaves_nothing_behind():
    """Its forwards are dropped without a backward, outputs that their own nodes keep included."""
    model = nn.Sequential(
        nn.Linear(64, 64), nn.Sigmoid(), nn.Linear(64, 64), nn.Softmax(-1), nn.Linear(64, 64)
    )
    x = torch.randn(2048, 64)
    pyckpt.explain(model, x)
    before = allocated()
    pyckpt.explain(model, x)
    assert allocated() - before < x.nbytes / 4
