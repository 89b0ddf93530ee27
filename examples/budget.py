"""Trains a 24-layer GPT in a memory budget that its step does not fit in eager PyTorch, by a plan.

    python examples/budget.py [--budget 300MiB] [--layers 24] [--width 256] [--batch 8] [--steps 8]

Prints what eager's step takes, the plan, and what it takes then: memory, time, losses. The losses of the planned model and of the
same converted model without recomputation are the same bits.
"""

import argparse
import copy
import statistics
import time

import torch
from gpt import GPT, batches, loss_of

import pyckpt
from pyckpt import memory


def train(model, args, device):
    """Losses, the median time of a step in seconds, and the most that a step allocates above what stands before it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, seconds = [], []
    for ids in batches(args.vocabulary, args.tokens, args.batch, args.steps):
        begin = time.perf_counter()
        ids = ids.to(device)
        loss = loss_of(model(ids), ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(
            set_to_none=False
        )  # gradients stand between steps: the budget is that of activations
        losses.append(loss.item())
        seconds.append(time.perf_counter() - begin)
    peak = memory.peak_bytes(lambda: loss_of(model(ids), ids).backward(), device=device)
    return losses, statistics.median(seconds[1:]), peak


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--budget", default="300MiB", help="of activations: a size, or a fraction of eager's")
    sizes = {"layers": 24, "width": 256, "heads": 4, "tokens": 256, "batch": 8, "vocabulary": 512, "steps": 8}
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    eager = GPT(args.vocabulary, args.tokens, args.width, args.layers, args.heads).to(device)
    stored = pyckpt.convert(copy.deepcopy(eager), recompute=False)
    planned = pyckpt.convert(copy.deepcopy(eager), recompute=False)
    (sample,) = (ids.to(device) for ids in batches(args.vocabulary, args.tokens, args.batch, 1))
    plan = pyckpt.plan(planned, sample, budget=args.budget, loss=lambda logits: loss_of(logits, sample))
    print(plan, end="\n\n")
    results = {"eager": train(eager, args, device), "converted": train(stored, args, device)}
    plan.apply(planned)
    results["planned"] = train(planned, args, device)
    print(f"{'':10} {'peak of a step':>15} {'median step':>12} {'first loss':>11} {'last loss':>10}")
    for name, (losses, seconds, peak) in results.items():
        fits = "" if peak <= plan.budget else "  does not fit"
        print(
            f"{name:10} {peak / 2**20:11.1f} MiB {seconds * 1e3:9.0f} ms {losses[0]:11.6f} {losses[-1]:10.6f}{fits}"
        )
    same = results["converted"][0] == results["planned"][0]
    print("losses of converted and planned: the same bits" if same else "losses: DIFFERENT")


if __name__ == "__main__":
    main()
