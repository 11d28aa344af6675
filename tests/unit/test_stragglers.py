"""Own time: what a rank waited for others is not its own, in whatever order and group they meet.

And a slow rank is named, once.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.distributed.process.flight import Issued
from meshwright.training.health.stragglers import (
    IN_A_ROW,
    SAMPLED_STEPS,
    Cycle,
    OwnTime,
    Said,
    Stragglers,
    Verdict,
    own_times,
)

WORLD = (0, 1, 2, 3)
PAIRS = [((0, 1), (0, 2)), ((0, 1), (1, 3)), ((2, 3), (0, 2)), ((2, 3), (1, 3))]
"""Of each rank, its groups on a mesh of 2 × 2."""


def simulate(own, plan, transfer=0.002):
    """The cycles of ranks that compute ``own[rank][k]`` seconds before their k-th collective, in the groups that
    ``plan[rank]`` names.

    Returns (cycles, seconds of own work): a small clockwork of its own, with true clocks.
    """
    at, meetings, numbers = [0.0] * len(own), [[] for _ in own], {}
    for k in range(len(plan[0])):
        for rank in range(len(own)):
            at[rank] += own[rank][k]
        arrived = list(at)
        for group in {plan[rank][k] for rank in range(len(own))}:
            numbers[group] = numbers.get(group, 0) + 1
            for rank in group:
                meetings[rank].append((group, numbers[group], arrived[rank]))
                at[rank] = max(arrived[member] for member in group) + transfer
    return [Cycle(at[rank], 0.0, tuple(meetings[rank])) for rank in range(len(own))]


@settings(deadline=None, max_examples=150)
@given(st.lists(st.lists(st.floats(0.01, 1.0), min_size=4, max_size=4), min_size=4, max_size=4), st.booleans())
def test_own_time_is_what_a_rank_did_itself_where_every_collective_blocks(own, is_mesh):
    # the last collective is the one that ends a step: there all meet
    plan = [[*(PAIRS[rank][k % 2] for k in range(3)), WORLD] if is_mesh else [WORLD] * 4 for rank in range(4)]
    cycles = simulate(own, plan)
    times = own_times([Said(f"h{rank}", {7: cycle}) for rank, cycle in enumerate(cycles)])
    for rank in range(4):
        assert times[rank].own == pytest.approx(sum(own[rank]) + 4 * 0.002, abs=1e-6)
        assert times[rank].wall == cycles[rank].wall


def test_collectives_that_nobody_waits_for_at_once_are_not_counted_as_waiting():
    # gradients in buckets: issued at 1.0, 1.1, ... while the backward goes on; rank 3 was 0.9 s late from the start
    def rank(late):
        buckets = [(WORLD, number, 0.5 + late + number / 10) for number in range(1, 6)]
        return Cycle(2.0, 0.0, (*buckets, (WORLD, 6, 1.95)))

    times = own_times([Said("h", {1: rank(0.9 if number == 3 else 0.0)}) for number in range(4)])
    assert times[3].own == pytest.approx(2.0) and all(one.own == pytest.approx(1.1) for one in times[:3])


def test_a_wait_is_counted_once_where_two_of_them_overlap():
    # it left the first a little before the last had come, by its clock
    early = Cycle(1.6, 0.0, ((WORLD, 1, 0.5), (WORLD, 2, 0.95)))
    late = Cycle(1.6, 0.0, ((WORLD, 1, 1.0), (WORLD, 2, 1.5)))
    assert [
        one.own for one in own_times([Said("h", {1: cycle}) for cycle in (early, early, early, late)])
    ] == pytest.approx([0.6] * 3 + [1.6])


def test_steps_that_one_rank_forgot_count_for_none():
    cycle = Cycle(1.0, 0.25, ((WORLD, 1, 0.5),))
    said = [
        Said("h", {1: cycle, 2: Cycle(9.0, 0.0)}),
        Said("h", {1: cycle}),
        Said("h", {1: cycle, 3: cycle}),
        Said("h", {1: cycle}),
    ]
    assert own_times(said) == [OwnTime(1.0, 0.25, 1.0)] * 4
    assert own_times([*said[:3], Said("h", {})]) == [] and own_times([]) == []


def window(*own, data=None, wall=2.0):
    return [OwnTime(seconds, (data or {}).get(rank, 0.01), wall) for rank, seconds in enumerate(own)]


def test_a_rank_is_named_when_it_was_slow_for_several_windows_in_a_row_and_once():
    verdict, hosts = Verdict(), ["a", "a", "b", "node7"]
    slow = window(0.9, 0.95, 0.9, 1.8, data={3: 0.92})
    said = [verdict.add(slow, hosts) for _ in range(IN_A_ROW + 3)]
    assert [bool(text) for text in said] == [False, False, True, False, False, False]
    assert said[2] == (
        "rank 3 (host node7) takes 1.8 s of its own per step, the median of the others 0.9 s: they wait for it."
        " It spends the difference reading its data."
    )
    assert verdict.add(window(0.9, 0.9, 0.9, 0.9), hosts) == ""
    again = [verdict.add(window(0.9, 0.9, 0.9, 1.8), hosts) for _ in range(IN_A_ROW)]
    assert again[-1].endswith("computing, not reading its data.")


@pytest.mark.parametrize(
    "windows",
    [
        [window(1.0, 1.0, 1.0, 1.29)] * 9,  # not slow enough
        [window(0.01, 0.01, 0.01, 0.02)] * 9,  # slow, but nobody loses by it
        [window(1.0, 1.0, 1.0, 1.8), window(1.0, 1.0, 1.8, 1.0)] * 9,  # now one, now another
        [window(1.0, 1.0, 1.0, 1.8), window(1.0, 1.0, 1.0, 1.8), window(1.0, 1.0, 1.0, 1.0)] * 9,
    ],
)
def test_nobody_is_named_for_less(windows):
    verdict = Verdict()
    assert [verdict.add(times, ["h"] * 4) for times in windows] == [""] * len(windows)


@dataclass
class Clock:
    now: int = 1_000_000_000

    def __call__(self):
        return self.now


def test_only_whole_undisturbed_steps_that_the_recorder_remembers_are_told():
    clock, told, kept = Clock(), [], []
    watcher = Stragglers(
        lambda since: [one for one in kept if one.created_ns >= since],
        lambda said: told.append(said) or [said, said],
        clock,
    )
    for step in range(1, 11):
        if step == 4:
            watcher.disturbed()
        clock.now += 1_000_000_000
        kept.append(Issued("dp_shard", WORLD, step, clock.now - 500_000_000))
        watcher.got_data(0.25)
        if step == 10:
            del kept[:2]  # the recorder's room is limited
        figures = watcher.met(step)
        assert bool(told) == (step == 10)
    assert set(told[0].cycles) == {5, 6, 7, 8, 9, 10}  # 3 begins before what is remembered, 4 was disturbed
    assert told[0].cycles[7] == Cycle(1.0, 0.25, ((WORLD, 7, 0.5),))
    assert figures["slowest_rank"] == 0 and figures["own_time_max"] == pytest.approx(1.0)
    assert watcher._window == 10 and SAMPLED_STEPS >= 10
