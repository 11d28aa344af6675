"""Find the rank that the others wait for, by each rank's own time per step.

All ranks' steps take the same wall time, since the ranks meet in collectives. But all ranks can see who is late at a
collective: the clock of a step starts when they leave the collective that ends the previous step (in which they agree
to continue). So the times at which they reach the step's collectives are comparable, although the clocks of two hosts
are not. Torch's flight recorder has these times anyway; they are read and exchanged every few seconds. On CUDA it has
the time at which the host issues a collective: it shows a rank whose data or Python is slow, but not a slow GPU.
Torch-free except for the exchange.
"""

from __future__ import annotations

import math
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median

from meshwright.distributed.process.flight import Issued

WINDOW_SEC = 10.0
WINDOW_STEPS = (10, 2000)
"""Steps between two exchanges: about WINDOW_SEC, within these bounds."""
SAMPLED_STEPS = 20
"""Number of last steps that are evaluated, fewer if the recorder has dropped some."""
RATIO = 1.3
SHARE = 0.1
"""A rank is slow if its own time exceeds RATIO times the median, and the difference is SHARE of the step or more."""
IN_A_ROW = 3
"""Consecutive slow windows before a rank is reported."""

Meeting = tuple[tuple[int, ...], int, float]
"""A collective: ranks of its group, its number in that group, and when this rank reached it, in seconds since the
step began.
"""


@dataclass(frozen=True)
class Cycle:
    """A step of one rank, from the end of the collective before it to the end of the one that closes it. Seconds."""

    wall: float
    data: float
    """Part of ``wall`` that the rank waited for its batch."""
    meetings: tuple[Meeting, ...] = ()


@dataclass(frozen=True)
class Said:
    """The report of a rank to the others: its steps by number."""

    host: str
    cycles: Mapping[int, Cycle]


@dataclass(frozen=True)
class OwnTime:
    """Mean seconds of a step of one rank."""

    own: float
    data: float
    wall: float


def own_times(reports: Sequence[Said]) -> list[OwnTime]:
    """Return each rank's times over the steps that all ranks report; empty without such steps."""
    steps = sorted(set.intersection(*(set(one.cycles) for one in reports))) if reports else []
    if not steps:
        return []
    own: list[list[float]] = [[] for _ in reports]
    for step in steps:
        cycles = [one.cycles[step] for one in reports]
        reached: dict[tuple[tuple[int, ...], int], list[float]] = {}
        for cycle in cycles:
            for ranks, number, at in cycle.meetings:
                reached.setdefault((ranks, number), []).append(at)
        last = {key: max(times) for key, times in reached.items()}
        for rank, cycle in enumerate(cycles):
            own[rank].append(cycle.wall - _waited(cycle, last))
    return [
        OwnTime(
            mean(own[rank]),
            mean(one.cycles[step].data for step in steps),
            mean(one.cycles[step].wall for step in steps),
        )
        for rank, one in enumerate(reports)
    ]


def _waited(cycle: Cycle, last: Mapping[tuple[tuple[int, ...], int], float]) -> float:
    """Return the seconds that a rank waited in collectives which others had not reached."""
    waited = free = 0.0
    for i, (ranks, number, at) in enumerate(cycle.meetings):
        all_there = last[ranks, number]
        following = cycle.meetings[i + 1][2] if i + 1 < len(cycle.meetings) else cycle.wall
        # a rank at its next collective long before all reach this one did not wait: this one is asynchronous
        if following >= all_there - 0.2 * (all_there - at) - 0.001:
            waited += max(0.0, all_there - max(at, free))
            free = max(free, all_there)
    return min(waited, cycle.wall)


class Verdict:
    """Reports a rank that has been slow for several windows in a row, once each time that it becomes slow."""

    def __init__(self) -> None:
        self._rank, self._count = -1, 0

    def add(self, times: Sequence[OwnTime], hosts: Sequence[str]) -> str:
        """Add a window, and return the report of a slow rank or ""."""
        rank = max(range(len(times)), key=lambda rank: times[rank].own)
        slow, others = times[rank], [one for other, one in enumerate(times) if other != rank]
        middle = median(one.own for one in others)
        if slow.own <= RATIO * middle or slow.own - middle < SHARE * slow.wall:
            self._rank, self._count = -1, 0
            return ""
        self._count = self._count + 1 if rank == self._rank else 1
        self._rank = rank
        if self._count != IN_A_ROW:
            return ""
        more = slow.data - median(one.data for one in others)
        where = "reading its data" if more > (slow.own - middle) / 2 else "computing, not reading its data"
        return (
            f"rank {rank} (host {hosts[rank]}) takes {_seconds(slow.own)} of its own per step, the median of the others"
            f" {_seconds(middle)}: they wait for it. It spends the difference {where}."
        )


def _seconds(value: float) -> str:
    return f"{value:.2g} s" if value < 10 else f"{value:.0f} s"


class Stragglers:
    """Measures own times in the loop of one rank. Every method is called on all ranks alike.

    Args:
        issued: ``distributed.process.flight.issued``: returns the recorder's entries since a time.
        exchange: returns the reports of all ranks, on every rank.
        now_ns: returns the Unix time.
    """

    def __init__(
        self,
        issued: Callable[[int], Sequence[Issued]],
        exchange: Callable[[Said], Sequence[Said]],
        now_ns: Callable[[], int] = time.time_ns,
    ):
        self._issued, self._exchange, self._now_ns = issued, exchange, now_ns
        self._verdict = Verdict()
        self._cycles: deque[tuple[int, int, int, float]] = deque(maxlen=SAMPLED_STEPS)
        self._begun: int | None = None
        self._data = 0.0
        self._taken, self._window = 0, WINDOW_STEPS[0]
        self.sentence = ""
        """The report of the last ``met``; "" without one."""

    def got_data(self, seconds: float) -> None:
        """Record how long the step waited for its batch."""
        self._data = seconds

    def disturbed(self) -> None:
        """Leave out the next step, since other work than a step (a validation, a save) was done since ``met``."""
        self._begun = None

    def met(self, step: int) -> dict[str, float]:
        """Record that the ranks have just met at the end of ``step``.

        Returns the figures of a window that ends here (then the call is collective), else nothing.
        """
        now = self._now_ns()
        if self._begun is not None:
            self._cycles.append((step, self._begun, now, self._data))
        self._begun = now
        self._taken += 1
        self.sentence = ""
        if self._taken < self._window:
            return {}
        self._taken = 0
        reports = self._exchange(Said(socket.gethostname(), self._remembered()))
        self._cycles.clear()
        self._begun = None  # the exchange is not part of the next step
        return self._judge(reports)

    def _remembered(self) -> dict[int, Cycle]:
        if not self._cycles:
            return {}
        seen = self._issued(0)
        found = {}
        for step, begun, end, data in self._cycles:
            inside = [one for one in seen if begun <= one.created_ns < end]
            if inside and seen[0].created_ns < begun:  # else the recorder may have dropped part of it
                meetings = tuple((one.ranks, one.number, (one.created_ns - begun) / 1e9) for one in inside)
                found[step] = Cycle((end - begun) / 1e9, data, meetings)
        return found

    def _judge(self, reports: Sequence[Said]) -> dict[str, float]:
        times = own_times(reports)
        if not times:
            return {}
        low, high = WINDOW_STEPS
        # from figures that all ranks have, since they must choose the same window
        self._window = min(high, max(low, math.ceil(WINDOW_SEC / max(1e-6, mean(one.wall for one in times)))))
        self.sentence = self._verdict.add(times, [one.host for one in reports])
        own = [one.own for one in times]
        return {"own_time_max": max(own), "own_time_mean": mean(own), "slowest_rank": own.index(max(own))}
