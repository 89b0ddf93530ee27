"""One subject by itself: the command line that ``python -m bench.minilm`` and ``python -m bench.engine`` share."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

from . import _harness, _report


def device(text: str) -> torch.device:
    """An argparse type: a device that is there."""
    try:
        result = torch.device(text)
    except RuntimeError as error:
        raise argparse.ArgumentTypeError(f"unknown device {text!r}: use cpu, cuda or cuda:INDEX") from error
    if result.type not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(
            f"device {text!r} is not supported by the benchmark: use cpu, cuda or cuda:INDEX"
        )
    if result.type == "cuda":
        if not torch.cuda.is_available():
            build = torch.version.cuda or "no CUDA"
            raise argparse.ArgumentTypeError(
                f"device {text!r}: this torch ({torch.__version__}, built with {build}) sees no usable GPU"
            )
        if result.index is not None and result.index >= torch.cuda.device_count():
            raise argparse.ArgumentTypeError(f"device {text!r}: only {torch.cuda.device_count()} GPU(s) here")
    return result


def parser(subject: str, description: str | None) -> argparse.ArgumentParser:
    """The common options of ``python -m bench.<subject>``."""
    cli = argparse.ArgumentParser(
        prog=f"python -m bench.{subject}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    cli.add_argument("--quick", action="store_true", help="less of everything, under a minute on 2 cores")
    cli.add_argument("--seed", type=int, default=0, help="of all that is random (default 0)")
    cli.add_argument(
        "--device", type=device, default=torch.device("cpu"), help="cpu (default), cuda or cuda:INDEX"
    )
    cli.add_argument("--threads", type=int, help="torch.set_num_threads; default: as torch chooses")
    cli.add_argument("--json", metavar="FILE", help="write the result there")
    cli.add_argument("--plot", metavar="FILE.png", help="draw the result there (needs matplotlib)")
    return cli


def run(
    cli: argparse.ArgumentParser,
    args: argparse.Namespace,
    key: str,
    measure: Callable[[], dict[str, Any]],
    report: Callable[[dict[str, Any]], None],
    draw: Callable[[str, dict[str, Any], str], None],
) -> dict[str, Any]:
    """Measure, print, write (under `key` in the JSON object) and draw; the result."""
    if args.threads:
        torch.set_num_threads(args.threads)
    try:
        _report.prepare(args.json, args.plot)
    except (ImportError, OSError) as error:
        cli.error(str(error))
    facts: dict[str, Any] = {
        "machine": _harness.machine(args.device),
        "versions": _harness.versions(),
        "settings": {
            "allocator": _harness.reuse_memory(),
            "date": time.strftime("%Y-%m-%d"),
            "seed": args.seed,
            "quick": args.quick,
        },
    }
    for name, values in facts.items():
        _report.print_mapping(name, values)
    result = measure()
    report(result)
    print(f"({result['seconds']} s)")
    if args.json:
        _report.write_json(args.json, {**facts, key: result})
    if args.plot:
        draw(args.plot, result, _report.caption(facts["machine"], facts["versions"]))
    return result
