"""Pipeline schedules as data: whole, free of deadlocks, as torch orders them, and as good as their papers promise."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.schedule_tables import write_schedule
from torch.distributed.pipelining import schedules as torchs

from meshwright import ConfigError
from meshwright.planning.pipeline.orders import KINDS, forwards, schedule_kind
from meshwright.planning.pipeline.schedule import (
    Action,
    Content,
    Message,
    PipelineSchedule,
    Receive,
    Send,
    Work,
    actions_in,
    check_whole,
    message_after,
    message_before,
    peak_live,
    programs,
    read_schedule,
    simulate,
)

RANKS = st.integers(2, 6)
MICROBATCHES = st.integers(1, 20)


def build(name: str, ranks: int, microbatches: int, per_rank: int = 0) -> PipelineSchedule:
    kind = KINDS[name]
    return kind.build(ranks, kind.legal(microbatches, ranks), per_rank or kind.per_rank(99, ranks))


@pytest.mark.first
@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=40)
@given(ranks=RANKS, microbatches=MICROBATCHES, data=st.data())
def test_every_stage_does_every_microbatch_once_and_nobody_waits_for_ever(name, ranks, microbatches, data):
    per_rank = data.draw(st.integers(1, 4)) if KINDS[name].loops else 0
    check_whole(build(name, ranks, microbatches, per_rank))


@pytest.mark.first
@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=25)
@given(ranks=RANKS, microbatches=MICROBATCHES)
def test_messages_meet_even_where_a_send_waits_for_its_receive(name, ranks, microbatches):
    """The worst back end: both sides of a message wait for each other, and a pair's messages go in one order."""
    schedule = build(name, ranks, microbatches)
    played_with_rendezvous(programs(schedule))
    given = [step.message for program in programs(schedule) for step in program if isinstance(step, Send)]
    needed = [m for actions in schedule.ranks for a in actions if (m := message_before(a, schedule.stages)) is not None]
    across = [
        m
        for m in needed
        if schedule.rank_of[m.stage]
        != schedule.rank_of[m.stage - 1 if m.content is Content.ACTIVATION else m.stage + 1]
    ]
    assert sorted(given) == sorted(across)


def played_with_rendezvous(steps: tuple) -> None:
    places, moved = [0] * len(steps), True
    arrived: set[tuple[int, Message]] = set()
    while moved:
        moved = False
        for rank, program in enumerate(steps):
            while places[rank] < len(program):
                step = program[places[rank]]
                if isinstance(step, Action):
                    places[rank] += 1
                elif isinstance(step, Send):
                    other = steps[step.peer][places[step.peer]] if places[step.peer] < len(steps[step.peer]) else None
                    if not (isinstance(other, Receive) and other.message == step.message and other.peer == rank):
                        break
                    arrived.add((step.peer, step.message))
                    places[rank] += 1
                    places[step.peer] += 1
                else:
                    break
                moved = True
    assert all(place == len(program) for place, program in zip(places, steps, strict=True))


TORCHS = {
    "looped_bfs": torchs.ScheduleLoopedBFS,
    "interleaved_1f1b": torchs.ScheduleInterleaved1F1B,
    "interleaved_zero_bubble": torchs.ScheduleInterleavedZeroBubble,
    "zbv_zero_bubble": torchs.ScheduleZBVZeroBubble,
    "dualpipe_v": torchs.ScheduleDualPipeV,
}


def of_torch(name: str, ranks: int, microbatches: int) -> PipelineSchedule:
    """What torch itself orders, without process groups."""
    kind = KINDS[name]
    per_rank = kind.per_rank(99, ranks)
    rounds = max(1, microbatches // ranks)
    stub: Any = SimpleNamespace(
        pp_group_size=ranks,
        n_local_stages=per_rank,
        _stages=[None] * per_rank,
        _num_stages=ranks * per_rank,
        num_stages=ranks * per_rank,
        _n_microbatches=microbatches,
        n_microbatches=microbatches,
        number_of_rounds=rounds,
        microbatches_per_round=microbatches // rounds,
        stage_index_to_group_rank=dict(enumerate(kind.rank_of(ranks, per_rank))),
    )
    orders = []
    for rank in range(ranks):
        actions = TORCHS[name]._calculate_single_rank_operations(stub, rank)
        orders.append(tuple(a for action in actions if action is not None for a in _flat(action)))
    return PipelineSchedule(name, tuple(orders), kind.rank_of(ranks, per_rank), microbatches)


def _flat(action: Any) -> Iterator[Action]:
    for one in action.sub_actions or (action,):
        yield from actions_in(str(one))


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (2, 8), (4, 8), (4, 16)])
@pytest.mark.parametrize("name", TORCHS)
def test_no_order_takes_longer_or_keeps_more_than_torchs(name, ranks, microbatches):
    ours, theirs = build(name, ranks, microbatches), of_torch(name, ranks, microbatches)
    check_whole(theirs)
    assert simulate(ours).makespan <= simulate(theirs).makespan
    assert max(peak_live(ours)) <= max(peak_live(theirs))


@pytest.mark.parametrize("name", ["interleaved_1f1b", "zbv_zero_bubble"])
def test_where_nothing_is_left_to_choose_the_order_is_torchs(name):
    assert build(name, 4, 8).ranks == of_torch(name, 4, 8).ranks


@settings(max_examples=40)
@given(ranks=RANKS, microbatches=st.integers(1, 30))
def test_1f1b_keeps_what_the_stages_behind_it_need(ranks, microbatches):
    """arXiv 2104.04473: at most as many microbatches as stages are left; the bubble is that of GPipe."""
    schedule = build("1f1b", ranks, microbatches)
    assert peak_live(schedule) == tuple(min(microbatches, ranks - rank) for rank in range(ranks))
    expected = (ranks - 1) / (microbatches + ranks - 1)
    assert simulate(schedule).bubble == pytest.approx(expected) == simulate(build("gpipe", ranks, microbatches)).bubble


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_zero_bubble_v_waits_only_at_its_ends_and_keeps_no_more_than_1f1b(ranks):
    """arXiv 2405.15362: in half-size stages 2 · ranks microbatches at most, and with enough of them hardly a bubble."""
    schedule = build("zbv_zero_bubble", ranks, 4 * ranks)
    assert max(peak_live(schedule)) <= 2 * ranks
    assert simulate(schedule).makespan <= 6 * 4 * ranks + ranks  # six units of work for each microbatch


def test_names_are_ours_or_torchs():
    for ours, torchs_name in (
        ("1f1b", "1F1B"),
        ("interleaved_1f1b", "Interleaved1F1B"),
        ("zbv_zero_bubble", "ScheduleZBVZeroBubble"),
    ):
        assert schedule_kind(torchs_name) is KINDS[ours]
    with pytest.raises(
        ConfigError, match=r"'1f2b': legal are gpipe, 1f1b, .* or a \.csv file of actions\. Did you mean '1f1b'"
    ):
        schedule_kind("1f2b")


def test_forwards_alone_go_stage_by_stage():
    schedule = forwards((0, 1, 1, 0), 2)
    assert [str(a) for a in schedule.ranks[0]] == ["0F0", "0F1", "3F0", "3F1"]
    simulate(schedule)


@pytest.mark.parametrize("name", KINDS)
def test_a_table_is_read_as_it_was_written(tmp_path, name):
    made = build(name, 2, 4)
    write_schedule(made, tmp_path / "s.csv")
    read = read_schedule(tmp_path / "s.csv")
    assert (read.ranks, read.rank_of, read.microbatches) == (made.ranks, made.rank_of, made.microbatches)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0F0,0X0\n1F0,1B0\n", "row 1: '0X0' is no action: write stage, one of F B I W, and microbatch"),
        ("0F0,0B0\n1F0\n", "stage 1 needs 1F0 and either 1B0 or both 1I0 and 1W0; rank 1 has 1F0"),
        ("0F0,0B0,0B0\n1F0,1B0\n", "0B0 stands there twice"),
        ("0B0,0F0\n1F0,1B0\n", "the ranks would wait for each other for ever: rank 0 at 0B0, rank 1 at 1F0"),
        ("0F0,0B0\n2F0,2B0\n", "it has stages up to 2, but no action of stage 1"),
        ("", "it has 0 rows"),
    ],
)
def test_a_table_that_cannot_be_done_is_refused(tmp_path, text, words):
    (tmp_path / "s.csv").write_text(text)
    with pytest.raises(ConfigError) as found:
        read_schedule(tmp_path / "s.csv")
    assert words in str(found.value)


def test_torchs_overlapped_actions_are_two():
    assert actions_in("(0F3;1B0)OVERLAP_F_B") == [Action(0, Work.FORWARD, 3), Action(1, Work.BACKWARD, 0)]


def test_what_an_action_gives_another_needs():
    schedule = build("zbv_zero_bubble", 2, 4)
    for actions in schedule.ranks:
        for action in actions:
            message = message_after(action, schedule.stages)
            if message is not None:
                takers = [
                    a for others in schedule.ranks for a in others if message_before(a, schedule.stages) == message
                ]
                assert len(takers) == 1
