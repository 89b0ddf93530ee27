"""Rules are not trusted: what users register, and what the engine does with one that is wrong."""

import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pyckpt import RecomputeError, engine, recompute, register_rule
from pyckpt.memory import no_collection
from tests._engine import Watched, assert_same, blocks, gradients, region

pytestmark = pytest.mark.usefixtures("unlearned")


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x.tanh() * factor, x.sin()

    @staticmethod
    def backward(ctx, first, second):
        (x,) = ctx.saved_tensors
        return first * ctx.factor * (1 - x.tanh() ** 2) + second * x.cos(), None


def use(rebuild=None, x=None):
    x = torch.randn(64, 64, requires_grad=True) if x is None else x
    weight = torch.randn(64, 64, requires_grad=True, generator=torch.Generator().manual_seed(0))
    with Watched() as watched:
        a, b = Twice.apply(x * 2, 3.0)
        loss = (a @ weight).sum() + (b @ weight).sum()
    return torch.autograd.grad(loss, [x, weight]), watched


@pytest.fixture
def no_rules(monkeypatch):
    monkeypatch.setattr("pyckpt.rules._FUNCTIONS", dict(engine.rule_of.__globals__["_FUNCTIONS"]))


def test_rules_of_users(no_rules):
    torch.manual_seed(0)
    x = torch.randn(64, 64, requires_grad=True)
    expected, watched = use(x=x)
    assert any("no rule for TwiceBackward" in reason for reason in watched.reasons)

    @register_rule(Twice)
    def rebuild(ctx, x):
        return x.tanh() * ctx.factor, x.sin()

    actual, watched = use(x=x)
    assert_same(actual, expected)
    assert watched.rebuilt == 3
    with pytest.raises(TypeError, match=r"subclass of torch\.autograd\.Function"):
        register_rule(F.gelu)


@pytest.mark.parametrize(
    ("rebuild", "message"),
    [
        (lambda ctx, x: (x[0], x), r"returned \(64,\), torch.float32 where the forward made \(64, 64\)"),
        (lambda ctx, x: (x.double(), x), "returned .*torch.float64"),
        (lambda ctx, x: (None, None), "returned NoneType"),
        (lambda ctx, x: (x.tanh(), x.sin()), "does not give the bits"),
        (lambda ctx, x: 1 / 0, "raised ZeroDivisionError"),
    ],
)
def test_wrong_rules_of_users_are_named(no_rules, rebuild, message):
    register_rule(Twice)(rebuild)

    class Holder(nn.Module):
        def forward(self, x):
            return use(x=x)

    model = nn.ModuleDict({"middle": Holder()})
    model.forward = None

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model["middle"]

        def forward(self, x):
            return self.inner(x)

    with pytest.raises(RecomputeError, match=message) as error:
        Outer()(torch.randn(64, 64, requires_grad=True))
    assert "TwiceBackward in Holder (inner)" in str(error.value)


class Scaled(torch.autograd.Function):
    """Reads its factor, and does not save it."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(x)
        return x * factor

    @staticmethod
    def backward(ctx, grad):
        return grad, None


@pytest.mark.parametrize(
    ("rebuild", "message"),
    [(lambda ctx, x, f: None, "returned NoneType"), (lambda ctx, x, f: 1 / 0, "raised ZeroDivisionError")],
)
def test_wrong_rules_that_read_leaves_are_named(no_rules, rebuild, message):
    """At the first use, though what such a rule reads may have changed."""
    register_rule(Scaled, inputs=(1,))(rebuild)
    factor = nn.init.ones_(torch.empty(64, 64)).requires_grad_()
    with pytest.raises(RecomputeError, match=f"rule of ScaledBackward .*{message}"), recompute():
        nn.Linear(64, 64)(Scaled.apply(torch.randn(64, 64, requires_grad=True) * 2, factor))


class Sigmoid(torch.autograd.Function):
    """Saves its output, beside its input."""

    @staticmethod
    def forward(ctx, x):
        y = x.sigmoid()
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx, grad):
        _, y = ctx.saved_tensors
        return grad * y * (1 - y)


def test_rule_of_a_function_that_saves_its_output(no_rules):
    """The Function keeps that itself; and a dropped graph is freed at once."""
    register_rule(Sigmoid)(lambda ctx, *saved: saved[0].sigmoid())
    x, weight = (torch.randn(32, 32, requires_grad=True) for _ in range(2))

    def run(on):
        with region(on):
            y = Sigmoid.apply(x * 2)
            return y.grad_fn, (y @ weight).sum()

    expected = torch.autograd.grad(run(False)[1], [x, weight])
    node, loss = run(True)
    assert_same(torch.autograd.grad(loss, [x, weight]), expected)
    del node
    with no_collection():
        node = weakref.ref(run(True)[0])
        assert node() is None


class Shifted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, shift):
        ctx.save_for_backward(x)
        return x.sin() + shift

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * x.cos(), grad.sum(0)


@pytest.mark.parametrize("misleading", ["zeros", "no elements"])
def test_rules_are_checked_again(no_rules, misleading):
    """A rule that forgets a bias is right while that is zero, and of nothing any rule is."""
    register_rule(Shifted)(lambda ctx, x: x.sin())
    shift, weight = torch.zeros(32, requires_grad=True), torch.randn(32, 32, requires_grad=True)

    def step(rows=16):
        with recompute():
            return (Shifted.apply(torch.randn(rows, 32), shift) @ weight).sum()

    if misleading == "zeros":
        step()
    else:
        for _ in range(9):
            step(0)
    with torch.no_grad():
        shift.add_(1)
    with pytest.raises(RecomputeError, match="does not give the bits"):
        step()


def test_no_memory_for_a_check_says_nothing_of_a_rule(monkeypatch):
    x, linear = torch.randn(32, 32, requires_grad=True), nn.Linear(32, 32)
    with monkeypatch.context() as scarce:

        def none(source):
            raise torch.OutOfMemoryError("none left")

        scarce.setattr("pyckpt._checks._rebuilt", none)
        with pytest.raises(torch.OutOfMemoryError), recompute():
            linear(F.gelu(x * 2))
    with Watched() as watched:
        linear(F.gelu(x * 2))
    assert watched.rebuilt


def test_rule_that_cannot_read_its_node(monkeypatch):
    """Whatever it stumbles on: the output is kept, with one warning."""
    from pyckpt import rules

    def capture(node, output, edge):
        raise TypeError("'NoneType' object is not iterable")

    monkeypatch.setitem(rules.RULES, "GeluBackward0", rules.Rule("GeluBackward0", capture, lambda *_: 1))
    x, linear = torch.randn(32, 32, requires_grad=True), nn.Linear(32, 32)
    with pytest.warns(UserWarning, match="rule of GeluBackward0 does not fit"), Watched() as watched:
        linear(F.gelu(x * 2)).sum().backward()
    assert any("does not fit" in reason for reason in watched.reasons)


def test_wrong_built_in_rule_is_switched_off(monkeypatch):
    from pyckpt import rules

    rule = rules.RULES["GeluBackward0"]
    wrong = rules.Rule(
        rule.name, lambda n, o, e: (lambda x: F.gelu(x) * 1.0001, rule.capture(n, o, e)[1]), rule.flops
    )
    monkeypatch.setitem(rules.RULES, "GeluBackward0", wrong)
    model, x = blocks(), torch.randn(4, 8, 32)
    expected = gradients(model, lambda: model(x).square().mean())
    with (
        pytest.warns(UserWarning, match="GeluBackward0.*does not give the bits") as caught,
        Watched() as watched,
    ):
        loss = model(x).square().mean()
    assert len(caught) == 1
    assert_same(gradients(model, lambda: loss), expected)
    assert any("same bits" in reason for reason in watched.reasons)
