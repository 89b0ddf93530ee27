"""What autograd does not tell: changes behind its back, layouts, roundings; and tensors that are no dense ones."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy

import pyckpt
from pyckpt import recompute
from tests._engine import assert_same, gradients, region

pytestmark = pytest.mark.usefixtures("unlearned")


def through_data(h):
    h.data.clamp_(max=0.1)


def through_detach(h):
    h.detach().clamp_(max=0.1)


def through_numpy(h):
    h.detach().numpy().clip(None, 0.1, out=h.detach().numpy())


class Patched(nn.Module):
    """A layer whose activation may be changed behind autograd's back."""

    def __init__(self, change=None):
        super().__init__()
        self.first, self.act, self.second, self.change = (
            nn.Linear(32, 64),
            nn.GELU(),
            nn.Linear(64, 32),
            change,
        )

    def forward(self, x):
        h = self.act(self.first(x))
        if self.change:
            self.change(h)
        return x + self.second(h)


@pytest.mark.filterwarnings("ignore:pyckpt.recompute")
@pytest.mark.parametrize("layer", range(5))
@pytest.mark.parametrize("change", [through_data, through_detach, through_numpy])
def test_a_change_in_one_layer_is_seen_in_the_first_step(change, layer):
    model = nn.Sequential(*[Patched(change if i == layer else None) for i in range(5)])
    x = torch.randn(16, 32)
    pyckpt.convert(model, recompute=False)
    expected = gradients(model, lambda: model(x).square().mean())
    pyckpt.convert(model)
    for _ in range(5):
        assert_same(gradients(model, lambda: model(x).square().mean()), expected)


def test_a_change_on_the_way_in_some_steps_is_seen_by_verify():
    x, bias, linear = torch.randn(64, 32), torch.zeros(32, requires_grad=True), nn.Linear(32, 32)

    def loss(change):
        y = x + bias
        if change:
            with torch.no_grad():
                y.clamp_(-0.1, 0.1)
        return linear(y * 2).square().sum()

    expected = gradients(linear, lambda: loss(True))
    for _ in range(6):
        with recompute():
            loss(False)
    with recompute(verify=True):
        changed = loss(True)
    assert_same(gradients(linear, lambda: changed), expected)


@pytest.mark.filterwarnings("ignore:pyckpt.recompute")
def test_sums_of_copies_in_any_layout():
    x, scale = torch.randn(64, 300, 33, requires_grad=True), torch.randn(33, requires_grad=True)
    linear = nn.Linear(33, 33)
    copies = {
        "as it is": lambda y: y.clone(),
        "contiguous": lambda y: y.permute(1, 0, 2).contiguous(),
        "permuted": lambda y: y.permute(1, 0, 2).clone(),
        "transposed": lambda y: y.transpose(0, 2).contiguous().transpose(0, 2),
    }

    def loss(copy):
        return linear(copies[copy](x * scale).sum(0)).square().sum() if copy else linear(scale).sum()

    for copy in (*["as it is"] * 3, *copies, *copies):
        with recompute():
            ours = loss(copy)
        assert_same(
            gradients(linear, lambda ours=ours: ours), gradients(linear, lambda copy=copy: loss(copy))
        )


@pytest.mark.parametrize("width", [8, 48, 768])
@pytest.mark.parametrize("norm", ["layer", "group"])
def test_norms_that_round_to_16_bits(norm, width):
    """torch's kernels sum in another order than the formula from what they keep: in few steps of many a bit differs."""
    torch.manual_seed(0)
    middle = nn.LayerNorm(width) if norm == "layer" else nn.GroupNorm(2, width)
    model = nn.Sequential(nn.Linear(width, width), middle, nn.Linear(width, width))

    def loss(x, on):
        with region(on), torch.autocast("cpu", torch.bfloat16):
            return model(x).square().mean()

    for _ in range(100):
        x = torch.randn(1536 // width, width)
        assert_same(*(gradients(model, lambda x=x, on=on: loss(x, on)) for on in (True, False)))


POLICIES = {name: name for name in ("pointwise", "mlp", "linear")}
POLICIES["all"] = lambda *_: CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support", "ignore:pyckpt.recompute")
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("layout", ["to_sparse", "to_sparse_csr"])
def test_sparse_operands(layout, policy):
    adjacency = getattr((torch.rand(32, 32) < 0.2).float(), layout)()
    h, weight = (torch.randn(32, 32, requires_grad=True) for _ in range(2))
    results = []
    for on in (True, True, False):
        with region(on, policy=policy):
            loss = F.gelu(adjacency @ (h @ weight)).square().sum()
        results.append(torch.autograd.grad(loss, (h, weight)))
    assert_same(results[0], results[2])
    assert_same(results[1], results[2])


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_a_sparse_leaf(policy):
    weight = torch.randn(32, 32)
    results = []
    for on in (True, False):
        leaf = torch.eye(32).to_sparse().requires_grad_()
        with region(on, policy=policy):
            loss = F.gelu(torch.sparse.mm(leaf, weight)).sum()
        loss.backward()
        results.append([leaf.grad.to_dense()])
    assert_same(*results)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:pyckpt.recompute")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
@pytest.mark.parametrize(
    "below", [contextlib.nullcontext, torch.autograd.graph.save_on_cpu], ids=["alone", "save_on_cpu"]
)
def test_nested_tensors(below, layout):
    leaf = torch.randn(50, 32, requires_grad=True)
    results = []
    for on in (True, False):
        with below(), region(on):
            nested = torch.nested.as_nested_tensor([leaf, torch.randn(90, 32)], layout=layout)
            loss = torch.nested.to_padded_tensor(F.gelu(nested), 0.0).sum()
        results.append(torch.autograd.grad(loss, leaf))
    assert_same(*results)


def not_a_policy(x):
    return x


@pytest.mark.parametrize(
    "policy",
    ["foo", None, 3, nn.Linear(2, 2), not_a_policy],
    ids=["text", "none", "number", "module", "function"],
)
def test_what_is_no_policy(policy):
    """As a decorator without parentheses, or a model."""
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    for use in (
        lambda: recompute(policy),
        lambda: pyckpt.explain(model, x, policy=policy),
        lambda: pyckpt.convert(model, recompute=policy) if policy is not None else recompute(policy),
    ):
        with pytest.raises(ValueError, match=r"policy must be one of|recompute must be"):
            use()
