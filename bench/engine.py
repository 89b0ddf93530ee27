"""The recompute engine on one training step of a GPT-2-like stack, beside what else saves activation memory.

In turn, in one run, for each precision:

    eager           torch's own layers
    engine          the same model, its forward inside pyckpt.recompute()
    converted       pyckpt.convert(model, recompute=False): fused layers, no engine
    pyckpt          pyckpt.convert(model): fused layers and engine
    pyckpt LEVEL    pyckpt.convert(model, recompute=LEVEL): matrix products rebuilt too, at "mlp" and at "linear"
    plan B          fused layers and pyckpt.plan, at B of eager's peak
    checkpoint      torch.utils.checkpoint around every block (non-reentrant)
    compile B       torch.compile with activation memory budget B; what is kept is decided by its partitioner
    liger           Liger's LayerNorm, where it runs

Before anything is timed the gradients of the input and of every parameter are checked: "engine" and "checkpoint"
must give eager's bits, "pyckpt" at each level and "plan" those of "converted", and every way must be as near to float64 as
eager, in the norm of each gradient.

Bytes kept are the allocator's, between forward and backward, in sbh a layer: bytes / (sequence x batch x hidden x
layers) for elements of 2 bytes. No loss is computed: the gradient of the output is given, so that nothing but the
blocks keeps anything.
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pyckpt import memory

from . import _alone, _harness, _hooks, _report
from ._check import relative_difference, too_far
from ._run import PEER_SLACK, Compiler, memory_trouble
from ._stack import PRECISIONS, WAYS, Sizes, Stack, Way, at_budget, build, named

_SIZES = Sizes()
_EFFORT = _harness.Effort(seconds=20.0, least=5, most=60, patience=2.0, warmup=1)
_QUICK_EFFORT = replace(_EFFORT, seconds=1.0, patience=1.5)


@dataclass(frozen=True)
class Settings:
    """What to measure. `compile_seconds`: for torch.compile over the whole run, 0 leaves it out."""

    sizes: Sizes = _SIZES
    precisions: Sequence[str] = PRECISIONS
    ways: Sequence[str] = WAYS
    effort: _harness.Effort = _EFFORT
    compile_seconds: float = 900.0
    hook_rounds: int = 2000
    seed: int = 0

    @classmethod
    def of(cls, *, quick: bool, **given: Any) -> Settings:
        """The default, or a small stack that takes seconds, torch.compile left out."""
        small: dict[str, Any] = {
            "sizes": Sizes(batch=2, sequence=128, hidden=256, heads=4, layers=2),
            "effort": _QUICK_EFFORT,
            "compile_seconds": 0.0,
            "hook_rounds": 500,
        }
        return cls(**{**(small if quick else {}), **given})


@dataclass
class _Setting:
    """One precision: the input, the gradient of the output, eager's gradients and those in float64."""

    x: Tensor
    grad_output: Tensor
    dtype: torch.dtype
    eager: tuple[Tensor, ...]
    exact: tuple[Tensor, ...]


def _row(settings: Settings, precision: str, impl: str, device: torch.device) -> dict[str, Any]:
    sizes = settings.sizes
    return {
        "op": "gpt2_stack",
        "dtype": precision,
        "shape": f"{sizes.batch}x{sizes.sequence}x{sizes.hidden}",
        "impl": impl,
        "backend": {
            "converted": "pyckpt",
            "pyckpt": "pyckpt",
            "plan": "pyckpt",
            "liger": "triton",
            "compile": "inductor",
        }.get(impl.split()[0], "torch"),
        "forward_ms": None,
        "step_ms": None,
        "ratio": None,
        "gbps": None,  # matrix products are not bound by memory
        "copy_gbps": None,
        "saved_bytes": None,
        "peak_bytes": None,
        # Beyond the common fields:
        "status": "ok",
        "kind": "training step",
        "heads": sizes.heads,
        "layers": sizes.layers,
        "device": str(device),
        "sbh": None,
        "time_ratio": None,
        "same_bits_as": None,
        "difference": None,
        "others_cpu": None,
        "contended": None,
        "samples": None,
        "undisturbed": None,
    }


def _peer_in_bits(way: str) -> str | None:
    """Whose bits a way must give."""
    if way in ("engine", "checkpoint"):
        return "eager"
    return "converted" if way.startswith(("pyckpt", "plan")) else None


def _same(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return all(map(torch.equal, a, b))


def _check(row: dict[str, Any], name: str, got: dict[str, tuple[Tensor, ...]], setting: _Setting) -> None:
    """Fill in the row how the gradients of `name` compare with the others'; an error ends its status."""
    peer = name.startswith("compile") or name == "liger"
    other = _peer_in_bits(name)
    row["difference"] = relative_difference(got[name], setting.eager)
    if other in got and not _same(got[name], got[other]):
        row["status"] = f"error: gradients are not the bits of {other!r}"
    elif problem := too_far(
        got[name], setting.eager, setting.exact, setting.dtype, PEER_SLACK if peer else 1.0
    ):
        row["status"] = f"{'skipped' if peer else 'error'}: {problem}"
    else:
        row["same_bits_as"] = "eager" if _same(got[name], setting.eager) else other if other in got else None


def _prepare(settings: Settings, precision: str, device: torch.device) -> tuple[Stack, _Setting]:
    sizes, dtype = settings.sizes, torch.float32 if precision == "fp32" else torch.bfloat16
    torch.manual_seed(settings.seed)
    model = Stack(sizes).to(device, torch.bfloat16 if precision == "bf16" else torch.float32)
    shape = (sizes.batch, sizes.sequence, sizes.hidden)
    x = torch.randn(shape, device=device).to(next(model.parameters()).dtype).requires_grad_()
    grad_output = torch.randn(shape, device=device).to(x.dtype)
    wide = copy.deepcopy(model).double()
    wide_x = x.detach().double().requires_grad_()
    exact = build("checkpoint", wide, wide_x, False).gradients(
        wide_x, grad_output.double()
    )  # deep stacks too
    eager = build("eager", model, x, precision == "amp").gradients(x, grad_output)
    return model, _Setting(x, grad_output, dtype, eager, exact)


def measure(
    settings: Settings, precision: str, device: torch.device, compiler: Compiler
) -> list[dict[str, Any]]:
    """Check, count and time every way in one precision: a row for each.

    A row whose gradients are wrong has a `status` that begins with "error" and no times; "skipped" where a peer
    does not exist here, or is itself too inaccurate.
    """
    model, setting = _prepare(settings, precision, device)
    amp, x, grad_output = precision == "amp", setting.x, setting.grad_output
    rows: dict[str, dict[str, Any]] = {}
    ways: dict[str, Way] = {}
    got: dict[str, tuple[Tensor, ...]] = {"eager": setting.eager}
    torch.compiler.reset()
    for name in settings.ways:
        row = rows[name] = _row(settings, precision, name, device)
        try:
            if name.startswith("compile"):
                step = lambda call: Way(model, call, amp).gradients(x, grad_output)  # noqa: E731
                compiled, reason = compiler(model, step, at_budget(float(name.split()[1])))
                if compiled is None:
                    raise RuntimeError(reason)
                way = Way(model, compiled, amp)
            else:
                way = build(name, model, x, amp)
        except RuntimeError as error:
            row["status"] = f"skipped: {error}"
            continue
        if name != "eager":
            got[name] = way.gradients(x, grad_output)
            _check(row, name, got, setting)
        if row["status"] == "ok":
            ways[name] = way
    got.clear()
    if not memory_trouble(device):
        for name, way in ways.items():
            _count(rows[name], way, setting, settings.sizes, device)
    _time(rows, ways, setting, settings.effort, device)
    return list(rows.values())


def _count(row: dict[str, Any], way: Way, setting: _Setting, sizes: Sizes, device: torch.device) -> None:
    x = setting.x
    row["saved_bytes"] = memory.saved_bytes(lambda: way.forward(x), device=device, warmup=1)
    row["peak_bytes"] = memory.peak_bytes(lambda: way.gradients(x, setting.grad_output), device=device)
    elements = sizes.batch * sizes.sequence * sizes.hidden * sizes.layers
    row["sbh"] = row["saved_bytes"] / elements * 2 / setting.dtype.itemsize


def _time(
    rows: dict[str, dict[str, Any]],
    ways: dict[str, Way],
    setting: _Setting,
    effort: _harness.Effort,
    device: torch.device,
) -> None:
    calls: dict[str, Any] = {}
    for name, way in ways.items():
        calls[f"{name} forward"] = partial(way.forward, setting.x)
        calls[name] = partial(way.gradients, setting.x, setting.grad_output)
    samples, contention = _harness.time_in_turn(calls, effort, device)
    eager = samples["eager"]
    for name in ways:
        step = samples[name]
        rows[name].update(
            forward_ms=samples[f"{name} forward"].median,
            step_ms=step.median,
            ratio=eager.ratio_of_medians(step),
            time_ratio=step.median_of_ratios(eager),
            others_cpu=contention.share,
            contended=contention.contended and not step.sound,
            samples=len(step.values),
            undisturbed=len(step.undisturbed),
        )


def run(settings: Settings, device: torch.device) -> dict[str, Any]:
    """All precisions and the cost of the engine's hooks, as a JSON object."""
    started = time.perf_counter()
    compiler = Compiler(settings.compile_seconds)
    rows: list[dict[str, Any]] = []
    for precision in _report.progress(settings.precisions, "training step"):
        rows += measure(settings, precision, device, compiler)
    hooks = _hooks.measure(settings.hook_rounds)
    return {
        "name": "engine",
        "sizes": str(settings.sizes),
        "rows": rows,
        "hooks": hooks,
        "seconds": round(time.perf_counter() - started, 1),
    }


def failed(result: dict[str, Any]) -> bool:
    """Whether a way of ours gave wrong gradients."""
    return any(row["status"].startswith("error") for row in result["rows"])


def _gradients(row: dict[str, Any]) -> str:
    if row["impl"] == "eager":
        return ""
    same = f"bits of {row['same_bits_as']}" if row["same_bits_as"] else ""
    return same if row["same_bits_as"] == "eager" else f"{same or 'differ'} ({row['difference']:.0e})"


def print_result(result: dict[str, Any]) -> None:
    """The table, what was left out and why, and the cost of the hooks."""
    eager = {row["dtype"]: row for row in result["rows"] if row["impl"] == "eager"}
    lines = []
    for row in result["rows"]:
        if row["step_ms"] is None:
            continue
        whole = eager[row["dtype"]]
        counted = row["saved_bytes"] is not None
        lines.append(
            (
                row["dtype"],
                row["impl"],
                f"{row['sbh']:.2f}" if counted else "",
                f"{row['saved_bytes'] / whole['saved_bytes']:.2f}" if counted else "",
                f"{row['peak_bytes'] / _report.MIB:.1f}" if counted else "",
                f"{row['forward_ms']:.1f}",
                f"{row['step_ms']:.1f}",
                f"{row['time_ratio']:.3f}",
                _gradients(row),
            )
        )
    _report.print_table(
        f"A training step of a GPT-2-like stack, {result['sizes']}: bytes kept for backward, and time\n"
        "(medians; time / eager: median of the ratios; in brackets the largest relative difference from eager)",
        (
            *("dtype", "impl", "kept sbh", "/ eager", "peak MiB", "fwd ms", "step ms"),
            *("time / eager", "gradients"),
        ),
        lines,
    )
    reasons: dict[str, list[str]] = {}
    for row in result["rows"]:
        if row["status"] != "ok":
            reasons.setdefault(row["status"], []).append(f"{row['impl']} {row['dtype']}")
    for status, names in reasons.items():
        print(f"{status}: {', '.join(names)}")
    if any(row["contended"] for row in result["rows"]):
        print("WARNING: the machine was contended; do not quote these times")
    _hooks.print_result(result["hooks"])


def plot(path: str, result: dict[str, Any], caption: str) -> None:
    """Bytes kept against time of a step, both as a share of eager's: one panel a precision, one PNG."""
    plt = _report.require_matplotlib()
    rows = [row for row in result["rows"] if row["step_ms"] is not None and row["sbh"] is not None]
    dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
    figure, axes = plt.subplots(
        1, max(1, len(dtypes)), figsize=(4.6 * max(1, len(dtypes)), 4.2), squeeze=False, layout="constrained"
    )
    for axis, dtype in zip(axes[0], dtypes, strict=False):
        here = [row for row in rows if row["dtype"] == dtype]
        for family in ("compile", "pyckpt"):  # by budget, and by level
            points = [(row["sbh"], row["time_ratio"]) for row in here if row["impl"].startswith(family)]
            axis.plot([x for x, _ in points], [y for _, y in points], color=_report.COLOURS[family], lw=1)
        for index, row in enumerate(here):
            impl = row["impl"]
            colour = _report.COLOURS.get(impl.split()[0], "#6a737d")
            axis.plot(row["sbh"], row["time_ratio"], "o", color=colour, ms=8 if impl == "pyckpt" else 5)
            axis.annotate(
                impl,
                (row["sbh"], row["time_ratio"]),
                (5, 6 if index % 2 else -11),
                textcoords="offset points",
                fontsize=8,
                weight="bold" if impl == "pyckpt" else "normal",
            )
        axis.axhline(1, color=_report.COLOURS["eager"], lw=0.8, ls=":")
        axis.set_title(dtype, fontsize=10)
        axis.set_xlabel("kept for backward, sbh a layer")
        axis.set_ylabel("time of a step / eager's")
        axis.margins(y=0.15)
        axis.set_xlim(0, 1.3 * max(row["sbh"] for row in here))
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"GPT-2-like stack, {result['sizes']}\n{caption}", fontsize=9)
    _report.save_figure(figure, path)
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    """Run this subject alone; 0, or 1 if gradients were wrong."""
    cli = _alone.parser("engine", __doc__)
    cli.add_argument("--dtype", nargs="+", choices=PRECISIONS, default=PRECISIONS, help="default: all")
    cli.add_argument(
        "--impl",
        nargs="+",
        type=named,
        default=WAYS,
        metavar="WAY",
        help=f"and what they are compared with; default: {', '.join(WAYS)}. Of 'plan' and 'compile' any share in (0, 1]",
    )
    for name, value in vars(_SIZES).items():
        cli.add_argument(f"--{name}", type=int, help=f"default {value}, with --quick less")
    cli.add_argument(
        "--seconds",
        type=float,
        help=f"of timing, a precision (default {_EFFORT.seconds:g}, with --quick less)",
    )
    cli.add_argument(
        "--compile-budget",
        type=float,
        metavar="SECONDS",
        help="for torch.compile over the whole run; 0 leaves it out (default 900, with --quick 0)",
    )
    args = cli.parse_args(argv)
    settings = Settings.of(quick=args.quick, seed=args.seed, precisions=args.dtype)
    given = {name: getattr(args, name) for name in vars(_SIZES) if getattr(args, name) is not None}
    if any(value < 1 for value in given.values()):
        cli.error("sizes must be positive")
    # With each way comes the one that its bits are compared with.
    known = dict.fromkeys([*WAYS, *args.impl])
    wanted = {"eager", *args.impl, *map(_peer_in_bits, args.impl)}
    settings = replace(
        settings,
        sizes=replace(settings.sizes, **given),
        ways=[way for way in known if way in wanted],
    )
    if settings.sizes.hidden % settings.sizes.heads:
        cli.error(f"--hidden {settings.sizes.hidden} is not divisible by --heads {settings.sizes.heads}")
    if args.seconds is not None:
        settings = replace(settings, effort=replace(settings.effort, seconds=args.seconds))
    if args.compile_budget is not None:
        settings = replace(settings, compile_seconds=args.compile_budget)
    result = _alone.run(cli, args, "engine", lambda: run(settings, args.device), print_result, plot)
    return 1 if failed(result) else 0


if __name__ == "__main__":
    sys.exit(main())
