"""Rehearsed seconds and bytes stand in a forecast for those that it would foresee."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from meshwright.cli.main import main
from meshwright.core.errors import ConfigError
from meshwright.introspection.cluster import Cluster
from meshwright.introspection.facts import model_facts
from meshwright.introspection.source import as_module
from meshwright.models.decoder_config import SIZES
from meshwright.planning.build import plan
from meshwright.planning.layout import Layout
from meshwright.planning.values import Batch
from meshwright.simulation.cards import Group, machines, message_s
from meshwright.simulation.from_model import job_of_plan
from meshwright.simulation.step_memory import (
    MESSAGES,
    RehearsedRank,
    rehearsed_memory,
    rehearsed_time,
    step_memory,
)
from meshwright.simulation.step_time import Cost, Kinds, optimizer_seconds, rank_costs, step_time
from meshwright.training.rehearsal import Rehearsal, digest, to_json

FACTS = model_facts(as_module(SIZES["8B"]))
BATCH = Batch(64, 4096, 1, 128256)
CARDS = machines("h100", 16)
LAYOUTS = [Layout(dp_shard=16), Layout(dp_shard=8, tp=2), Layout(pp=2, dp_shard=4, tp=2), Layout(pp=4, dp_shard=4)]


def job_of(layout: Layout):
    made = plan(FACTS, layout, batch=BATCH, cluster=Cluster(16, 8, "cuda"))
    return job_of_plan(FACTS, made, BATCH, CARDS)


def foreseen_ranks(job, *, messages: bool, times: float = 1.0) -> list[RehearsedRank]:
    """Ranks that take ``times`` as long as is foreseen of them."""
    kinds, found = Kinds(job), []
    for place in range(job.layout.pp):
        seconds = optimizer_seconds(job)
        for costs in rank_costs(job, kinds, place):
            seconds += job.microbatches * sum(s for cost, s in costs.items() if messages or cost not in MESSAGES)
        found.append(RehearsedRank(place, times * seconds, 1e9 * (1 + place), messages))
    return found


@pytest.mark.parametrize("messages", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_ranks_that_take_the_foreseen_seconds_change_nothing(layout, messages):
    job = job_of(layout)
    foreseen = step_time(job)
    found = rehearsed_time(job, foreseen_ranks(job, messages=messages))
    beside = foreseen.costs.get(Cost.DATA, 0.0) if messages else 0.0  # a rank's seconds have these too
    assert found.seconds == pytest.approx(foreseen.seconds - beside, rel=1e-9)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_ranks_twice_as_slow_take_a_step_twice_as_long_but_for_messages(layout):
    job = job_of(layout)
    foreseen, found = step_time(job), rehearsed_time(job, foreseen_ranks(job, messages=True, times=2.0))
    sends = foreseen.costs.get(Cost.PIPELINE, 0.0)
    twice = 2 * (foreseen.seconds - foreseen.costs.get(Cost.DATA, 0.0))
    assert twice - 2 * sends - 1e-9 <= found.seconds <= twice + 1e-9


def test_the_slowest_rank_of_each_place_counts():
    job = job_of(LAYOUTS[2])
    ranks = foreseen_ranks(job, messages=True)
    slow = [*ranks, replace(ranks[1], seconds=3 * ranks[1].seconds, mem_bytes=7e9), ranks[1]]
    assert rehearsed_time(job, slow).seconds > 2 * rehearsed_time(job, ranks).seconds
    memory, foreseen = rehearsed_memory(job, slow), step_memory(job)
    assert memory.rank == 1 and memory.parts()["rehearsed"] == 7e9 and memory.context == foreseen.context
    assert memory.total == pytest.approx(7e9 + memory.context + memory.fragmented) and memory.fragmented > 0


def test_a_place_that_was_not_rehearsed_is_named():
    job = job_of(LAYOUTS[3])
    with pytest.raises(ConfigError, match=r"rank 1 of the pipeline was not rehearsed \(those at 0, 2, 3 were\)"):
        rehearsed_time(job, [rank for rank in foreseen_ranks(job, messages=True) if rank.pipeline_rank != 1])


def test_a_message_is_priced_by_its_kind_and_its_ranks():
    ranks, apart = tuple(range(8)), tuple(range(0, 16, 8))
    assert message_s("all_gather", ranks, 1e9, CARDS) == CARDS.gather_s(1e9, Group(8))
    assert message_s("reduce_scatter", apart, 1e9, CARDS) == CARDS.gather_s(1e9, Group(2, 8))
    assert message_s("all_reduce", ranks, 1e9, CARDS) == CARDS.reduce_s(1e9, Group(8))
    assert message_s("send", apart, 1e6, CARDS) == CARDS.send_s(1e6, 8) > message_s("send", (0, 1), 1e6, CARDS)
    assert message_s("all_reduce", (5,), 1e9, CARDS) == 0.0


# --- the command

FLAGS = "--model.size=8B --data.seq_len=4096 --batch.global_batch=64 --batch.microbatch=1 --layout.dp_shard=16".split()
ASKED = ["--gpus=16", "--gpu=h100", "--json"]


@pytest.fixture
def rehearsed(tmp_path):
    """Write a rehearsal of the flags' run, changed."""

    def write(**changed) -> str:
        from meshwright.cli.arguments import read_config
        from meshwright.training.build import batch_of
        from meshwright.training.model_source import planned_tokenizer

        config = read_config(FLAGS, prog="test")
        batch = batch_of(config, planned_tokenizer(config))
        made = plan(FACTS, config.layout, batch=batch, cluster=Cluster(16, 8, "cuda"), techniques=config.techniques)
        whole = Rehearsal(
            **{
                "rank": 3,
                "world": 16,
                "device": "NVIDIA H100 80GB HBM3",
                "step_seconds": (5.0, 4.0, 6.0),
                "peak_bytes": 30_000_000_000,
                "links": "16 H100",
                "plan": digest(made, batch),
                **changed,
            }
        )
        file = tmp_path / "rehearsal.json"
        file.write_text(to_json([whole]))
        return f"--with={file}"

    return write


@pytest.mark.all
def test_a_rehearsal_replaces_what_is_foreseen(rehearsed, capsys):
    assert main(["plan", *FLAGS, *ASKED, rehearsed()]) == 0
    found = json.loads(capsys.readouterr().out)["candidates"][0]
    assert found["step_s"] == pytest.approx(5.0) and found["step_parts_s"] == {"rehearsed work": pytest.approx(5.0)}
    assert found["mem_parts_gb"]["rehearsed"] == 30.0 and found["mem_gb"] > 30.0
    assert main(["plan", *FLAGS, *ASKED, rehearsed(links="")]) == 0
    later = json.loads(capsys.readouterr().out)["candidates"][0]
    assert later["step_s"] == pytest.approx(5.0 + later["step_parts_s"]["data messages"])


@pytest.mark.first
@pytest.mark.parametrize(
    ("changed", "flags", "says"),
    [
        ({"world": 8}, [], "is a rehearsal for 8 ranks, and --gpus is 16"),
        ({"device": "NVIDIA A100-SXM4-80GB"}, [], "was rehearsed on NVIDIA A100-SXM4-80GB, whose seconds"),
        ({"refused": "no memory left"}, [], "rank 3 did not get through its rehearsal: no memory left"),
        ({}, ["--data.seq_len=2048"], "is a rehearsal of another run"),
        ({}, ["--techniques.activation_checkpointing=full"], "is a rehearsal of another run"),
        ({}, ["--html=page.html"], "leave one out"),
    ],
)
def test_a_rehearsal_of_something_else_is_refused(rehearsed, capsys, changed, flags, says):
    assert main(["plan", *FLAGS, *ASKED, *flags, rehearsed(**changed)]) == 2
    assert says in capsys.readouterr().err


def test_a_rehearsal_needs_cards_and_a_layout(rehearsed, capsys):
    assert main(["plan", *FLAGS, rehearsed()]) == 2
    assert "--with is about a forecast for GPUs: give --gpus N and --gpu CARD too" in capsys.readouterr().err
    assert main(["plan", *FLAGS[:-1], *ASKED, rehearsed()]) == 2
    assert "state the layout that was rehearsed" in capsys.readouterr().err
