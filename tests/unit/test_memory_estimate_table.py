"""What a pipeline's ranks keep, put together from their stages; and how a plan shows what was foreseen."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from meshwright import Layout, plan
from meshwright.models.decoder_config import DecoderConfig
from meshwright.planning.explain import table
from meshwright.planning.memory import step as estimate
from meshwright.planning.memory.step import MemoryEstimate, MemoryUse, StageMemory, not_estimated, over_ranks
from meshwright.planning.pipeline.schedules.orders import schedule_kind
from meshwright.planning.pipeline.schedules.simulate import peak_live
from meshwright.planning.values import Batch

MIB = 1 << 20
MODEL = DecoderConfig(256, 64, 4, 4, 2, 128, 64)


def stage(kept: int, forward: int, backward: int) -> StageMemory:
    return StageMemory(*(Counter({MemoryUse.ACTIVATIONS: size}) for size in (kept, forward, backward)))


def whole_schedules():
    for name in ("gpipe", "1f1b", "interleaved_1f1b", "looped_bfs"):
        for ranks, microbatches in ((2, 4), (4, 8)):
            yield pytest.param(name, ranks, microbatches, id=f"{name}, {ranks} ranks, {microbatches}")


@pytest.mark.parametrize(("name", "ranks", "microbatches"), list(whole_schedules()))
def test_as_many_microbatches_are_kept_as_the_schedule_has_in_flight(name, ranks, microbatches):
    kind = schedule_kind(name)
    schedule = kind.build(ranks, microbatches, 2 if kind.loops else 1)
    alike = dict.fromkeys(range(schedule.stages), stage(10, 10, 10))
    assert [held[MemoryUse.ACTIVATIONS] for held in over_ranks(alike, schedule)] == [
        10 * live for live in peak_live(schedule)
    ]


def test_the_first_rank_of_1f1b_keeps_one_for_each_rank_and_the_last_one():
    schedule = schedule_kind("1f1b").build(4, 8, 1)
    stages = {number: stage(10, 12, 17) for number in range(4)}
    assert [held[MemoryUse.ACTIVATIONS] for held in over_ranks(stages, schedule)] == [47, 37, 27, 17]


def test_a_count_of_what_is_in_flight_that_is_off_is_seen(monkeypatch):
    """Mutant: a forward keeps nothing for its backward."""
    moments = estimate._moments

    def leaking(stages, actions):
        return moments({number: replace(s, kept=Counter()) for number, s in stages.items()}, actions)

    monkeypatch.setattr(estimate, "_moments", leaking)
    with pytest.raises(AssertionError):
        test_the_first_rank_of_1f1b_keeps_one_for_each_rank_and_the_last_one()


def test_kinds_have_their_peaks_apart():
    both = StageMemory(
        {MemoryUse.ACTIVATIONS: 3},
        {MemoryUse.ACTIVATIONS: 5, MemoryUse.LOGITS: 1},
        {MemoryUse.ACTIVATIONS: 4, MemoryUse.LOGITS: 7},
    )
    (held,) = over_ranks({0: both}, schedule_kind("gpipe").build(1, 1, 1))
    assert held == {MemoryUse.ACTIVATIONS: 5, MemoryUse.LOGITS: 7}


SAYS = {MemoryUse.ACTIVATIONS: 3 * MIB, MemoryUse.LOGITS: 2 * MIB}


def test_a_plan_shows_what_was_estimated_and_adds_it_up():
    made, batch = plan(MODEL, Layout(dp_shard=4)), Batch(8, 32)
    bare, whole = table(made, batch), table(made, batch, MemoryEstimate((SAYS,)))
    assert (
        "memory of each rank without activations (1 microbatch)" in bare
        and "memory of each rank (1 microbatch)" in whole
    )
    assert [line.split()[0] for line in whole.splitlines() if line.endswith(" MiB")][-3:-1] == ["activations", "logits"]
    assert "by rank of the pipeline" not in whole


def test_a_plan_shows_every_rank_of_a_pipeline():
    made = plan(MODEL, Layout(dp_shard=1, pp=2))
    said = table(made, Batch(8, 32), MemoryEstimate((SAYS, {MemoryUse.ACTIVATIONS: MIB})))
    assert "activations and logits by rank of the pipeline  0: 5 MiB, 1: 1 MiB" in said


def test_a_plan_says_why_something_is_not_estimated():
    made = plan(MODEL, Layout(dp_shard=1), techniques={"compile": True})
    said = table(made, Batch(8, 32), MemoryEstimate((), not_estimated(made)))
    assert "without activations" in said and said.endswith(
        "  activations and logits are not estimated: the compiler chooses what compiled blocks save"
    )


def test_what_is_done_otherwise_on_a_gpu_is_not_estimated():
    cut = plan(MODEL, Layout(dp_shard=1, tp=2))
    assert cut.tensor is not None and not not_estimated(cut)
    assert "async_tensor_parallel" in not_estimated(
        replace(cut, tensor=replace(cut.tensor, async_tensor_parallel=True))
    )
    waiting = plan(MODEL, Layout(dp_shard=1), techniques={"activation_checkpointing": "offload"})
    assert not not_estimated(waiting) and "host memory" in not_estimated(replace(waiting, device="cuda"))


def test_the_rank_that_holds_most_stands_for_all():
    little, much = {MemoryUse.ACTIVATIONS: 1}, {MemoryUse.ACTIVATIONS: 2, MemoryUse.LOGITS: 1}
    assert (
        MemoryEstimate((little, much)).of() == much
        and MemoryEstimate((little, much)).of(0) == little
        and MemoryEstimate(()).of(3) == {}
    )
