"""The fastest choice for a chain of blocks that fits a budget.

Backward of block i runs while what the blocks before it keep is there. With `saved` and `peak` of what was chosen for each
block, a step peaks at the largest of ``standing[i] + saved[0] + ... + saved[i - 1] + peak[i]``, and of
``head + saved[0] + ... + saved[n - 1]`` for what comes after the blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Option:
    """A choice for `length` blocks in a row.

    Attributes:
        name: of the choice.
        length: blocks that it is for; more than one: a segment.
        saved: bytes between forward and backward.
        peak: most bytes while its forward or backward runs, with those saved.
        time: of forward and backward, in whole nanoseconds, so that sums are exact.
    """

    name: str
    length: int
    saved: int
    peak: int
    time: int


@dataclass(frozen=True)
class Chain:
    """`options[i]` begin at block i; `standing[i]`: bytes that other things than blocks take while block i is run."""

    options: Sequence[Sequence[Option]]
    standing: Sequence[int]
    head: int

    def peak(self, chosen: Sequence[Option]) -> int:
        place = prefix = most = 0
        for option in chosen:
            most = max(most, self.standing[place] + prefix + option.peak)
            prefix += option.saved
            place += option.length
        return max(most, self.head + prefix)

    def solve(self, budget: int) -> list[Option] | None:
        """The fastest choices whose peak is at most `budget`, of equally fast ones those that keep least; None: none fit."""
        count = len(self.options)
        # States at each place: (saved before, time, state before, option); none is both larger and slower than another.
        states: list[list[_State]] = [[] for _ in range(count + 1)]
        states[0] = [(0, 0, None, None)]
        for place in range(count):
            states[place] = _frontier(states[place])
            for state in states[place]:
                prefix, time = state[:2]
                for option in self.options[place]:
                    if prefix + self.standing[place] + option.peak <= budget:
                        states[place + option.length].append(
                            (prefix + option.saved, time + option.time, state, option)
                        )
        ends = [state for state in _frontier(states[count]) if state[0] + self.head <= budget]
        if not ends:
            return None
        chosen: list[Option] = []
        state = min(ends, key=lambda s: (s[1], s[0]))
        while state[3] is not None:
            chosen.append(state[3])
            state = state[2]
        return chosen[::-1]

    def smallest(self) -> int | None:
        """The smallest budget that can be met; None where no choices make up the chain."""
        least = self._least(None)
        if least is None:
            return None
        low, high = -1, self.peak(least)
        while high - low > 1:
            middle = (low + high) // 2
            chosen = self._least(middle)
            if chosen is None:
                low = middle
            else:
                high = middle
        return high

    def _least(self, budget: int | None) -> list[Option] | None:
        """Choices that keep least, each within the budget: whatever else fits, these do."""
        count = len(self.options)
        best: list[tuple[int, list[Option]] | None] = [None] * (count + 1)
        best[0] = (0, [])
        for place in range(count):
            here = best[place]
            if here is None:
                continue
            prefix, chosen = here
            for option in self.options[place]:
                if budget is not None and prefix + self.standing[place] + option.peak > budget:
                    continue
                there = best[place + option.length]
                if there is None or prefix + option.saved < there[0]:
                    best[place + option.length] = prefix + option.saved, [*chosen, option]
        end = best[count]
        if end is None or (budget is not None and end[0] + self.head > budget):
            return None
        return end[1]


_State = tuple[int, int, Any, Option | None]


def _frontier(states: list[_State]) -> list[_State]:
    kept: list[_State] = []
    for state in sorted(states, key=lambda s: (s[0], s[1])):
        if not kept or state[1] < kept[-1][1]:
            kept.append(state)
    return kept
