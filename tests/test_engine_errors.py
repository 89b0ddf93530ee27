"""What goes wrong in or around the recompute engine says so: changed tensors, misuse."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pyckpt import RecomputeError, engine, recompute
from tests._engine import Watched, blocks, region

pytestmark = pytest.mark.usefixtures("unlearned")


def test_misuse():
    with pytest.raises(ValueError, match="policy must be one of 'pointwise', 'mlp', 'linear', or a function"):
        recompute("everything")
    with pytest.warns(UserWarning, match="nothing in this region could be recomputed"), recompute():
        nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))(torch.randn(64, 64))


def test_kill_switch(monkeypatch):
    monkeypatch.setenv("PYCKPT_DISABLE", "1")
    with pytest.warns(RuntimeWarning, match="PYCKPT_DISABLE"), recompute():
        loss = blocks()(torch.randn(4, 8, 32)).sum()
        assert not engine.regions.stack
    loss.backward()


def outcome(function, on):
    """The results, or the text of the error."""
    torch.manual_seed(0)
    try:
        return [g.clone() for g in function(region(on))]
    except RuntimeError as error:
        return error


def change_of_a_kept_tensor(context):
    weight = torch.randn(32, 32, requires_grad=True)
    with context:
        h = torch.randn(32, 32) @ weight
        y = h.sin()
        h.add_(1)
    return torch.autograd.grad(y.sum(), [weight])


def change_of_a_rebuilt_tensor(context):
    linear = nn.Linear(32, 32)
    with context:
        y = F.gelu(torch.randn(16, 32, requires_grad=True) * 2)
        z = linear(y)
        y.add_(2)
    return torch.autograd.grad(z.sum(), list(linear.parameters()))


def change_of_a_view_of_a_rebuilt_tensor(context):
    linear = nn.Linear(32, 32)
    with context:
        y = F.gelu(torch.randn(16, 32, requires_grad=True) * 2)
        z = linear(y)
        y[0].zero_()
    return torch.autograd.grad(z.sum(), list(linear.parameters()))


def change_of_a_parameter(context):
    norm, linear = nn.LayerNorm(32), nn.Linear(32, 32)
    with context:
        out = linear(norm(torch.randn(16, 32))).square().sum()
    with torch.no_grad():
        norm.weight.mul_(3)
    return torch.autograd.grad(out, [norm.weight, linear.weight])


def change_of_what_a_product_reads_as_rows(context):
    """Of three dimensions: the linear layer saves a view, which is gone at once."""
    linear = nn.Linear(32, 32)
    with context:
        y = F.gelu(torch.randn(2, 16, 32, requires_grad=True) * 2)
        z = linear(y)
        y.add_(2)
    return torch.autograd.grad(z.sum(), [linear.weight])


@pytest.mark.parametrize(
    "function",
    [
        change_of_a_kept_tensor,
        change_of_a_rebuilt_tensor,
        change_of_a_view_of_a_rebuilt_tensor,
        change_of_a_parameter,
    ],
)
def test_what_eager_refuses_is_refused_with_its_words(function):
    eager, ours = outcome(function, False), outcome(function, True)
    assert isinstance(eager, RuntimeError) and isinstance(ours, RuntimeError)
    if not isinstance(ours, RecomputeError):
        assert str(ours).partition("Hint")[0] == str(eager).partition("Hint")[0]


def test_change_of_what_was_saved_as_a_view_is_refused():
    """PyTorch's words, which name the view; here it is gone."""
    eager, ours = (outcome(change_of_what_a_product_reads_as_rows, on) for on in (False, True))
    assert isinstance(eager, RuntimeError) and isinstance(ours, RuntimeError)
    assert str(ours).partition("[")[0] == str(eager).partition("[")[0]


def changed_input(context):
    first, second = (torch.randn(32, 32, requires_grad=True) for _ in range(2))
    with context:
        h = torch.randn(16, 32) @ first
        y = F.gelu(h)
        z = y @ second
        h.mul_(0.5)
    return torch.autograd.grad(z.sum(), [second])


def changed_norm_weight(context):
    norm, linear = nn.LayerNorm(32), nn.Linear(32, 32)
    with context:
        out = linear(norm(torch.randn(16, 32))).square().sum()
    with torch.no_grad():
        norm.weight.mul_(3)
    return torch.autograd.grad(out, [linear.weight])


def changed_weight_of_a_cast(context):
    linear = nn.Linear(32, 32)
    x = torch.randn(16, 32, requires_grad=True)
    with context, torch.autocast("cpu", torch.bfloat16):
        out = linear(x).float().sum()
    with torch.no_grad():
        linear.weight.mul_(2)
    return torch.autograd.grad(out, [x])


@pytest.mark.parametrize("function", [changed_input, changed_norm_weight, changed_weight_of_a_cast])
def test_what_eager_allows_and_a_recipe_cannot_is_refused_loudly(function):
    assert isinstance(outcome(function, False), list)
    with pytest.raises(RecomputeError, match=r"was changed in place after .* had read it.*recompute=False"):
        raise outcome(function, True)


def test_change_through_data_goes_unseen_as_in_eager():
    """.data counts no version. The rebuilt tensor is the one that the forward used."""

    def function(context):
        linear = nn.Linear(32, 32)
        with context:
            y = F.gelu(torch.randn(16, 32, requires_grad=True) * 2)
            kept = y.detach().clone()
            z = linear(y)
            y.data.mul_(2)
        (g,) = torch.autograd.grad(z.sum(), [linear.weight])
        return g, kept

    gradient, kept = outcome(function, True)
    assert torch.equal(gradient, torch.ones(16, 32).t() @ kept)


def test_freed_parameter_is_not_read():
    """As FSDP's resharding leaves it: a storage of no bytes. Reading it would be a segmentation fault."""
    norm, linear = nn.LayerNorm(32), nn.Linear(32, 32)
    x = torch.randn(16, 32)
    with Watched():
        out = linear(norm(x)).square().sum()
    storage = norm.weight.untyped_storage()
    size = storage.nbytes()
    storage.resize_(0)
    with pytest.raises(
        RecomputeError, match=r"storage of a parameter of shape \(32,\), float32 that it reads has been freed"
    ):
        torch.autograd.grad(out, linear.weight)
    storage.resize_(size)


def test_parameter_freed_before_a_consumer_saves():
    table, linear = nn.Embedding(40, 32), nn.Linear(32, 32)
    with Watched() as watched:
        y = table(torch.arange(40))
        storage = table.weight.untyped_storage()
        size = storage.nbytes()
        storage.resize_(0)
        loss = linear(y).sum()
    assert any("storage is freed" in reason for reason in watched.reasons)
    storage.resize_(size)
    torch.autograd.grad(loss, linear.weight)
