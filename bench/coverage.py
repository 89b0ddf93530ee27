"""What pyckpt saves on real architectures: ``python -m bench.coverage`` writes docs/coverage.md and docs/coverage.json.

Each model of _architectures.py runs forward and backward three ways: as it is, with the recompute engine around it and its loss,
and converted (``pyckpt.convert``), the loss outside. Gradients must be the same bits with and without the engine on the same
modules. ``--check`` repeats all but the timing and compares with what docs/coverage.json records.
"""

from __future__ import annotations

import argparse
import collections
import copy
import dataclasses
import functools
import importlib
import json
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import pyckpt
from pyckpt.memory import saved_bytes

from . import _architectures, _harness, _report

SIZE = _architectures.Size(
    width=128, layers=4, heads=4, kv_heads=4, inner=512, gated_inner=352, vocabulary=1000, words=128, pixels=128, patch=8,
    picture=160,
)  # fmt: skip
#: Where a step's time is taken: with less work an operation than here, only the cost of calls would show.
TIMED_SIZE = dataclasses.replace(
    SIZE, width=256, inner=1024, gated_inner=704, words=256, pixels=256, patch=16
)
NAMES = tuple(f"transformers/{name}" for name in _architectures.TRANSFORMERS) + tuple(
    f"{library}/{name}" for library, models in _architectures.IMAGE_MODELS.items() for name in models
)
DOCS = Path(__file__).resolve().parents[1] / "docs"
EFFORT = _harness.Effort(seconds=1.5, least=5, most=60)
WAYS = ("eager", "engine", "converted")
#: Share by which bytes may differ from those recorded: another version of PyTorch or of the library, other page sizes.
TOLERANCE = 0.03
#: Bytes that the engine's records may take beyond what eager keeps, some hundred bytes a saved tensor.
RECORDS = 32 << 10


def build(
    name: str, size: _architectures.Size = SIZE
) -> tuple[nn.Module, dict[str, torch.Tensor], int | None]:
    """Model in training mode without dropout, its input, and bytes of one sbh a layer at 4 bytes an element, if defined."""
    library, _, short = name.partition("/")
    if library != "transformers":
        return *_architectures.image_model(library, short, size), None
    model, inputs, tokens = _architectures.transformers_model(short, size, dropout=False)
    return model.train(), inputs, None if tokens is None else 2 * tokens * size.batch * size.width


def _loss(model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    output = model(**inputs)
    output = output if isinstance(output, torch.Tensor) else output[0]
    return output.float().pow(2).mean()


def _losses(
    model: nn.Module, converted: nn.Module, inputs: Mapping[str, torch.Tensor]
) -> dict[str, Callable[[], torch.Tensor]]:
    return {
        "eager": lambda: _loss(model, inputs),
        "engine": pyckpt.recompute()(lambda: _loss(model, inputs)),
        "converted": lambda: _loss(converted, inputs),
    }


def _step(model: nn.Module, loss: Callable[[], torch.Tensor]) -> list[torch.Tensor | None]:
    """The loss and the gradient of each parameter."""
    torch.manual_seed(0)
    value = loss()
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [value.detach(), *torch.autograd.grad(value, parameters, allow_unused=True)]


def _same_bits(one: Sequence[torch.Tensor | None], other: Sequence[torch.Tensor | None]) -> bool:
    return all(
        a is b if a is None or b is None else torch.equal(a, b) for a, b in zip(one, other, strict=True)
    )


def became(change: str) -> str:
    """``LayerNorm`` of "nn.LayerNorm -> pyckpt.nn.LayerNorm(...)"; a library's own attention becomes "pyckpt"."""
    new = change.partition(" -> ")[2].partition("(")[0]
    return "attention" if new == "pyckpt" else new.removeprefix("pyckpt.nn.")


def measure(name: str, timed: bool = False) -> dict[str, Any]:
    """One row of the table.

    Returns:
        name, swapped (how many modules became what), unit (see `build`), eager, engine and converted (bytes kept for backward by
        the allocator's count), same_gradients; where `timed` also kept (bytes that the engine keeps, by reason) and the times.

    Raises:
        ImportError: the library does not import.
    """
    model, inputs, unit = build(name)
    converted = pyckpt.convert(copy.deepcopy(model), recompute=False)
    losses = _losses(model, converted, inputs)
    without_engine = _step(converted, losses["converted"])
    pyckpt.convert(converted)
    same = _same_bits(_step(model, losses["eager"]), _step(model, losses["engine"]))
    same &= _same_bits(without_engine, _step(converted, losses["converted"]))
    swapped = collections.Counter(map(became, pyckpt.report(converted).swapped.values()))
    row = {"name": name, "swapped": dict(sorted(swapped.items())), "unit": unit, "same_gradients": same}
    row |= {way: saved_bytes(losses[way], warmup=1) for way in WAYS}
    if timed:
        row["kept"] = pyckpt.explain(model, **inputs).reasons()
        row |= _times(name)
    return row


def _times(name: str) -> dict[str, Any]:
    model, inputs, _ = build(name, TIMED_SIZE)
    converted = pyckpt.convert(copy.deepcopy(model))
    models = dict(zip(WAYS, (model, model, converted), strict=True))
    losses = _losses(model, converted, inputs)
    steps = {way: functools.partial(_step, models[way], losses[way]) for way in WAYS}
    samples, contention = _harness.time_in_turn(steps, EFFORT, torch.device("cpu"))
    times = {f"{way}_ms": samples[way].median for way in WAYS}
    times |= {f"{way}_ratio": samples["eager"].median_of_ratios(samples[way]) for way in WAYS[1:]}
    return times | {"others_cpu": contention.share}


def problems(row: Mapping[str, Any], recorded: Mapping[str, Any] | None) -> list[str]:
    """What is wrong with a row, by itself and against the recorded one; empty if nothing is."""
    found = []
    if not row["same_gradients"]:
        found.append("gradients with and without the engine differ")
    found += [
        f"{way} keeps {row[way]:,} bytes, more than eager ({row['eager']:,})"
        for way in WAYS[1:]
        if row[way] > row["eager"] + RECORDS
    ]
    if recorded is None:
        return [*found, "not in docs/coverage.json: write it anew"]
    found += [
        f"{way} keeps {row[way]:,} bytes, docs/coverage.json says {recorded[way]:,}"
        for way in WAYS
        if abs(row[way] - recorded[way]) > TOLERANCE * recorded[way]
    ]
    # Dropouts apart: from one version of a library to the next they turn into functions (Falcon's in transformers 5.25).
    now, then = ({k: n for k, n in r["swapped"].items() if k != "Dropout"} for r in (row, recorded))
    if now != then:
        found.append(f"swapped {now}, docs/coverage.json says {then}")
    return found


def _kept(row: Mapping[str, Any], size: int) -> str:
    return f"{size / row['unit']:.1f}" if row["unit"] else f"{size / 2**20:.1f} MiB"


def _table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    return ["| " + " | ".join(line) + " |" for line in (header, ["---"] * len(header), *lines)]


def render(result: Mapping[str, Any]) -> str:
    """docs/coverage.md."""
    rows, versions = result["rows"], result["versions"]
    libraries = ", ".join(f"{name} {versions[name]}" for name in ("torch", *_libraries()))
    memory = [
        [
            row["name"],
            ", ".join(f"{count} {kind}" for kind, count in row["swapped"].items()) or "none",
            *(_kept(row, row[way]) for way in WAYS),
            f"{row['engine'] / row['eager']:.0%}",
            f"{row['converted'] / row['eager']:.0%}",
            "same bits" if row["same_gradients"] else "DIFFER",
        ]
        for row in rows
    ]
    reasons = [
        [row["name"], "; ".join(f"{_kept(row, size)} {reason}" for reason, size in _largest(row["kept"]))]
        for row in rows
    ]
    times = [
        [row["name"], f"{row['eager_ms']:.1f}", f"{row['engine_ratio']:.2f}", f"{row['converted_ratio']:.2f}"]
        for row in rows
    ]
    shares = [row["others_cpu"] for row in rows if row["others_cpu"] is not None]
    machine = result["machine"]
    busy = [f"Other processes took up to {max(shares):.0%} of the machine's processors."] if shares else []
    lines = [
        "# Real architectures",
        "",
        "Written by `python -m bench.coverage`; `make coverage` checks it. Small random models in float32, in training mode,",
        f"without dropout: {SIZE.layers} layers of width {SIZE.width}, {SIZE.words} words, {SIZE.batch} sentences or images",
        f"(timm and torchvision: images of {SIZE.picture} x {SIZE.picture}). Versions: {libraries}.",
        "",
        "## Memory and gradients",
        "",
        "Bytes alive between forward and backward, by the allocator's count: **eager**; **engine**, the same model and its loss",
        "inside `pyckpt.recompute()`; **converted**, `pyckpt.convert(model)` and the loss outside it, which keeps the model's",
        "output. Unit: sbh a layer, bytes / (sequence x batch x hidden x layers) x 2 / 4, for transformers of one width, of",
        "all towers together; else MiB. Gradients: with and without the engine, on the original modules and on the converted",
        "ones.",
        "",
        *_table(
            ["architecture", "swapped", *WAYS, "engine / eager", "converted / eager", "gradients"], memory
        ),
        "",
        "## What stays, and why",
        "",
        "The largest shares of what the engine keeps on the unmodified model, as `pyckpt.explain` tells them.",
        "",
        *_table(["architecture", "kept because"], reasons),
        "",
        "## Time of a training step",
        "",
        f"{machine['processor']}, {machine['torch_threads']} thread, {result['date']}. Forward and backward, eager in ms; then",
        "eager's time / pyckpt's (above 1: pyckpt is faster), median of the ratios of steps run in turn.",
        f"Width {TIMED_SIZE.width}, {TIMED_SIZE.words} words, images of {TIMED_SIZE.pixels} x {TIMED_SIZE.pixels}",
        "(timm and torchvision as above): small still, so that the engine's fixed cost a saved tensor weighs more than in a",
        "real model.",
        *busy,
        "",
        *_table(["architecture", "eager ms", "engine", "converted"], times),
        "",
    ]
    return "\n".join(lines)


def _largest(kept: Mapping[str, int]) -> list[tuple[str, int]]:
    """The reasons that matter: those of a twentieth or more, four at most."""
    total = sum(kept.values())
    return [(reason, size) for reason, size in kept.items() if size >= total / 20][:4]


def _libraries() -> list[str]:
    return list(dict.fromkeys(name.partition("/")[0] for name in NAMES))


def _versions() -> dict[str, str]:
    """Raises ImportError where a library is missing."""
    return {name: str(importlib.import_module(name).__version__) for name in ("torch", *_libraries())}


def check(names: Sequence[str]) -> bool:
    """Compares with docs/coverage.json; whether all that could be measured, and at least one row, is as recorded."""
    recorded = {row["name"]: row for row in json.loads((DOCS / "coverage.json").read_text())["rows"]}
    wrong, skipped = 0, []
    for name in names:
        try:
            row = measure(name)
        except ImportError as error:
            skipped.append(f"{name}: {error}")
            continue
        found = problems(row, recorded.get(name))
        wrong += bool(found)
        figures = ", ".join(f"{way} {_kept(row, row[way])}" for way in WAYS)
        print(f"{name}: {figures}: {'; '.join(found) or 'ok'}", flush=True)
    print(f"{len(names) - len(skipped)} architectures checked, {wrong} with problems, {len(skipped)} skipped")
    for line in skipped:
        print(f"  skipped {line}")
    return not wrong and len(skipped) < len(names)


def write(names: Sequence[str]) -> None:
    """Measures all, and writes both files."""
    result = {
        "machine": _harness.machine(torch.device("cpu")),
        "versions": _versions(),
        "date": time.strftime("%Y-%m-%d"),
        "rows": [measure(name, timed=True) for name in _report.progress(names, "coverage")],
    }
    (DOCS / "coverage.json").write_text(json.dumps(result, indent=1) + "\n")
    (DOCS / "coverage.md").write_text(render(result))


def main(argv: Sequence[str] | None = None) -> int:
    """0; 1 if a check failed, 2 for a bad command line."""
    cli = argparse.ArgumentParser(
        prog="python -m bench.coverage",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    cli.add_argument("--check", action="store_true", help="compare with docs/coverage.json; write nothing")
    cli.add_argument("--only", nargs="+", choices=NAMES, metavar="NAME", help="with --check: only these")
    args = cli.parse_args(argv)
    if args.only and not args.check:
        cli.error("--only goes with --check: docs/coverage.md is written with all rows or not at all")
    torch.set_num_threads(1)  # steady on a busy machine, and enough for models this small
    _harness.reuse_memory()
    warnings.filterwarnings("ignore", category=FutureWarning)
    if args.check:
        return 0 if check(args.only or NAMES) else 1
    try:
        _versions()
    except ImportError as error:
        cli.error(f"the table needs transformers, timm and torchvision: {error}")
    write(NAMES)
    return 0


if __name__ == "__main__":
    sys.exit(main())
