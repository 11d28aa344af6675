"""Plans: values that can be stored, compared and read, made before any process group exists."""

from __future__ import annotations

import itertools
import json
import re
import time
from dataclasses import FrozenInstanceError, replace
from functools import cache

import pytest
import torch
import torch.distributed as dist
from support.laid_out import estimated
from torch import nn

from meshwright import ConfigError, Layout, Plan, Techniques, plan
from meshwright.core.names import pattern
from meshwright.introspection.cluster import Cluster
from meshwright.introspection.facts import ModelFacts, model_facts
from meshwright.models.decoder import Decoder
from meshwright.models.decoder_config import SIZES, DecoderConfig, MoEConfig, parameter_count
from meshwright.planning.explain import table
from meshwright.planning.values import Batch

DEBUG = SIZES["debug"]

LAYOUTS = [
    Layout(dp_shard=1),
    Layout(dp_replicate=4, dp_shard=1),
    Layout(dp_shard=4),
    Layout(dp_replicate=2, dp_shard=4),
]
WISHES = [
    {},
    {"freeze": ["embedding", r"layers\.0\."]},
    {"activation_checkpointing": "selective", "compile": True, "compile_backend": "eager"},
    {
        "activation_checkpointing": "selective_op",
        "checkpoint_keep": ["topk", "aten.mm.default"],
        "checkpoint_keep_every": 3,
    },
    {"activation_checkpointing": "memory_budget", "compile": True, "activation_memory_budget": 0.3},
    {"activation_checkpointing": "modules", "checkpoint_modules": ["layers.*.feed_forward"]},
    {
        "data_parallel": "fully_shard",
        "precision": {"compute": "bf16", "output": "fp32"},
        "cpu_offload": True,
        "reshard_after_forward": False,
    },
    {"data_parallel": "fully_shard", "sync_grad_accum": True, "activation_checkpointing": "full"},
    {"optimizer_state": "8bit", "cpu_offload": "optimizer"},
    {"optimizer_state": "4bit", "stochastic_rounding": True, "precision": {"master": "bf16"}},
]


@cache
def facts() -> ModelFacts:
    """Of one module for all plans, which is measured once."""
    with torch.device("meta"):
        return model_facts(Decoder(DEBUG))


def make(layout: Layout, requested: dict, **options) -> Plan:
    return plan(facts(), layout, cluster=Cluster(layout.world), techniques=requested, **options)


@pytest.fixture(scope="module")
def every() -> list[Plan]:
    made = [make(layout, requested) for layout, requested in itertools.product(LAYOUTS, WISHES)]
    return made + [
        make(Layout(dp_shard=4), {"reshard_after_forward": 2}),
        make(Layout(dp_replicate=2, dp_shard=2), {"sync_grad_accum": "shard"}),
        make(Layout(dp_replicate=2, dp_shard=1), {}, reduction="mean"),
    ]


def test_a_plan_survives_json(every):
    for made in every:
        again = Plan.from_json(made.to_json())
        assert again == made and hash(again) == hash(made) and again.diff(made) == [] and str(again) == str(made)
        json.loads(made.to_json())


def test_a_plan_is_frozen_and_two_of_equal_facts_are_equal():
    made = make(LAYOUTS[0], {})
    with pytest.raises(FrozenInstanceError):
        made.device = "cuda"  # type: ignore[misc]
    with torch.device("meta"):
        module = Decoder(DEBUG)
    same = [
        plan(source, LAYOUTS[2], cluster=Cluster(4))
        for source in (DEBUG, module, lambda: Decoder(DEBUG), model_facts(module))
    ]
    assert all(other == same[0] for other in same)
    assert all(p.is_meta for p in module.parameters()), "planning gives no weights"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{}", "'model' is missing"),
        ("[1]", "plan"),
        ("not json", "not a plan"),
        (('"device"', '"devise"'), "unknown key 'devise'"),
        (('"frozen": []', '"frozen": 3'), "frozen = 3 is a whole number; expected a list of text"),
    ],
)
def test_what_is_no_plan_is_refused(text, words):
    """A text, or what is replaced in a plan's own."""
    with pytest.raises(ConfigError, match=re.escape(words)):
        Plan.from_json(text if isinstance(text, str) else make(LAYOUTS[0], {}).to_json().replace(*text))


def test_a_difference_names_path_and_both_values(every):
    made = make(Layout(dp_shard=4), {})
    other = replace(
        made, data=replace(made.data, sync_grad_accum=True), units=(replace(made.units[0], elements=1), *made.units[1:])
    )
    assert made.diff(other) == [
        f"units[0].elements: {made.units[0].elements} -> 1",
        "data.sync_grad_accum: False -> True",
    ]
    assert other.diff(made) == [
        f"units[0].elements: 1 -> {made.units[0].elements}",
        "data.sync_grad_accum: True -> False",
    ]
    longer = replace(made, notes=(*made.notes, "more"))
    assert made.diff(longer) == [f"notes: {[*made.notes]} -> {[*longer.notes]}"]
    for one, another in itertools.pairwise(every):
        assert bool(one.diff(another)) == (one != another)


def section(text: str, head: str) -> list[str]:
    return next(part for part in text.split("\n\n") if part.startswith(head)).splitlines()[1:]


def test_the_table_tells_every_collective(every):
    for made in every:
        rows = section(str(made), "collectives of a step")
        if not made.collectives:
            assert rows == ["  none"] and made.world == 1
            continue
        told = [re.split(r" {2,}", row.strip()) for row in rows[1:]]
        calls: dict[tuple, int] = {}
        for c in made.collectives:
            key = (c.op, f"{c.axis} ({c.ranks})", pattern(c.unit), c.dtype, c.per)
            calls[key] = calls.get(key, 0) + (c.calls or 0)
        found: dict[tuple, int] = {}
        for op, axis, what, number, elements, per in told:
            key = (op, axis, what, elements.split()[-1], per)
            found[key] = found.get(key, 0) + (0 if number == "in buckets" else int(number))
        assert found == calls


def test_the_table_tells_every_parameter_and_every_request(every):
    for made in every:
        text = str(made)
        rows = section(text, "parameters")[1:]
        assert len(rows) == len(made.parameters) and sum(
            p.count * torch.Size(p.shape).numel() for p in made.parameters
        ) == parameter_count(DEBUG)
        for row, p in zip(rows, made.parameters, strict=True):
            assert row.split()[0] == p.pattern and ("(frozen)" in row) == (not p.trainable)
            assert all(f"{axis}: {where}" in row for axis, where in p.placements)
        for axis, size in made.mesh:
            assert (f"{axis}={size}" in text.splitlines()[0]) == (size > 1)
        for word in (
            made.data.technique,
            made.precision.compute,
            made.precision.reduce,
            made.activation_checkpointing,
            *made.notes,
        ):
            assert word in text
        assert ("host memory" in text) == (made.data.cpu_offload or made.optimizer.in_host_memory)
        assert (f"state in {made.optimizer.state} of" in text) == (made.optimizer.state != "full")
        assert ("rounded stochastically" in text) == made.optimizer.stochastic_rounding


def test_the_table_with_a_batch_tells_its_bytes():
    made = make(Layout(dp_shard=4), {})
    batch = Batch(global_rows=16, seq_len=8, microbatch_rows=2)
    assert table(made, batch).startswith(str(made).split("\n\n")[0])
    rows = section(table(made, batch), "bytes sent per rank and step (16 rows, 2 microbatches)")
    assert [row.split()[0] for row in rows[1:]] == ["all_reduce", "all_gather", "reduce_scatter"]
    alone = make(Layout(dp_shard=1), {})
    assert section(table(alone, batch), "bytes sent per rank and step (16 rows, 8 microbatches)") == ["  none"]


@pytest.mark.parametrize(("world", "layout"), [(64, Layout(dp_shard=-1)), (512, Layout(dp_replicate=-1, dp_shard=-1))])
def test_a_large_plan_needs_no_process_group_and_little_time(world, layout):
    begun = time.process_time()  # other processes of this machine are none of its business
    made = plan(
        SIZES["8B"],
        layout,
        cluster=Cluster(world, ranks_per_node=8, device="cuda"),
        batch=Batch(global_rows=1024, seq_len=8192, microbatch_rows=1),
        techniques=Techniques(activation_checkpointing="full"),
    )
    text = table(made, Batch(1024, 8192, 1))
    assert time.process_time() - begun < 5
    assert not dist.is_initialized()
    assert (
        made.world == world
        and made.size("dp_shard") == (64 if world == 64 else 8)
        and made.precision.compute == "bfloat16"
    )
    assert "8.03B parameters" in text and "32 blocks" not in text and "layers.* (32)" in text
    total = sum(unit.elements for unit in made.units)
    assert parameter_count(SIZES["8B"]) <= total <= parameter_count(SIZES["8B"]) + 512 * 300


def test_an_open_layout_needs_a_cluster():
    with pytest.raises(ConfigError, match=r"dp_shard=-1 has an open size"):
        plan(DEBUG, Layout())
    assert plan(DEBUG, Layout(dp_shard=2), cluster=None).world == 2


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (3, "a model is an nn.Module, a model config, or a function that returns a module; got int"),
        (lambda: "x", "the model factory returned str, not an nn.Module"),
        (nn.Identity(), "the model Identity has no parameters"),
    ],
)
def test_what_is_no_model_is_refused(model, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        plan(model, Layout(dp_shard=1))


def test_a_reduction_that_is_none_is_refused():
    with pytest.raises(ConfigError, match="reduction = 'avg': legal are sum and mean"):
        make(Layout(dp_shard=2), {}, reduction="avg")


def test_ties_and_missing_blocks_are_noted():
    tied = plan(replace(DEBUG, tied_embeddings=True), Layout(dp_shard=2), cluster=Cluster(2))
    assert tied.notes[0] == "embedding.weight is tied to head.weight: one parameter, counted once"
    assert sum(p.count * torch.Size(p.shape).numel() for p in tied.parameters) == parameter_count(
        replace(DEBUG, tied_embeddings=True)
    )
    alone = plan(
        lambda: nn.Linear(4, 4), Layout(dp_shard=1), techniques={"data_parallel": "fully_shard"}, cluster=Cluster(1)
    )
    assert (
        len(alone.notes) == 2
        and "nothing is sharded" in alone.notes[0]
        and "no repeated block was found in Linear" in alone.notes[1]
    )


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"pp": 2}, {"cp": 2}])
def test_a_plan_says_that_it_alone_compares_nothing(sizes):
    assert "a plan alone is not compared" in str(plan(DEBUG, Layout(dp_shard=1, **sizes)))
    assert "a plan alone is not compared" not in str(plan(DEBUG, Layout(dp_shard=2)))


def test_tensor_ranks_send_experts_the_tokens_of_their_part_of_the_sequence():
    config = DecoderConfig(
        61, 16, 2, n_heads=4, n_kv_heads=2, hidden_dim=20, max_seq_len=20, moe=MoEConfig(n_experts=4, hidden_dim=8)
    )
    cut, whole = plan(config, Layout(dp_shard=1, tp=2, ep=2)), plan(config, Layout(dp_shard=2, ep=2))
    assert estimated(cut, Batch(2, 7))["all_to_all", 2] == estimated(whole, Batch(4, 4))["all_to_all", 2]
