"""convert(verify=True) and report."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from _conversion import (
    FUSED,
    SWAPPED_IN_BLOCK,
    Block,
    Gelu3,
    TanhOrScaled,
    fused_paths,
    mixed_model,
    state_of,
)
from torch import nn

import pyckpt
from pyckpt.conversion import ConversionError

# ---- verify ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_verify_passes_and_leaves_no_trace(dtype):
    model = mixed_model().to(dtype).train()
    model[0].drop.p = 0.5
    model[0].act.register_forward_hook(lambda *args: pytest.fail("a hook ran"))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.manual_seed(0)
    rng, before = torch.get_rng_state(), state_of(model)
    pyckpt.convert(model, verify=True)
    assert state_of(model)[-3:] == before[-3:] and fused_paths(model[0]) == SWAPPED_IN_BLOCK
    assert torch.equal(torch.get_rng_state(), rng)
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters())
    assert all(m.training for m in model.modules())


def wrong_gelu(self, x):
    return F.gelu(x, approximate="tanh" if self.approximate == "none" else "none")


def wrong_eps(self, x):
    return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, 1e-5)


def wrong_gradient(self, x):
    return F.silu(x).detach() + 0 * x


def wrong_dtype(self, x):
    return F.relu(x).double()


def not_a_number(self, x):
    return F.softmax(x, self.dim) * math.nan


def wrong_in_half(self, x):
    return F.gelu(x, approximate=self.approximate) * (1 if x.dtype == torch.float64 else 1.1)


def fails(self, x):
    raise NotImplementedError("no kernel")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "forward", "path"),
    [
        ("GELU", wrong_gelu, "0.act"),
        ("GELU", wrong_in_half, "0.act"),
        ("LayerNorm", wrong_eps, "0.norm2"),
        ("SiLU", wrong_gradient, "0.silu"),
        ("ReLU", wrong_dtype, "0.relu"),
        ("Softmax", not_a_number, "0.softmax"),
        ("RMSNorm", fails, "0.rms"),
    ],
)
def test_verify_names_the_module_and_changes_nothing(monkeypatch, name, forward, path, dtype):
    model = mixed_model().to(dtype)
    before, types = state_of(model), [type(m) for m in model.modules()]
    monkeypatch.setattr(FUSED[name], "forward", forward)
    with pytest.raises(ConversionError, match=rf"{path} \(nn.{name} -> pyckpt.nn.{name}\)") as caught:
        pyckpt.convert(model, verify=True)
    assert isinstance(caught.value, RuntimeError) and "unchanged" in str(caught.value)
    assert [type(m) for m in model.modules()] == types and state_of(model) == before
    pyckpt.convert(model)
    assert type(model.get_submodule(path)) is FUSED[name]


def test_verify_runs_with_the_weights_of_the_model(monkeypatch):
    def wrong_for_large_weights(self, x):
        return F.layer_norm(x, self.normalized_shape, self.weight.clamp(max=100.0), self.bias, self.eps)

    monkeypatch.setattr(FUSED["LayerNorm"], "forward", wrong_for_large_weights)
    layer = pyckpt.convert(nn.LayerNorm(5), verify=True)
    pyckpt.revert(layer)
    nn.init.constant_(layer.weight, 500.0)
    with pytest.raises(ConversionError, match=r"\(the model itself\)"):
        pyckpt.convert(layer, verify=True)


# ---- report ------------------------------------------------------------------------------------------------


class HoldsFunction(nn.Module):
    def __init__(self):
        super().__init__()
        self.child, self.function = nn.Linear(3, 3), F.gelu


def test_report_tells_the_present_state():
    model = nn.ModuleDict(
        {
            "blocks": nn.ModuleList(Block() for _ in range(3)),
            "layer": nn.TransformerEncoderLayer(8, 2, activation=F.gelu),
            "own": pyckpt.nn.GELU(),
            "odd": Gelu3(),
            "holds": HoldsFunction(),
            "batch": nn.BatchNorm1d(3),
            "embed": nn.Embedding(3, 3),
            "identity": nn.Identity(),
        }
    )
    before = pyckpt.report(model)
    assert before.swapped == {} and before.native == {"own": "pyckpt.nn.GELU"}
    assert before.left["blocks.1.act"] == "not converted: nn.GELU would become pyckpt.nn.GELU"
    after = pyckpt.report(pyckpt.convert(model))
    assert {path[9:] for path in after.swapped if path.startswith("blocks.0.")} == SWAPPED_IN_BLOCK
    assert after.swapped["blocks.2.act"] == "nn.GELU -> pyckpt.nn.GELU"
    assert set(after.swapped) == fused_paths(model) - {"own"} | {"layer.activation", "layer.self_attn"}
    assert after.swapped["layer.activation"] == "torch.nn.functional.gelu -> pyckpt.functional.gelu"
    assert set(after.left) == {*(f"blocks.{i}.tanh" for i in range(3)), "odd", "batch", "holds.function"}
    assert after.left["batch"] == "no fused counterpart of nn.BatchNorm1d"
    assert "torch.nn.functional.gelu: a function" in after.left["holds.function"]
    assert after.native == before.native
    assert set(before.left) == set(after.left) | set(after.swapped)

    assert json.loads(json.dumps(after.to_dict())) == after.to_dict()
    counts = {"swapped": len(after.swapped), "left": 6, "native": 1}
    parts = {"swapped": after.swapped, "left": after.left, "native": after.native}
    assert after.to_dict() == {**parts, "counts": counts, "recompute": True}
    lines = str(after).splitlines()
    assert f"{len(after.swapped)} swapped" in lines[0] and "6 left" in lines[0]
    (row,) = [line for line in lines if "blocks.*.act" in line]
    assert row.split() == ["blocks.*.act", "3", "nn.GELU", "->", "pyckpt.nn.GELU"]
    (other,) = [line for line in lines if "BatchNorm" in line]
    assert row.index("nn.GELU") == other.index("no fused"), "not aligned"
    assert str(pyckpt.report(nn.Linear(2, 2))).startswith("pyckpt: 0 swapped")


def test_report_of_foreign_classes_names_both_sides():
    report = pyckpt.report(pyckpt.convert(TanhOrScaled(1.0)))
    assert report.swapped == {"": "_conversion.TanhOrScaled -> pyckpt.nn.GELU(approximate='tanh')"}
    assert "(the model itself)" in str(report)
