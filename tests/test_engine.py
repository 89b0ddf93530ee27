"""pyckpt.recompute in the ways that training uses autograd: same bits, and no memory that outlives its use."""

import copy
import pickle
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pyckpt.functional as ours
import pyckpt.nn as fused
from pyckpt import _checks, backends, engine, recompute
from tests._engine import Block, Watched, allocated, assert_same, blocks, gradients, region

pytestmark = pytest.mark.usefixtures("unlearned")


def both(make, run, **kwargs):
    """The gradients without and with the engine; `run(model, on)` gives the list of results to compare."""
    assert_same(run(make(), True), run(make(), False))


def test_gradients_are_the_same_bits():
    x = torch.randn(4, 8, 32)

    def run(model, on):
        with region(on):
            loss = model(x).square().mean()
        return gradients(model, lambda: loss)

    both(blocks, run)


def test_as_decorator_and_reentrant():
    model, x = blocks(), torch.randn(4, 8, 32)
    inner = recompute()

    @recompute()
    def forward(depth):
        with inner:
            return model(x) + (forward(depth - 1) if depth else 0)

    expected = gradients(model, lambda: (model(x) + (model(x) + model(x))).square().mean())
    assert_same(gradients(model, lambda: forward(2).square().mean()), expected)
    assert not engine.regions.stack


def test_several_forwards_then_backwards_in_any_order():
    def run(model, on):
        losses = []
        for seed in range(3):
            x = torch.randn(4, 8, 32, generator=torch.Generator().manual_seed(seed))
            with region(on):
                losses.append(model(x).square().mean())
        for i in (1, 0, 2):
            losses[i].backward()
        return [p.grad for p in model.parameters()]

    both(blocks, run)


def test_retain_graph_and_parts_of_the_graph():
    x = torch.randn(4, 8, 32)

    def run(model, on):
        with region(on):
            loss = model(x).square().mean()
        results = [torch.autograd.grad(loss, model[i].fc2.weight, retain_graph=True)[0] for i in (2, 1, 0)]
        loss.backward(retain_graph=True)
        loss.backward()
        return results + [p.grad for p in model.parameters()]

    both(blocks, run)


@pytest.mark.parametrize("activation", [nn.GELU, nn.SiLU, fused.GELU, fused.SiLU])
@pytest.mark.parametrize("norm", [nn.LayerNorm, fused.LayerNorm, fused.RMSNorm])
def test_double_backward(norm, activation):
    def run(model, on):
        x = torch.randn(
            4, 8, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
        ).requires_grad_()
        with region(on):
            loss = model(x).sin().sum()
        (g,) = torch.autograd.grad(loss, x, create_graph=True)
        g.square().sum().backward()
        return [g, x.grad, *(p.grad for p in model.parameters())]

    both(lambda: blocks(norm=norm, activation=activation).double(), run)


def test_second_backward_gives_torchs_message():
    model = blocks()
    with recompute():
        loss = model(torch.randn(4, 8, 32)).square().mean()
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_module_and_tensor_hooks():
    x = torch.randn(4, 8, 32)

    def run(model, on):
        seen = []
        for module in model.modules():
            module.register_full_backward_hook(lambda m, gi, go: seen.append(go[0].sum()))
            module.register_full_backward_pre_hook(lambda m, go: seen.append(go[0].sum()))
        with Watched() if on else region(False) as watched:
            y = model(x)
            y.register_hook(lambda g: g * 2)
            loss = y.square().mean()
        if on:  # the identity that such a hook puts after a module does not hide the norm and the activation behind it
            assert watched.rebuilt >= 2 * len(model)
        return [*gradients(model, lambda: loss), *seen]

    both(blocks, run)


@pytest.mark.parametrize("inside", [True, False])
def test_backward_in_autocast(inside):
    x = torch.randn(16, 64)

    def run(model, on):
        with torch.autocast("cpu", torch.bfloat16):
            with region(on):
                loss = model(x).float().square().sum()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        return [p.grad for p in model.parameters()]

    both(lambda: blocks(width=64), run)


def test_autocast_copies_of_weights_are_cast_again():
    width = 256
    model = blocks(2, width)
    x = torch.randn(2, width)

    def kept(on):
        before = allocated()
        with region(on), torch.autocast("cpu", torch.bfloat16):
            loss = model(x).float().square().mean()
        return allocated() - before, loss

    kept(False), kept(True)
    eager, _ = kept(False)
    ours, loss = kept(True)
    copies = 2 * sum(p.numel() for p in model.parameters() if p.dim() == 2)
    assert eager > copies
    assert ours < 0.1 * copies
    loss.backward()


def test_autocast_copy_of_a_weight_that_has_changed_since():
    """The cached copy is older than the weight: it is kept, not cast anew."""

    def run(model, on):
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(0), requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            model(x)  # outside: fills the cache
            with torch.no_grad():
                model.weight.mul_(2)
            with region(on):
                loss = model(x).float().square().sum()
        return [torch.autograd.grad(loss, x)[0]]

    both(lambda: (torch.manual_seed(0), nn.Linear(64, 64))[1], run)


def test_threads():
    model = blocks()
    data = [torch.randn(4, 8, 32) for _ in range(4)]
    parameters = list(model.parameters())

    def one(x, on):
        for _ in range(5):
            with region(on):
                loss = model(x).square().mean()
            result = torch.autograd.grad(loss, parameters)
        return result

    expected = [one(x, False) for x in data]
    results = [None] * len(data)

    def work(i):
        results[i] = one(data[i], True)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(data))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for actual, wanted in zip(results, expected, strict=True):
        assert_same(actual, wanted)


def test_backward_in_another_thread():
    model, x = blocks(), torch.randn(4, 8, 32)
    expected = gradients(model, lambda: model(x).square().mean())
    model.zero_grad()
    with recompute():
        loss = model(x).square().mean()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    assert_same([p.grad for p in model.parameters()], expected)


def test_exception_inside_leaves_nothing_behind():
    with pytest.raises(ZeroDivisionError), recompute():
        blocks()(torch.randn(4, 8, 32))
        raise ZeroDivisionError
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert not engine.regions.stack


def test_without_gradients():
    model, x = blocks(), torch.randn(4, 8, 32)
    with recompute(), torch.no_grad():
        assert model(x).grad_fn is None
    with torch.inference_mode(), recompute():
        y = model(x)
    assert y.is_inference()
    model.eval()
    with recompute():
        loss = model(x).square().mean()
    loss.backward()


def test_producer_freed_by_another_loss():
    """The first loss frees the gelu's node; the second still needs its output. Legal in eager."""
    x = torch.randn(16, 32)

    def run(model, on):
        body, first, second = model
        with region(on):
            y = F.gelu(body(x))
            losses = first(y).sum(), second(y).square().sum()
        losses[0].backward()
        return [p.grad for p in body.parameters()] + list(
            torch.autograd.grad(losses[1], list(second.parameters()))
        )

    both(lambda: (torch.manual_seed(0), nn.ModuleList(nn.Linear(32, 32) for _ in range(3)))[1], run)


def test_outputs_of_several_outputs():
    """Statistics that a norm returns beside its output are no output of the rule."""
    x = torch.randn(64, 8, requires_grad=True)
    v = torch.randn(64, 1, requires_grad=True)
    weight = torch.randn(8, requires_grad=True)

    def run(on):
        with region(on):
            y, _, rstd = torch.native_layer_norm(x.repeat(16, 1), (8,), weight, None, 1e-5)
            loss = (rstd * v.repeat(16, 1)).sum() + y.sin().sum()
        return torch.autograd.grad(loss, [x, v, weight])

    assert_same(run(True), run(False))


def test_relu_saves_its_input_inside_a_region_only():
    x = torch.randn(64, 64, requires_grad=True)
    with backends.use("cpu"):
        outside = fused.ReLU()(x * 2)
    assert outside.grad_fn.saved_tensors[0].data_ptr() == outside.data_ptr()

    def run(model, on):
        image = torch.randn(2, 8, 16, 16, generator=torch.Generator().manual_seed(0), requires_grad=True)
        with region(on):
            loss = model(image).square().mean()
        return [*torch.autograd.grad(loss, [image, *model.parameters()])]

    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), fused.ReLU(), nn.Conv2d(8, 8, 3))

    both(make, run)
    model, image = make(), torch.randn(4, 8, 64, 64)
    for on in (False, True):
        with region(on):
            model(image)
    before = allocated()
    with recompute():
        loss = model(image).square().mean()
    unit = 4 * 4 * 8 * 62 * 62
    # The first convolution's output, read by the norm's rule; the second's, which the loss keeps.
    assert allocated() - before < 2.2 * unit
    del loss


def test_verify_compares_always(monkeypatch):
    checked = []
    original = _checks.rebuilds_the_bits
    monkeypatch.setattr(_checks, "rebuilds_the_bits", lambda *a: (checked.append(1), original(*a))[1])
    model, x = blocks(4), torch.randn(4, 8, 32)
    counts = []
    for options in ({}, {}, {}, {}, {}, {"verify": True}):
        before = len(checked)
        with recompute(**options):
            model(x)
        counts.append(len(checked) - before)
    assert counts[0] == counts[-1] == 8, "each place once, and everything where that is asked for"
    assert counts[4] < 8


def test_region_object_survives_copies():
    for again in (copy.deepcopy(recompute()), pickle.loads(pickle.dumps(recompute(verify=True)))):
        with again:
            Block()(torch.randn(4, 32))


def test_our_layers_inside_a_region():
    x = torch.randn(64, 32)

    def make():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(32, 32), fused.LayerNorm(32), fused.GELU(), fused.Dropout(0.2), nn.Linear(32, 32), fused.RMSNorm(32),
            fused.SiLU(), nn.Linear(32, 32),
        )  # fmt: skip

    def run(model, on):
        torch.manual_seed(2)
        with Watched() if on else region(False) as watched:
            loss = ours.softmax(model(x), dropout_p=0.1).square().mean()
        if on:
            assert (
                watched.rebuilt == 5
            )  # the outputs of all seven but the first linear's, which is kept, and gelu's
        return gradients(model, lambda: loss)

    both(make, run)
