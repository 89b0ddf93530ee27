"""Every op, dtype and shape: eager, torch.compile, other ways to write it in PyTorch, and pyckpt in turn, checked first."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import gc
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from pyckpt import backends

from . import _alone, _harness, _report, engine, minilm
from ._run import OVERHEAD_SHAPE, Compiler, Config, measure, memory_trouble, shortfalls
from .ops import DTYPE_ALIASES, DTYPES, LAYOUTS, SUBJECTS, Subject

FULL_SHAPES = ((64, 1024), (1000, 1000), (4096, 1024), (8192, 2048))
QUICK_SHAPES = ((64, 1024), (4096, 1024))
COMPILE_SHAPE = (4096, 1024)  # where torch.compile takes part by default: each case costs it seconds
# Where layouts other than contiguous are measured by default.
FULL_LAYOUT_SHAPE, QUICK_LAYOUT_SHAPE = (4096, 1024), (1024, 1024)

FULL = _harness.Effort(seconds=0.8)
QUICK = _harness.Effort(seconds=0.25)
#: Seconds of --quick after which the remaining cases are left out, and said to be.
QUICK_LIMIT_S = 50.0


def _one_of(what: str, known: Sequence[str], aliases: dict[str, str] | None = None) -> Callable[[str], str]:
    """An argparse type: one of `known`, or an error that lists them and guesses what was meant."""

    def parse(text: str) -> str:
        name = (aliases or {}).get(text, text)
        if name not in known:
            close = difflib.get_close_matches(text, [*known, *(aliases or {})], 1)
            hint = f", did you mean {close[0]!r}?" if close else "."
            raise argparse.ArgumentTypeError(f"unknown {what} {text!r}{hint} Known: {', '.join(known)}")
        return name

    return parse


def _shape(text: str) -> tuple[int, ...]:
    try:
        shape = tuple(int(part) for part in text.lower().split("x"))
    except ValueError:
        shape = ()
    if len(shape) < 2 or min(shape) < 1:
        raise argparse.ArgumentTypeError(
            f"bad shape {text!r}: write at least two positive sizes as in 4096x1024"
        )
    return shape


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    p.add_argument(
        "--ops",
        nargs="+",
        type=_one_of("op", list(SUBJECTS)),
        metavar="OP",
        help=f"only these; then without the real job. Known: {', '.join(SUBJECTS)}",
    )
    p.add_argument(
        "--dtype",
        nargs="+",
        type=_one_of("dtype", list(DTYPES), DTYPE_ALIASES),
        metavar="DTYPE",
        default=["fp32", "bf16"],
        help=f"default: fp32 bf16. Known: {', '.join(DTYPES)}",
    )
    p.add_argument(
        "--shape", nargs="+", type=_shape, metavar="RxC", help="rows x columns, for example 4096x1024"
    )
    p.add_argument(
        "--layout",
        nargs="+",
        type=_one_of("layout", LAYOUTS),
        metavar="LAYOUT",
        help=f"of the input. Known: {', '.join(LAYOUTS)}. Default: contiguous, the others at one shape",
    )
    p.add_argument(
        "--device", type=_alone.device, default=torch.device("cpu"), help="cpu (default), cuda or cuda:INDEX"
    )
    p.add_argument("--backend", help="of pyckpt; default: the one it selects for the device")
    p.add_argument("--quick", action="store_true", help="less of everything, under 60 s")
    p.add_argument(
        "--compile-budget",
        type=float,
        metavar="SECONDS",
        default=None,
        help="for torch.compile over the whole run; 0 leaves it out (default 240, with --quick 0); without "
        "--shape it takes part at 4096x1024 only",
    )
    p.add_argument(
        "--allocator",
        choices=("reuse", "default"),
        default="reuse",
        help="reuse freed memory (default), or leave the C library's malloc as it is",
    )
    p.add_argument(
        "--job",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="also fine-tune MiniLM (python -m bench.minilm); default: yes, unless --ops or --quick is given",
    )
    p.add_argument(
        "--engine",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="also train a GPT-2-like stack (python -m bench.engine, which has more options), in full; default: "
        "in a quick form, unless --ops or --quick is given",
    )
    p.add_argument("--threads", type=int, help="torch.set_num_threads; default: as torch chooses")
    p.add_argument("--seed", type=int, default=0, help="of the random inputs (default 0)")
    p.add_argument("--json", metavar="FILE", help="write all results there")
    p.add_argument(
        "--plot",
        metavar="FILE.png",
        help="draw step times there, the others in FILE-minilm.png and FILE-engine.png (needs matplotlib)",
    )
    return p


def configs(args: argparse.Namespace) -> list[Config]:
    """The cases to measure, in order: the call overhead of every op and dtype, then op by op."""
    pairs = [(op, dtype) for op in args.ops or SUBJECTS for dtype in args.dtype]
    overhead = [Config(*pair, OVERHEAD_SHAPE, kind="overhead") for pair in pairs]
    return overhead + [
        Config(*pair, shape, layout, compile=_with_compile(args, shape, layout))
        for pair in pairs
        for shape, layout in _cases(args, SUBJECTS[pair[0]])
    ]


def _cases(args: argparse.Namespace, subject: Subject) -> list[tuple[tuple[int, ...], str]]:
    """Shapes and layouts."""
    shapes = args.shape or (QUICK_SHAPES if args.quick else FULL_SHAPES)
    if subject.products:  # a minute each, and more shapes would tell of the products only
        shapes = args.shape or [QUICK_SHAPES[0] if args.quick else COMPILE_SHAPE]
    cases = [(shape, layout) for shape in shapes for layout in args.layout or ["contiguous"]]
    if not (args.shape or args.layout or subject.products):
        other = QUICK_LAYOUT_SHAPE if args.quick else FULL_LAYOUT_SHAPE
        cases += [(other, layout) for layout in (("transposed",) if args.quick else LAYOUTS[1:])]
    return cases


def _with_compile(args: argparse.Namespace, shape: tuple[int, ...], layout: str) -> bool:
    if args.compile_budget is not None:
        return args.compile_budget > 0 and (bool(args.shape) or shape == COMPILE_SHAPE)
    return not args.quick and (bool(args.shape) or (shape == COMPILE_SHAPE and layout == "contiguous"))


def choose_backend(name: str | None, device: torch.device) -> str:
    """The backend that pyckpt's rows run on.

    Raises:
        RuntimeError: it would be the reference without being asked for by name.
    """
    if name is not None:
        return name
    name = backends.select(device.type)
    serving = [b for b in backends.available().values() if b.device_type == device.type]
    if name == "reference" and not any(b.available for b in serving):
        reasons = "; ".join(f"{b.name}: {b.unavailable}" for b in serving)
        raise RuntimeError(
            f"pyckpt has no kernels for {device.type} here ({reasons}), and measuring the plain PyTorch "
            "reference in their place would mislead. To measure it all the same: --backend reference"
        )
    return name


def run(args: argparse.Namespace, backend: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Measure all cases; the rows, and the names of the cases that --quick had no time for."""
    started = time.perf_counter()
    budget = args.compile_budget if args.compile_budget is not None else (0.0 if args.quick else 240.0)
    compiler = Compiler(budget)
    gc.collect()
    gc.freeze()  # what is alive by now stays; the many collections to come need not look at it
    rows: list[dict[str, Any]] = []
    left_out: list[str] = []
    for config in _report.progress(configs(args), "bench"):
        if args.quick and time.perf_counter() - started > QUICK_LIMIT_S:
            left_out.append(str(config))
            continue
        rows += measure(config, args.device, QUICK if args.quick else FULL, compiler, backend, args.seed)
    return rows, left_out


def measure_all(args: argparse.Namespace, backend: str, subjects: dict[str, Any]) -> dict[str, Any]:
    """Measure and print everything: machine, versions, settings, rows, and `subjects`: key -> (module, settings)."""
    settings = {
        "allocator": _harness.reuse_memory() if args.allocator == "reuse" else "as the C library sets it",
        "date": time.strftime("%Y-%m-%d"),
        "seed": args.seed,
        "quick": args.quick,
        "backend": backend,
    }
    result: dict[str, Any] = {
        "machine": _harness.machine(args.device),
        "versions": _harness.versions(),
        "settings": settings,
    }
    for name, values in result.items():
        _report.print_mapping(name, values)
    if trouble := memory_trouble(args.device):
        print(f"WARNING: memory columns stay empty: {trouble}")
    result["rows"], left_out = run(args, backend)
    _report.print_rows(result["rows"])
    for key, (subject, sizes) in subjects.items():
        result[key] = subject.run(sizes, args.device)
        subject.print_result(result[key])
    _closing(result["rows"], left_out)
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 0, or 1 if a result was wrong or a call failed, 2 for a bad command line."""
    cli = parser()
    args = cli.parse_args(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    missing = minilm.requirements()
    everything = not args.ops and not args.quick
    job = args.job or (args.job is None and everything and not missing)
    subjects: dict[str, Any] = {}
    if job:
        subjects["job"] = minilm, minilm.Settings.of(quick=args.quick, seed=args.seed)
    if args.engine or (args.engine is None and everything):
        subjects["engine"] = engine, engine.Settings.of(quick=args.quick or not args.engine, seed=args.seed)
    with contextlib.ExitStack() as stack:
        try:
            if job and missing:
                raise ModuleNotFoundError(missing)
            _report.prepare(args.json, args.plot)
            backend = choose_backend(args.backend, args.device)
            if args.backend:  # else small inputs may be left to torch's own ops, as a user's are
                stack.enter_context(backends.use(backend))
        except (ImportError, OSError, RuntimeError, ValueError) as error:
            cli.error(str(error))
        result = measure_all(args, backend, subjects)
    if args.job is None and everything and missing:
        print(f"The real job was left out: {missing}")
    if args.json:
        _report.write_json(args.json, result)
    if args.plot:
        where = _report.caption(result["machine"], result["versions"])
        _report.plot_rows(args.plot, result["rows"], where)
        path = Path(args.plot)
        for key, (subject, _) in subjects.items():
            subject.plot(str(path.with_name(f"{path.stem}-{result[key]['name']}.png")), result[key], where)
    wrong = any(row["status"].startswith("error") for row in result["rows"])
    return 1 if wrong or any(subject.failed(result[key]) for key, (subject, _) in subjects.items()) else 0


def _closing(rows: Sequence[dict[str, Any]], left_out: Sequence[str]) -> None:
    print()
    aims = shortfalls(rows)
    print(
        "Aims (nothing from 64 Ki elements up slower than eager; a tiny call at most max(1.5 x, +20 us)): "
        + (f"missed in {len(aims)} row(s)" if aims else "met in every row")
    )
    for line in aims:
        print(f"  {line}")
    contended = [row for row in rows if row["impl"] == "eager" and row["contended"]]
    if contended:
        worst = max(row["others_cpu"] for row in contended)
        cases = sum(row["impl"] == "eager" for row in rows)
        print(
            f"WARNING: the machine was contended during {len(contended)} of {cases} cases: other processes "
            f"took up to {worst:.0%} of its CPU time and left too few undisturbed samples. Waiting OpenMP "
            "threads then multiply small times; 'best' suffers least. Repeat on a quiet machine."
        )
    if left_out:
        names = "; ".join(left_out[:6]) + (" ..." if len(left_out) > 6 else "")
        print(f"WARNING: --quick ran out of time; {len(left_out)} case(s) not measured: {names}")


if __name__ == "__main__":
    sys.exit(main())
