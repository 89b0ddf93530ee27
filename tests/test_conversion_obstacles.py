"""What convert must leave whatever it computes: patched instances, parametrized, sharded, quantized modules..."""

import pytest
import torch
import torch.nn.functional as F
from _conversion import Gelu3, GemmaNorm, left_alone, randn
from torch import nn

import pyckpt


class SameDropout(nn.Dropout):
    pass


class OtherSoftmax(nn.Softmax):
    def forward(self, x):
        return super().forward(2 * x)


class SigmoidSiLU(nn.GELU):  # a SiLU, but isinstance tells otherwise
    def forward(self, x):
        return x * torch.sigmoid(x)


def test_subclasses_are_left():
    left_alone(Gelu3(), "a subclass of nn.GELU: _conversion.Gelu3 is none of gelu")
    left_alone(SigmoidSiLU(), "computes what pyckpt.nn.SiLU does, yet is a nn.GELU")
    left_alone(SameDropout(), "only nn.Dropout itself is swapped")
    left_alone(OtherSoftmax(-1), "a subclass of nn.Softmax, has a forward of its own")


def test_an_instance_with_its_own_forward_is_left():
    layer = nn.GELU()
    layer.forward = lambda x: x * 2
    left_alone(layer, "set on the instance")
    assert layer(torch.ones(1)).item() == 2


def test_a_class_whose_forward_was_replaced_is_left(monkeypatch):
    monkeypatch.setattr(nn.GELU, "forward", Gelu3.forward)
    left_alone(nn.GELU(), "Gelu3.forward")


def test_parametrized_modules_are_left():
    layer = nn.LayerNorm(4)
    nn.utils.parametrize.register_parametrization(layer, "weight", nn.Softplus())
    left_alone(layer, "parametrized")
    norm = GemmaNorm()
    nn.utils.parametrize.register_parametrization(norm, "weight", nn.Softplus())
    left_alone(norm, "parametrized")


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_weight_norm_by_hook_works_and_is_verified():
    layer = nn.utils.weight_norm(nn.LayerNorm(4), dim=None)
    want = layer(randn(3, 4))
    pyckpt.convert(layer, verify=True)
    assert type(layer) is pyckpt.nn.LayerNorm
    torch.testing.assert_close(layer(randn(3, 4)), want)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*")
def test_torchscript_modules_are_left():
    scripted = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.GELU()))
    pyckpt.convert(scripted)
    report = pyckpt.report(scripted)
    assert not report.swapped and list(report.left) == ["1"]
    assert "TorchScript" in report.left["1"]


def test_quantized_and_prepared_modules_are_left():
    from torch.ao.nn.quantized import LayerNorm as QuantizedLayerNorm

    one = nn.Parameter(torch.ones(4), requires_grad=False)
    left_alone(QuantizedLayerNorm([4], one, one, scale=1.0, zero_point=0), "quantized")
    layer = nn.ReLU()
    layer.qconfig = object()
    left_alone(layer, "qconfig")


def test_uninitialised_modules_are_left():
    layer = nn.LayerNorm(4)
    layer.weight = nn.parameter.UninitializedParameter()
    holder = nn.Sequential(layer)
    pyckpt.convert(holder)
    assert type(layer) is nn.LayerNorm
    assert "not initialised" in pyckpt.report(holder).left["0"]


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")
def test_fully_sharded_modules_are_left_and_revert_refuses_those_sharded_later():
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        early = fully_shard(nn.LayerNorm(4), mesh=mesh)
        late = fully_shard(pyckpt.convert(nn.LayerNorm(4)), mesh=mesh)
        cls = type(early)
        pyckpt.convert(early)
        assert type(early) is cls and isinstance(early, nn.LayerNorm)
        assert "by fully_shard: convert before sharding" in pyckpt.report(early).left[""]
        x = randn(3, 4)
        torch.testing.assert_close(late(x), F.layer_norm(x, (4,)))
        cls = type(late)
        with pytest.warns(UserWarning, match="became a"):
            pyckpt.revert(late)
        assert type(late) is cls
        foreign = fully_shard(GemmaNorm(), mesh=mesh)
        assert "by fully_shard: convert before sharding" in pyckpt.report(foreign).left[""]
        late, original = fully_shard(pyckpt.convert(GemmaNorm()), mesh=mesh), GemmaNorm()
        torch.testing.assert_close(late(randn(3, 12)), original(randn(3, 12)), rtol=1e-5, atol=1e-5)
        inside = fully_shard(nn.Sequential(GemmaNorm(), nn.Linear(12, 4)), mesh=mesh)
        pyckpt.convert(inside, verify=True)  # its parameters are DTensors
        assert type(inside[0]) is pyckpt.nn.ConvertedNorm
        torch.testing.assert_close(
            inside(randn(3, 12)), inside[1](original(randn(3, 12))), rtol=1e-5, atol=1e-5
        )
        inside = fully_shard(nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)), mesh=mesh)
        pyckpt.convert(inside, verify=True)  # its parameters are DTensors
        assert type(inside[0]) is pyckpt.nn.LayerNorm
        torch.testing.assert_close(inside(x), inside[1](F.layer_norm(x, (4,))))
    finally:
        dist.destroy_process_group()
