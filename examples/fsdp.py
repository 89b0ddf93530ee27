"""Trains a GPT sharded over processes by FSDP2, without and with recomputation, and compares memory, time and losses.

    torchrun --nproc-per-node 2 examples/fsdp.py [--layers 8] [--width 256] [--steps 8]

Runs on CPUs (gloo) or GPUs (nccl). Each block is a unit of `fully_shard`; `pyckpt.convert` comes first, so that the fused
layers are what is sharded. Losses are the same bits with the engine as without: it holds no parameter that its unit has given
back, and adds no collective.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
from gpt import GPT, batches, loss_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import pyckpt
from pyckpt import memory


def train(args, device, recompute):
    torch.manual_seed(0)
    model = GPT(args.vocabulary, args.tokens, args.width, args.layers, args.heads).to(device)
    model = pyckpt.convert(model, recompute=recompute)
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, seconds = [], []
    for ids in batches(args.vocabulary, args.tokens, args.batch, args.steps, seed=1 + dist.get_rank()):
        ids = ids.to(device)
        begin = time.perf_counter()
        optimizer.zero_grad()
        loss = loss_of(model(ids), ids)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - begin)
    peak = memory.peak_bytes(lambda: loss_of(model(ids), ids).backward(), device=device)
    return losses, sorted(seconds[1:])[len(seconds[1:]) // 2], peak


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, value in {
        "layers": 8,
        "width": 256,
        "heads": 4,
        "tokens": 256,
        "batch": 4,
        "vocabulary": 512,
        "steps": 8,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    results = {"without": train(args, device, False), "with": train(args, device, True)}
    if dist.get_rank() == 0:
        print(
            f"{'recompute':10} {'peak of a step':>15} {'median step':>12} {'first loss':>11} {'last loss':>10}"
        )
        for name, (losses, seconds, peak) in results.items():
            print(
                f"{name:10} {peak / 2**20:11.1f} MiB {seconds * 1e3:9.0f} ms {losses[0]:11.6f} {losses[-1]:10.6f}"
            )
        same = results["without"][0] == results["with"][0]
        print("losses: the same bits" if same else "losses: DIFFERENT")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
