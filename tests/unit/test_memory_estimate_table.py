"""How a plan shows the memory that a dry run estimated."""

from __future__ import annotations

from dataclasses import replace

from meshwright import Layout, plan
from meshwright.distributed.memory.dry_run import along_pipeline
from meshwright.models.decoder_config import DecoderConfig
from meshwright.planning.explain import table
from meshwright.planning.memory import MemoryEstimate, MemoryUse, RankMemory, assumptions
from meshwright.planning.pipeline.schedule import peak_live
from meshwright.planning.values import Batch

MIB = 1 << 20
MODEL = DecoderConfig(256, 64, 4, 4, 2, 128, 64)


def memory(**sizes: int) -> RankMemory:
    held = {MemoryUse(kind): size * MIB for kind, size in sizes.items()}
    return RankMemory(held, held)


MUCH = RankMemory(
    {MemoryUse.PARAMETERS: 4 * MIB, MemoryUse.ACTIVATIONS: 3 * MIB, MemoryUse.LOGITS: 2 * MIB},
    {MemoryUse.PARAMETERS: 4 * MIB, MemoryUse.ACTIVATIONS: 1 * MIB, MemoryUse.LOGITS: 2 * MIB},
)


def test_a_plan_shows_what_was_estimated_and_adds_up_what_is_there_at_one_time():
    made, batch = plan(MODEL, Layout(dp_shard=4)), Batch(8, 32)
    bare, whole = table(made, batch), table(made, batch, MemoryEstimate((MUCH,)))
    assert "memory of each rank without activations (1 microbatch)" in bare
    assert "memory of each rank (1 microbatch)" in whole and "by rank of the pipeline" not in whole
    rows = {line.split()[0]: line.split() for line in whole.splitlines() if line.endswith(" MiB")}
    assert rows["activations"][-4:] == ["3", "MiB", "1", "MiB"] and rows["logits"][-4:] == ["2", "MiB", "2", "MiB"]
    assert rows["together"][-2:] == ["7", "MiB"], "not the 9 MiB of all kinds at their own peaks"


def test_a_plan_shows_every_rank_of_a_pipeline_and_the_fullest_in_detail():
    made = plan(MODEL, Layout(dp_shard=1, pp=2))
    said = table(made, Batch(8, 32), MemoryEstimate((memory(activations=1), memory(activations=5))))
    assert "at the peak, by rank of the pipeline  0: 1 MiB, 1: 5 MiB" in said
    assert "memory of rank 1 of the pipeline" in said


def test_a_range_is_shown_with_its_reason():
    made = plan(MODEL, Layout(dp_shard=1), techniques={"compile": True})
    said = table(made, Batch(8, 32), MemoryEstimate((MUCH,), least=(5 * MIB,), notes=tuple(assumptions(made))))
    assert "5 MiB to 7 MiB" in said and "memory: the compiler chooses what compiled blocks keep" in said


def test_a_plan_says_why_something_is_not_estimated():
    made = plan(MODEL, Layout(dp_shard=1))
    said = table(made, Batch(8, 32), MemoryEstimate((), "its forward looks at values"))
    assert "without activations" in said
    assert said.endswith("  activations and logits are not estimated: its forward looks at values")


def test_assumptions_are_about_what_a_plan_has():
    cut = plan(MODEL, Layout(dp_shard=1, tp=2))
    assert cut.tensor is not None and not list(assumptions(cut))
    overlapping = replace(cut, tensor=replace(cut.tensor, async_tensor_parallel=True))
    assert "async_tensor_parallel" in "".join(assumptions(overlapping))
    assert "fragmentation" in "".join(assumptions(replace(cut, device="cuda")))


def test_the_rank_that_holds_most_stands_for_all():
    little, much = memory(activations=1), memory(activations=2, logits=1)
    assert MemoryEstimate((little, much)).of() is much and MemoryEstimate((little, much)).of(0) is little
    assert MemoryEstimate(()).of(3).total == 0


def test_ranks_that_are_not_run_lie_on_the_line_of_what_they_hold():
    """With 1F1B the first ranks hold most microbatches; a rank is said to hold 10 MiB for each."""
    made = plan(replace(MODEL, n_layers=12), Layout(dp_shard=1, pp=6))
    assert made.pipeline is not None
    pipeline, runs = made.pipeline, []

    def run(rank: int, microbatches: int) -> RankMemory:
        runs.append((rank, microbatches))
        return memory(activations=10 * peak_live(pipeline.order(microbatches))[rank], communication=microbatches)

    found = along_pipeline(pipeline, 40, run)
    assert [held.peak[MemoryUse.ACTIVATIONS] // MIB for held in found] == [60, 50, 40, 30, 20, 10]
    assert [held.peak[MemoryUse.COMMUNICATION] // MIB for held in found] == [40] * 6
    assert {rank for rank, _ in runs} == {0, 1, 4, 5} and max(number for _, number in runs) < 40
