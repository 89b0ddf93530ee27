"""Plans under autocast, whose 16-bit copies of weights autograd keeps, or autocast alone until the forward ends."""

import pytest
import torch
from torch import nn

import pyckpt
from pyckpt import memory
from pyckpt.checkpointing import BudgetError
from tests.test_plan import Model, clock, pairs  # noqa: F401  # a fixture

pytestmark = pytest.mark.usefixtures("one_thread", "clock", "counted")

# Wide against the batch: the copies are most of what a step takes.
WIDTH, ROWS = 128, 8


def loss_of(y):
    return y.float().square().mean()


def autocast():
    return torch.autocast("cpu", torch.bfloat16)


def measured(model, forward):
    """Bytes kept and the peak of a step, where gradients stand already."""
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    return memory.saved_bytes(forward), memory.peak_bytes(lambda: forward().backward())


def check(model, forward, make, copies):
    """Predictions of each choice against what is measured, if autograd keeps `copies` of weights where nothing is rebuilt."""
    for choice in ("none", "pointwise", "linear", "checkpoint"):
        plan = make(budget="1GiB", choices=[choice], rounds=1)
        assert {c for _, c in plan.steps} == {choice}
        plan.apply(model)
        saved, peak = measured(model, forward)
        plan.revert()
        assert plan.predicted.saved == pytest.approx(saved, rel=0.05, abs=32 << 10)
        assert plan.predicted.peak == pytest.approx(peak, rel=0.05)
        assert (saved > copies) is (choice == "none") and peak > copies


class Inside(nn.Module):
    """Begins autocast itself, as accelerate has models do."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        with autocast():
            return self.model(x)


@pytest.mark.parametrize("where", ["around", "inside"])
def test_copies_of_the_blocks_weights(where):
    torch.manual_seed(0)
    model, x = nn.Sequential(*(mlp() for _ in range(6))), torch.randn(ROWS, WIDTH)
    copies = 2 * sum(p.numel() for p in model.parameters() if p.dim() == 2)
    if where == "inside":
        model = Inside(model)

    def forward():
        with autocast():
            return loss_of(model(x))

    def make(**kwargs):
        if where == "inside":
            return pyckpt.plan(model, x, loss=loss_of, **kwargs)
        with autocast():
            return pyckpt.plan(model, x, loss=loss_of, **kwargs)

    # The first layer of all keeps none, as it is asked for no gradient of its input.
    check(model, forward, make, copies * 11 / 12)


def mlp():
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


def test_copies_of_the_rest():
    """A head that is larger than the blocks."""
    torch.manual_seed(0)
    model, ids = Model(depth=3, width=64), torch.randint(50, (1, ROWS))
    model.head = nn.Linear(64, 20_000)

    def forward():
        with autocast():
            return loss_of(model(ids))

    def make(**kwargs):
        with autocast():
            return pyckpt.plan(model, ids, loss=loss_of, **kwargs)

    plan = make(budget="1GiB", choices=["none"], rounds=1)
    saved, peak = measured(model, forward)
    assert saved > 2 * model.head.weight.numel()
    assert plan.predicted.saved == pytest.approx(saved, rel=0.05)
    assert plan.predicted.peak == pytest.approx(peak, rel=0.05)


def test_budgets_count_what_autocast_holds():
    torch.manual_seed(0)
    model = nn.Sequential(*(mlp() for _ in range(6)))
    x = torch.randn(ROWS * 4, WIDTH, requires_grad=True)

    def forward():
        with autocast():
            return loss_of(model(x))

    choices = ["none", "pointwise", "checkpoint", "segment"]

    def make(budget):
        with autocast():
            return pyckpt.plan(model, x, budget=budget, choices=choices, loss=loss_of, rounds=1)

    with pytest.raises(BudgetError) as caught:
        make(1000)
    smallest, eager = caught.value.smallest, make(1.0).eager.peak
    for budget in (smallest, (smallest + eager) // 2, eager):
        plan = make(int(1.01 * budget))
        plan.apply(model)
        _, peak = measured(model, forward)
        plan.revert()
        assert peak <= 1.02 * plan.budget
        assert plan.predicted.peak == pytest.approx(peak, rel=0.12)
        assert max(plan.curve) == plan.predicted.peak


def test_frozen_blocks_keep_nothing(recwarn):
    """Nor do they warn of it, as a checkpoint does of what needs no gradient."""
    model, x = nn.Sequential(*(mlp() for _ in range(4))), torch.randn(64, WIDTH)
    model[:2].requires_grad_(False)
    plan = pyckpt.plan(model, x, budget=1.0, choices=["none", "checkpoint"], loss=loss_of, rounds=1)
    saved, peak = measured(model, lambda: loss_of(model(x)))
    assert plan.eager.saved == pytest.approx(saved, rel=0.05)
    assert plan.eager.peak == pytest.approx(peak, rel=0.05)
    assert not recwarn


def test_the_callers_context_is_left_as_it_was():
    model, x = pairs(3), torch.randn(64, 32, requires_grad=True)
    weight = torch.randn(32, 32, requires_grad=True)
    with autocast():
        pyckpt.plan(model, x, budget=1.0, choices=["none"], rounds=1)
        assert torch.is_autocast_enabled("cpu")
        assert (x @ weight).dtype is torch.bfloat16
        with pytest.raises(ValueError, match="budget must be"):
            pyckpt.plan(model, x, budget=0)
    assert not torch.is_autocast_enabled("cpu") and torch.autocast_increment_nesting() == 1
    torch.autocast_decrement_nesting()
