"""The fastest choice for a chain of blocks that fits a budget.

Backward of block i runs while what the blocks before it keep is there. With `saved` and `peak` of what was chosen for each
block, a step peaks at the largest of ``standing[i] + saved[0] + ... + saved[i - 1] + peak[i]``, and of ``head + saved[0] + ... +
saved[n - 1]`` for what comes after the blocks. In forward `casts` of the blocks before are there too.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
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
        casts: bytes more than those saved that stay until the forward of the model ends.
        forward: most bytes while its forward runs, with both.
    """

    name: str
    length: int
    saved: int
    peak: int
    time: int
    casts: int = 0
    forward: int = 0


@dataclass(frozen=True)
class Chain:
    """`options[i]` begin at block i.

    Attributes:
        standing: bytes that other things than blocks take while a block's backward is run.
        head: the most that they take in a step.
        before, forward: the same while forward runs.
    """

    options: Sequence[Sequence[Option]]
    standing: Sequence[int]
    head: int
    before: int = 0
    forward: int = 0

    def peak(self, chosen: Sequence[Option]) -> int:
        place = saved = casts = most = 0
        for option in chosen:
            most = max(
                most,
                self.standing[place] + saved + option.peak,
                self.before + saved + casts + option.forward,
            )
            saved += option.saved
            casts += option.casts
            place += option.length
        return max(most, self.head + saved, self.forward + saved + casts)

    def solve(self, budget: float) -> list[Option] | None:
        """The fastest choices whose peak is at most `budget`, of equally fast ones those that keep least; None: none fit."""
        found = self._best(budget, True, False)  # far fewer states, and enough where casts are small
        return found if found is None or self.peak(found) <= budget else self._best(budget, True, True)

    def smallest(self) -> int | None:
        """The smallest budget that can be met; None where no choices make up the chain."""
        found = self._best(math.inf, False, True)
        if found is None:
            return None
        low, high = -1, self.peak(found)
        while high - low > 1:
            middle = (low + high) // 2
            if self._best(middle, False, True) is None:
                low = middle
            else:
                high = middle
        return high

    def _best(self, budget: float, timed: bool, cast: bool) -> list[Option] | None:
        """As :meth:`solve`. Not `timed`: any that fit. Not `cast`: of those that fit without what is cast."""
        count = len(self.options)
        states: list[list[_State]] = [[] for _ in range(count + 1)]
        states[0] = [(0, 0, 0, None, None)]
        for place in range(count):
            options = [
                (budget - self.standing[place] - o.peak, budget - self.before - o.forward, o)
                for o in self.options[place]
            ]
            for state in _frontier(states[place]):
                saved, casts, time = state[:3]
                for room, room_in_forward, o in options:
                    if saved <= room and saved + casts <= room_in_forward:
                        sums = saved + o.saved, casts + cast * o.casts, time + timed * o.time
                        states[place + o.length].append((*sums, state, o))
        ends = [
            state
            for state in _frontier(states[count])
            if state[0] + max(self.head, self.forward + state[1]) <= budget
        ]
        if not ends:
            return None
        chosen: list[Option] = []
        state = min(ends, key=lambda s: (s[2], s[0]))
        while state[4] is not None:
            chosen.append(state[4])
            state = state[3]
        return chosen[::-1]


# At a place: saved before, cast before, time, the state that it came from, by which option.
_State = tuple[int, int, int, Any, Option | None]


def _frontier(states: list[_State]) -> list[_State]:
    """Without those that another is no worse than in all three respects."""
    kept: list[_State] = []
    # Of those kept, which have saved no more: casts in order, and the shortest time with no more casts, which falls.
    casts: list[int] = []
    times: list[int] = []
    for state in sorted(states, key=lambda s: s[:3]):
        _, cast, time = state[:3]
        behind = bisect_right(casts, cast)
        if behind and times[behind - 1] <= time:
            continue
        kept.append(state)
        start = end = bisect_left(casts, cast)
        while end < len(times) and times[end] >= time:
            end += 1
        casts[start:end], times[start:end] = [cast], [time]
    return kept
