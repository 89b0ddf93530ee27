"""Builds, tests and measures pyckpt on this machine's GPU in five minutes: ``python -m bench.gpu_check``, or bench/gpu_check.

Build: where the installed package has no CUDA kernels for this GPU and this is a checkout, they are compiled in place, for this
GPU alone. Test: the tests of the ops on the backends cuda and triton. Measure: every op on each of them beside eager,
torch.compile and the fused kernels of other packages that are installed; results are checked before they are timed. Without a GPU
it says so and ends with "skipped". Exit code 1: a build, a test or a result failed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from . import _report

ROOT = Path(__file__).resolve().parents[1]
#: Measured first, with torch.compile and other packages; the others as far as time allows.
MAIN_SHAPE = (8192, 4096)
SHAPES = ((4096, 1024), (65536, 1024), (4096, 16384))
FULL_SHAPES = tuple((rows, columns) for rows in (4096, 16384, 65536) for columns in (1024, 4096, 16384))
LIMIT_S = 290.0
#: What is run on each backend (everything, or these files: Triton compiles for each new shape), and its share of the time that is
#: left when it begins.
TESTS: dict[str, tuple[float, tuple[str, ...]]] = {
    "cuda": (0.3, ()),
    "triton": (0.25, ("tests/test_accuracy.py", "tests/test_attention.py")),
}
COMPILE_SHARE = 0.3
#: The aim: this share of the bandwidth of a copy, forward and step, at MAIN_SHAPE in bf16.
BANDWIDTH_AIM = 0.85
#: Reasons that a build for this GPU does away with.
_BUILDABLE = ("built without CUDA", "this GPU is", "ImportError", "ModuleNotFoundError")


@dataclass
class Clock:
    """Seconds that are left of `limit`; None: no limit."""

    limit: float | None
    start: float = field(default_factory=time.perf_counter)

    @property
    def left(self) -> float:
        return 1e9 if self.limit is None else self.limit - (time.perf_counter() - self.start)


def no_gpu() -> str:
    """Why there is no GPU to check; empty if there is one."""
    if torch.cuda.is_available():
        return ""
    if torch.version.cuda is None:
        return f"this torch ({torch.__version__}) was built without CUDA"
    return f"torch {torch.__version__} sees no GPU"


def why_not_cuda() -> str:
    """Why the backend cuda of the package as it is now cannot be used here, asked in a process of its own; empty if it can."""
    code = "from pyckpt import backends; print(backends.available()['cuda'].unavailable)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    return (done.stdout if done.returncode == 0 else done.stderr).strip().rpartition("\n")[2]


def run(command: Sequence[str], seconds: float, **environment: str) -> dict[str, Any]:
    """Runs a command in the checkout and shows its output; what it came to."""
    print("$", " ".join([f"{k}={v}" for k, v in environment.items()] + list(command)), flush=True)
    started = time.perf_counter()
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=os.environ | environment,
            capture_output=True,
            text=True,
            timeout=max(1.0, seconds),
        )
        output, status = (
            done.stdout + done.stderr,
            f"exit code {done.returncode}" if done.returncode else "ok",
        )
    except subprocess.TimeoutExpired as expired:
        output = (
            expired.stdout.decode(errors="replace")
            if isinstance(expired.stdout, bytes)
            else expired.stdout or ""
        )
        status = f"not finished in {seconds:.0f} s"
    tail = output.strip().splitlines()[-40:]
    print("\n".join(tail), flush=True)
    return {
        "status": status,
        "seconds": round(time.perf_counter() - started, 1),
        "last_line": tail[-1] if tail else "",
    }


def build(clock: Clock) -> dict[str, Any]:
    """Compiles the kernels for this GPU if they are not there."""
    reason = why_not_cuda()
    if not reason:
        return {"status": "ok", "seconds": 0.0, "last_line": "the installed package covers this GPU"}
    if not (ROOT / "setup.py").exists() or not any(kind in reason for kind in _BUILDABLE):
        return {"status": f"failed: {reason}", "seconds": 0.0, "last_line": reason}
    print(f"backend cuda: {reason}")
    arch = "{}{}".format(*torch.cuda.get_device_capability())
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    result = run(command, clock.left, PYCKPT_CUDA="on", PYCKPT_CUDA_ARCHS=arch)
    if result["status"] == "ok" and (reason := why_not_cuda()):
        result["status"] = f"failed: {reason}"
    return result


def test(backend: str, clock: Clock) -> dict[str, Any]:
    """The ops' tests on one backend."""
    share, files = TESTS[backend]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-m",
        "not slow",
        "-k",
        f"{backend} and not (emulated or interpreted)",
    ]
    command += ["-p", "tests._backend_report", "--require-backend", backend, "-p", "no:cacheprovider", *files]
    return run(command, clock.left * share, PYTHONPATH=str(ROOT))


def measure(args: argparse.Namespace, clock: Clock) -> dict[str, Any]:
    """Rows of the benchmark for every op, dtype, shape and CUDA backend, as far as time allows."""
    from pyckpt import backends

    from . import _harness, _peers
    from ._run import Compiler, Config, measure
    from .ops import SUBJECTS

    device = torch.device("cuda", torch.cuda.current_device())
    names = [b.name for b in backends.available().values() if b.device_type == "cuda" and b.available]
    peers, absent = _peers.find()
    facts: dict[str, Any] = {
        "machine": _harness.machine(device),
        "versions": _harness.versions(),
        "settings": {
            "date": time.strftime("%Y-%m-%d"),
            "seed": args.seed,
            "full": args.full,
            "backends": names,
        },
        "absent": absent,
    }
    for name, values in facts.items():
        _report.print_mapping(name, values)
    shapes = [shape for shape in (FULL_SHAPES if args.full else SHAPES) if shape != MAIN_SHAPE]
    ops = args.ops or list(SUBJECTS)
    configs = [
        Config(op, dtype, shape, compile=shape == MAIN_SHAPE)
        for shape in (MAIN_SHAPE, *shapes)
        for dtype in ("bf16", "fp32")
        for op in ops
    ]
    compiler = Compiler(1e9 if args.full else clock.left * COMPILE_SHARE)
    effort = _harness.Effort(seconds=0.5 if args.full else 0.1)
    rows: list[dict[str, Any]] = []
    left_out: list[str] = []
    for config in _report.progress(configs, "gpu_check"):
        if clock.left < 10:
            left_out.append(str(config))
            continue
        for backend in names:
            first = backend == names[0]
            others = _peers.of(config.op, peers) if first and config.compile else {}
            with backends.use(backend):
                case = config if first else Config(config.op, config.dtype, config.shape)
                new = measure(case, device, effort, compiler, backend, args.seed, others)
            rows += new if first else [row for row in new if row["impl"] == "pyckpt"]
        torch.cuda.empty_cache()
    return {**facts, "rows": rows, "left_out": left_out}


def share_of_copy(row: dict[str, Any], what: str) -> float:
    """The bandwidth of a row's forward or step as a share of a copy's."""
    gbps = row[f"{what}_bytes"] / row[f"{what}_ms"] / 1e6
    return float(gbps / row["copy_gbps"])


def print_shares(rows: Sequence[dict[str, Any]]) -> None:
    """GB/s of forward and step at the main shape, as shares of the measured copy."""
    main = "x".join(map(str, MAIN_SHAPE))
    timed = [
        r for r in rows if r["step_ms"] is not None and r["dtype"] == "bf16" and r["kind"] == "throughput"
    ]
    lines = [
        [
            *(row[name] for name in ("op", "shape", "impl", "backend")),
            *(f"{share_of_copy(row, what):.0%}" for what in ("forward", "step")),
            f"{row['copy_gbps']:.0f}",
        ]
        for row in timed
        if row["shape"] == main or row["op"].startswith("softmax_")
    ]
    if lines:
        title = f"Bandwidth as a share of a copy's, bf16 (aim for pyckpt: {BANDWIDTH_AIM:.0%} at {main})"
        header = ("op", "shape", "impl", "backend", "forward", "step", "copy GB/s")
        _report.print_table(title, header, lines)
    low = [
        f"{row['op']} {row['backend']} {what} {share_of_copy(row, what):.0%}"
        for row in timed
        if row["impl"] == "pyckpt" and row["shape"] == main
        for what in ("forward", "step")
        if share_of_copy(row, what) < BANDWIDTH_AIM
    ]
    print(f"\nBelow the aim: {'; '.join(low) or 'none'}")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the check; 0 if all went well or there is no GPU."""
    cli = argparse.ArgumentParser(prog="python -m bench.gpu_check", description=__doc__)
    cli.add_argument(
        "--full", action="store_true", help="more shapes, longer measurements, no limit of five minutes"
    )
    cli.add_argument("--ops", nargs="+", metavar="OP", help="measure only these")
    cli.add_argument("--no-build", action="store_true", help="take the package as it is installed")
    cli.add_argument("--no-test", action="store_true", help="measure only")
    cli.add_argument("--seed", type=int, default=0, help="of the random inputs (default 0)")
    cli.add_argument("--json", metavar="FILE", help="write everything there")
    args = cli.parse_args(argv)
    try:
        _report.prepare(args.json, None)
    except OSError as error:
        cli.error(str(error))
    if reason := no_gpu():
        print(f"skipped: {reason}")
        if args.json:
            _report.write_json(args.json, {"skipped": reason, "rows": []})
        return 0

    clock = Clock(None if args.full else LIMIT_S)
    result: dict[str, Any] = {"rows": []}
    if not args.no_build:
        result["build"] = build(clock)
    built = args.no_build or result["build"]["status"] == "ok"
    if built and not args.no_test:
        from pyckpt import backends

        found = backends.available()
        result |= {f"tests on {name}": test(name, clock) for name in TESTS if found[name].available}
    if built:
        result |= measure(args, clock)
        _report.print_rows(result["rows"])
        print_shares(result["rows"])
        if result["left_out"]:
            print(
                f"No time for {len(result['left_out'])} case(s), which --full measures: {result['left_out'][0]} ..."
            )
    stages = {
        name: part["status"]
        for name, part in result.items()
        if name == "build" or name.startswith("tests on")
    }
    wrong = [row for row in result["rows"] if row["status"].startswith("error")]
    print(
        f"\n{', '.join(f'{k}: {v}' for k, v in stages.items())}; {len(result['rows'])} rows, {len(wrong)} wrong"
    )
    if args.json:
        _report.write_json(args.json, result)
    return 1 if wrong or any(status != "ok" for status in stages.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
