"""Rows of the audit, what fails one, and the table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from ._cubin import Kernel


@dataclass
class Row:
    """One compiled kernel. `loads` and `stores` on global memory by their width in bits; `problems` fail the audit."""

    kernel: str
    dtype: str
    shape: str
    target: str
    threads: int = 0
    registers: int = 0
    spills: int = 0
    shared: int = 0
    occupancy: float | None = None  # None: not known for this target
    loads: Counter[int] = field(default_factory=Counter)
    stores: Counter[int] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    def take(self, kernel: Kernel, dynamic_shared: int = 0) -> None:
        """Fills in what machine code shows."""
        self.registers, self.loads, self.stores = kernel.registers, kernel.loads, kernel.stores
        self.spills = kernel.spill_loads + kernel.spill_stores
        self.shared = kernel.shared + dynamic_shared
        self.occupancy = kernel.occupancy(self.threads, dynamic_shared)
        if kernel.stack and not self.spills:
            self.problems.append(f"{kernel.stack} bytes of stack")

    def check(self, *, wide: bool, element_bits: int) -> None:
        """No spills; and on the fast path (`wide`) elements of this size only move 16 bytes at a time."""
        if self.spills:
            self.problems.append(f"{self.spills} accesses to spilled registers")
        for what, counts in (("loads", self.loads), ("stores", self.stores)) if wide else ():
            if not counts[128]:
                self.problems.append(f"no {what} of 128 bits")
            # Narrower ones may be statistics (a few a row, in 32 bits, or 64 for double), and the seed of dropout.
            elements = sum(count for width, count in counts.items() if width <= element_bits)
            if element_bits == 16 and elements > PARAMETERS:
                self.problems.append(f"{elements} {what} of {element_bits} bits or less")
            elif elements > 4 * max(1, counts[128]) and elements > ROW_NUMBERS:
                self.problems.append(f"{elements} {what} of single elements")


PARAMETERS = 2  # weight and bias of a tile of several rows: fewer elements than threads
ROW_NUMBERS = 12  # accesses that a tile may spend on numbers kept for each row


def widths(counts: Counter[int]) -> str:
    return " ".join(f"{count}x{width}" for width, count in sorted(counts.items(), reverse=True))


COLUMNS = (
    "kernel",
    "dtype",
    "columns",
    "target",
    "threads",
    "registers",
    "spills",
    "shared",
    "occupancy",
    "loads",
    "stores",
)


def summary(rows: Sequence[Row]) -> str:
    """A line for each target."""
    lines = [
        "| target | kernels | most registers | spilled accesses | lowest occupancy |",
        "|" + " --- |" * 5,
    ]
    for target in dict.fromkeys(row.target for row in rows):
        of = [row for row in rows if row.target == target]
        occupancies = [row.occupancy for row in of if row.occupancy is not None]
        lowest = f"{100 * min(occupancies):.0f} %" if occupancies else ""
        most, spills = max(row.registers for row in of), sum(row.spills for row in of)
        lines.append(f"| {target} | {len(of)} | {most} | {spills} | {lowest} |")
    return "\n".join(lines)


def table(rows: Sequence[Row]) -> str:
    """Markdown."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + " --- |" * len(COLUMNS)]
    for row in rows:
        occupancy = "" if row.occupancy is None else f"{100 * row.occupancy:.0f} %"
        cells = (
            row.kernel, row.dtype, row.shape, row.target, row.threads, row.registers, row.spills, row.shared,
            occupancy, widths(row.loads), widths(row.stores),
        )  # fmt: skip
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)
