"""``python -m pyckpt doctor``: what pyckpt finds on this machine, and whether its kernels compute the right thing here."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence

from . import doctor


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m pyckpt", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    help_of_doctor = "print versions, backends, instruction sets and threads"
    command = commands.add_parser("doctor", help=help_of_doctor, description=help_of_doctor)
    command.add_argument(
        "--check",
        action="store_true",
        help="also compare every op and dtype, forward and backward, with the reference backend (exit code 1: a mismatch)",
    )
    arguments = parser.parse_args(argv)
    print(doctor.describe())
    if not arguments.check:
        return 0
    results = doctor.check()
    print(doctor.table(results))
    if not results:
        return 1
    return 0 if all(result.passed for result in results) else 1


if __name__ == "__main__":
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # "| head" ends it without a traceback
    sys.exit(main())
