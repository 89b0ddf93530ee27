"""The recompute engine over FSDP2 units of three sizes and over DTensors; run `python -m tests._fsdp STORE RANK` twice."""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from tests._engine import Block, Watched, region

dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=int(sys.argv[2]), world_size=2)
mesh = init_device_mesh("cpu", (2,))


def run(units, on):
    torch.manual_seed(0)
    model = nn.Sequential(*[Block() for _ in range(3)], nn.LayerNorm(32), nn.Linear(32, 32))
    for block in list(model)[:3]:
        for unit in {
            "blocks": [block],
            "fine": [block.norm, block.fc1, block.fc2],
            "norms": [block.norm, block],
        }[units]:
            fully_shard(unit, mesh=mesh)
    fully_shard(model, mesh=mesh)
    torch.manual_seed(1 + dist.get_rank())
    x = torch.randn(64, 32)
    with Watched() if on else region(False) as watched:
        loss = model(x).square().mean()
    loss.backward()
    return [p.grad.full_tensor() for p in model.parameters()], watched


for units in ("blocks", "fine", "norms"):
    expected, _ = run(units, False)
    actual, watched = run(units, True)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True)), units
    # gelu is rebuilt in each arrangement; the norm where its parameters are there for the consumer.
    assert watched.rebuilt >= (6 if units == "blocks" else 3), (units, watched.rebuilt, watched.reasons)


def sharded(on, placement):
    """A DTensor model: activations sharded by rows or columns, and one that holds partial sums."""
    torch.manual_seed(0)
    x = distribute_tensor(torch.randn(64, 32), mesh, [placement])
    first, second = (
        distribute_tensor(torch.randn(32, 32), mesh, [Replicate()]).requires_grad_() for _ in range(2)
    )
    with CommDebugMode() as communication:
        with Watched() if on else region(False) as watched:
            h = x @ first  # partial sums where x is sharded by columns
            y = F.silu(F.gelu(h)) * 2.0
            loss = (y @ second).square().sum()
        loss.backward()
    return [first.grad.full_tensor(), second.grad.full_tensor()], communication.get_comm_counts(), watched


for placement in (Shard(0), Shard(1)):
    expected, plain, _ = sharded(False, placement)
    actual, ours, watched = sharded(True, placement)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True)), placement
    assert plain == ours, (placement, plain, ours)
    assert watched.rebuilt >= (2 if placement == Shard(0) else 0), (watched.rebuilt, watched.reasons)
dist.destroy_process_group()
