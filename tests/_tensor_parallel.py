"""Scenarios of _distributed.py: tensor and sequence parallel layers, and DTensors as activations."""

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tests._distributed import (
    DEPTH,
    RANK,
    ROWS,
    WIDTH,
    batch,
    close,
    loss_of,
    make,
    same,
    scenario,
    whole,
)
from tests._engine import Watched, region


def tensor_parallel(model, sequence):
    mesh = init_device_mesh("cpu", (2,))
    for block in list(model)[:DEPTH]:
        plan = {"fc1": ColwiseParallel(), "fc2": RowwiseParallel()}
        if sequence:
            plan = {
                "norm": SequenceParallel(sequence_dim=0),
                "fc1": ColwiseParallel(input_layouts=Shard(0)),
                "fc2": RowwiseParallel(output_layouts=Shard(0)),
            }
        parallelize_module(block, mesh, plan)
    return model


@scenario
def tensor_parallel_blocks():
    """Both ranks see the same rows; with sequence parallel norms each has its own."""
    reference = make(torch.float64)
    loss_of(reference, batch(0, torch.float64)).backward()
    gradients = same(
        lambda: tensor_parallel(make(torch.float64), False), 2 * DEPTH, dtype=torch.float64, rank=0
    )
    close(gradients, [p.grad for p in reference.parameters()])
    same(lambda: tensor_parallel(make(torch.float64), True), DEPTH, dtype=torch.float64)


# DTensors


@scenario
def dtensor_activations():
    """Activations sharded by rows, and by columns, where a product holds partial sums."""

    def build_and_step(on, placement):
        torch.manual_seed(0)
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.randn(ROWS, WIDTH), mesh, [placement])
        first, second = (
            distribute_tensor(torch.randn(WIDTH, WIDTH), mesh, [Replicate()]).requires_grad_()
            for _ in range(2)
        )
        with CommDebugMode() as communication:
            with Watched() if on else region(False) as watched:
                y = F.silu(F.gelu(x @ first)) * 2.0
                loss = (y @ second).square().sum()
            loss.backward()
        gradients = [whole(first.grad), whole(second.grad)]
        return gradients, communication.get_comm_counts(), watched.rebuilt if on else 0

    for placement, least in ((Shard(0), 2), (Shard(1), 0)):
        expected, plain, _ = build_and_step(False, placement)
        actual, ours, rebuilt = build_and_step(True, placement)
        assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True)), placement
        assert plain == ours, (placement, plain, ours)
        assert rebuilt >= least, (placement, rebuilt)


@scenario
def dtensor_that_from_local_made_the_same():
    """With run_check a process' own part is overwritten by the first one's: what made it does not give it again, though it
    did where both were equal."""

    def build_and_step(on, rank):
        mesh = init_device_mesh("cpu", (2,))
        x = batch(rank).requires_grad_()
        weight = distribute_tensor(torch.ones(WIDTH, WIDTH), mesh, [Replicate()]).requires_grad_()
        with region(on):
            y = DTensor.from_local(F.gelu(x), mesh, [Replicate()], run_check=True)
            loss = (y @ weight).square().sum()
        loss.backward()
        return whole(weight.grad)

    for rank in (0, RANK):
        assert torch.equal(build_and_step(False, rank), build_and_step(True, rank)), rank
