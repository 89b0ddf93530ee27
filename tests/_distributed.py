"""Data and tensor parallel training on two processes, with and without the recompute engine.

`python -m tests._distributed STORE RANK` runs every scenario and writes one JSON object a line: its name, and what failed.
Each takes the same step twice, plainly and with the engine; gradients must have the same bits, and the engine must neither
add a collective nor hold a parameter that its unit has given back.
"""

import contextlib
import copy
import json
import os
import sys
import traceback
from collections import Counter

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel

import pyckpt
from tests._engine import Block, Watched, region

RANK = int(sys.argv[2]) if len(sys.argv) > 2 else 0
ROWS, WIDTH, DEPTH = 64, 32, 3
SCENARIOS = {}


def scenario(function):
    SCENARIOS[function.__name__] = function
    return function


def make(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(
        *[Block(WIDTH) for _ in range(DEPTH)], nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
    ).to(dtype)


def batch(rank=RANK, dtype=torch.float32, number=0):
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(10 * number + rank), dtype=dtype)


def loss_of(model, x):
    return model(x).square().mean()


def whole(gradient):
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


def gradients_of(model):
    if not isinstance(model, FullyShardedDataParallel):
        return [whole(p.grad) for p in model.parameters()]
    with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
        return [p.grad.clone() for p in model.parameters()]


def step(model, on, batches=1, before=None, after_forward=None, dtype=torch.float32, rank=RANK):
    """Gradients after `batches` forwards and backwards, the number of tensors rebuilt, and the collectives by name.

    `before(i, last)` is a context for batch i."""
    rebuilt, collectives = 0, Counter()
    for i in range(batches):
        with (
            CommDebugMode() as communication,
            before(i, i == batches - 1) if before else contextlib.nullcontext(),
        ):
            with Watched() if on else region(False) as watched:
                loss = loss_of(model, batch(rank, dtype, i))
            if after_forward:
                after_forward()
            loss.backward()
        rebuilt += watched.rebuilt if on else 0
        collectives.update({str(k): v for k, v in communication.get_comm_counts().items()})
    return gradients_of(model), rebuilt, collectives


def same(build, least=1, **kwargs):
    """Builds and steps twice, with the engine off and on."""
    expected, _, plain = step(build(), False, **kwargs)
    actual, rebuilt, ours = step(build(), True, **kwargs)
    assert len(actual) == len(expected) > 0
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True)), "other gradients"
    assert plain == ours, f"collectives {dict(plain)} became {dict(ours)}"
    assert rebuilt >= least, f"{rebuilt} rebuilt"
    return actual


def alone(batches=1, convert=False, dtype=torch.float64):
    """The gradients that one process gets from both processes' rows."""
    model = make(dtype)
    model = pyckpt.convert(model) if convert else model
    for i in range(batches):
        (sum(loss_of(model, batch(rank, dtype, i)) for rank in range(2)) / 2).backward()
    return [p.grad for p in model.parameters()]


def close(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


# DistributedDataParallel


@scenario
def ddp():
    for options in (
        {},
        {"gradient_as_bucket_view": True},
        {"static_graph": True},
        {"find_unused_parameters": True},
    ):
        close(
            same(lambda o=options: DistributedDataParallel(make(torch.float64), **o), dtype=torch.float64),
            alone(),
        )


@scenario
def ddp_accumulates_without_sync():
    def build():
        model = DistributedDataParallel(make(torch.float64))
        build.context = lambda i, last: contextlib.nullcontext() if last else model.no_sync()
        return model

    gradients = same(build, batches=3, before=lambda i, last: build.context(i, last), dtype=torch.float64)
    close(gradients, alone(batches=3))


@scenario
def ddp_of_a_converted_model():
    """Conversion on either side of the wrapper, the engine on the model's own forward."""
    results = []
    for outside in (False, True):
        for engine in (False, True):
            model = make(torch.float64)
            model = model if outside else pyckpt.convert(model, recompute=engine)
            model = DistributedDataParallel(model)
            model = pyckpt.convert(model, recompute=engine) if outside else model
            loss_of(model, batch(dtype=torch.float64)).backward()
            results.append([p.grad for p in model.parameters()])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
    close(results[0], alone(convert=True))


# FSDP2

UNITS = {
    "blocks": lambda block: [block],
    "linears": lambda block: [block.norm, block.fc1, block.fc2],
    "norms": lambda block: [block.norm, block],
}


def shard(model, units="blocks", **options):
    mesh = init_device_mesh("cpu", (2,))
    for block in model:
        for unit in UNITS[units](block) if isinstance(block, Block) else ():
            fully_shard(unit, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def held(model):
    """Parameters whose unit has given them back and which still have memory."""
    found = []
    for module in model.modules():
        group = module._get_fsdp_state()._fsdp_param_group if hasattr(module, "_get_fsdp_state") else None
        for p in group.fsdp_params if group and group.is_sharded else ():
            unsharded = getattr(p, "_unsharded_param", None)
            if unsharded is not None and unsharded.untyped_storage().nbytes():
                found.append(tuple(unsharded.shape))
    return found


@scenario
def fsdp2_units():
    for units in UNITS:
        for reshard in (True, False):
            build = lambda u=units, r=reshard: shard(make(torch.float64), u, reshard_after_forward=r)  # noqa: E731
            # gelu is rebuilt in each arrangement; the norm where its parameters are there for the consumer.
            close(same(build, 2 * DEPTH if units == "blocks" else DEPTH, dtype=torch.float64), alone())


@scenario
def fsdp2_parameters_are_given_back():
    for units in UNITS:
        counts = []
        for on in (False, True):
            model = shard(make(), units, reshard_after_forward=True)
            found = []
            step(model, on, after_forward=lambda model=model, found=found: found.extend(held(model)))
            counts.append(found)
        assert counts[0] == counts[1] == [], counts


@scenario
def fsdp2_accumulates():
    def build():
        model = shard(make(torch.float64))

        @contextlib.contextmanager
        def before(i, last):
            model.set_requires_gradient_sync(last)
            yield

        build.before = before
        return model

    close(
        same(build, batches=3, before=lambda i, last: build.before(i, last), dtype=torch.float64),
        alone(batches=3),
    )


@scenario
def fsdp2_mixed_precision():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for units in UNITS:
        same(lambda u=units: shard(make(), u, mp_policy=policy), DEPTH)


@scenario
def fsdp2_wrapped_before_and_after_conversion():
    for units in UNITS:
        for sharded_first in (False, True):  # units of one norm are left alone then
            results = []
            for engine in (False, True):
                model = make(torch.float64)
                model = shard(model, units) if sharded_first else model
                model = pyckpt.convert(model, recompute=engine)
                model = model if sharded_first else shard(model, units)
                loss_of(model, batch(dtype=torch.float64)).backward()
                results.append(gradients_of(model))
            assert all(torch.equal(a, b) for a, b in zip(*results, strict=True)), (units, sharded_first)
            close(results[0], alone())


@scenario
def fsdp2_checkpointed_blocks():
    """torch's checkpoint inside each unit, and the engine around all."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    def build():
        model = make(torch.float64)
        apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, Block))
        mesh = init_device_mesh("cpu", (2,))
        for block in list(model)[:DEPTH]:
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    close(same(build, 0, dtype=torch.float64), alone())


@scenario
def fsdp2_state_of_a_converted_model():
    """What a converted model and its optimizer save, a plain one loads, and the other way round; training goes on in step with
    the engine and without."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

    options = StateDictOptions(full_state_dict=True)
    kinds = {
        "plain": lambda model: model,
        "fused": lambda model: pyckpt.convert(model, recompute=False),
        "engine": pyckpt.convert,
    }

    def build(kind):
        model = shard(kinds[kind](make()))
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    def train(model, optimizer, number):
        optimizer.zero_grad()
        loss_of(model, batch(number=number)).backward()
        optimizer.step()

    for saved in ("engine", "plain"):
        model, optimizer = build(saved)
        for number in range(2):
            train(model, optimizer, number)
        weights, moments = copy.deepcopy(get_state_dict(model, optimizer, options=options))
        assert set(weights) == set(make().state_dict())
        after = {}
        for kind in kinds:
            other, other_optimizer = build(kind)
            set_state_dict(
                other,
                other_optimizer,
                model_state_dict=weights,
                optim_state_dict=copy.deepcopy(moments),  # the optimizer takes its counters themselves
                options=options,
            )
            for a, b in zip(model.parameters(), other.parameters(), strict=True):
                before, loaded = optimizer.state[a], other_optimizer.state[b]
                pairs = [(a, b), *((before[key], loaded[key]) for key in before)]
                assert all(torch.equal(*pair) for pair in [(whole(one), whole(two)) for one, two in pairs])
            train(other, other_optimizer, 2)
            after[kind] = [whole(p) for p in other.parameters()]
        assert all(torch.equal(a, b) for a, b in zip(after["fused"], after["engine"], strict=True))


# FSDP1


@scenario
def fsdp1():
    def build():
        return FullyShardedDataParallel(
            make(torch.float64),
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            use_orig_params=True,
            device_id=torch.device("cpu"),
        )

    close(same(build, DEPTH, dtype=torch.float64), alone())


def main():
    from tests import _tensor_parallel  # noqa: F401  # its scenarios

    dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=RANK, world_size=2)
    torch.set_num_threads(1)
    names = sys.argv[3:] or list(SCENARIOS)
    for name in names:
        failure = ""
        try:
            SCENARIOS[name]()
        except Exception:
            failure = traceback.format_exc()
        print(json.dumps({"scenario": name, "failure": failure}), flush=True)
        if failure:
            os._exit(1)  # the other process, which may wait for this one, then fails too
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.modules["tests._distributed"] = sys.modules["__main__"]  # one registry of scenarios
    main()
