"""Ranks by their places and by their work, without a process group."""

from __future__ import annotations

from itertools import product

import pytest
import torch.distributed as dist

from meshwright.core.axes import WORLD_AXES, Axis
from meshwright.distributed.mesh import axis_sizes, build_mesh, get_expert_mesh, get_fsdp_mesh
from meshwright.distributed.process.absent_peers import absent_peers
from meshwright.introspection.cluster import Cluster
from meshwright.introspection.facts import ModelFacts, model_facts
from meshwright.introspection.source import as_module
from meshwright.models.decoder_config import DecoderConfig, MoEConfig
from meshwright.planning.build import as_techniques
from meshwright.planning.build import plan as make_plan
from meshwright.planning.layout import Layout
from meshwright.planning.plan import Plan
from meshwright.planning.rank_kinds import axes_among, coordinates, kinds_of_ranks
from meshwright.planning.values import Batch

EVEN = DecoderConfig(256, 32, 4, n_heads=4, n_kv_heads=4, hidden_dim=32, max_seq_len=32)
ODD = DecoderConfig(257, 32, 4, n_heads=4, n_kv_heads=4, hidden_dim=32, max_seq_len=32)
EXPERTS = DecoderConfig(256, 32, 4, 4, 4, 32, 32, moe=MoEConfig(n_experts=8, hidden_dim=32))
BATCH = Batch(32, 32)


def planned(model: DecoderConfig, layout: Layout) -> tuple[Plan, ModelFacts]:
    facts = model_facts(as_module(model))
    return make_plan(facts, layout, cluster=Cluster(layout.world)), facts


def kinds(model: DecoderConfig, layout: Layout, batch: Batch = BATCH) -> list[tuple[tuple[int, ...], str]]:
    return [(kind.ranks, kind.work) for kind in kinds_of_ranks(*planned(model, layout), batch)]


@pytest.mark.parametrize("layout", [Layout(2, 2, 2, tp=2), Layout(dp_replicate=2, dp_shard=4, tp=2, ep=4)], ids=str)
def test_places_and_names_of_groups_are_those_of_the_mesh(layout):
    plan, _ = planned(EXPERTS if layout.ep > 1 else EVEN, layout)
    for rank in range(layout.world):
        with absent_peers(rank, layout.world):
            mesh = build_mesh(layout, "cpu")
            meshes = [found for found in (mesh, get_expert_mesh(mesh)) if found is not None]
            places = coordinates(plan, rank)
            for found in meshes:
                for axis in axis_sizes(found):
                    assert places[Axis(axis)] == found.get_local_rank(axis)
                    ranks = dist.get_process_group_ranks(found.get_group(axis))
                    assert len(ranks) == 1 or axis in axes_among(plan, ranks).split("/")


def test_a_group_of_several_axes_has_all_their_names():
    layout = Layout(dp_shard=2, cp=2, tp=2)
    plan, _ = planned(EVEN, layout)
    with absent_peers(5, 8):
        sharding = get_fsdp_mesh(build_mesh(layout, "cpu"))
        assert sharding is not None and axes_among(plan, dist.get_process_group_ranks(sharding.get_group())) == (
            "dp_shard+cp"
        )
    assert (axes_among(plan, [3]), axes_among(plan, range(8)), axes_among(plan, [0, 1, 2])) == (
        "this rank",
        "dp_shard+cp+tp",
        "world",
    )


def test_equal_shares_make_one_kind():
    every = ((0, 1, 2, 3, 4, 5, 6, 7), "every rank")
    assert kinds(EVEN, Layout(dp_replicate=2, dp_shard=2, tp=2)) == [every]
    assert kinds(EXPERTS, Layout(dp_shard=4, tp=2, ep=4)) == [every]


def test_stages_and_places_in_rows_are_kinds_of_their_own():
    assert kinds(EVEN, Layout(pp=2, dp_shard=4)) == [((0, 1, 2, 3), "pp 0"), ((4, 5, 6, 7), "pp 1")]
    assert kinds(EVEN, Layout(dp_shard=2, cp=2)) == [((0, 2), "cp 0"), ((1, 3), "cp 1")]


def test_shares_that_do_not_divide_make_kinds():
    assert kinds(ODD, Layout(dp_shard=8)) == [((0, 1, 2, 3, 4, 5, 6), "dp_shard 0-6"), ((7,), "dp_shard 7")]
    assert kinds(ODD, Layout(dp_replicate=4, dp_shard=1, tp=2)) == [((0, 2, 4, 6), "tp 0"), ((1, 3, 5, 7), "tp 1")]
    uneven = Batch(32, 30)  # 8, 8, 8 and 6 tokens
    assert kinds(EVEN, Layout(dp_shard=2, tp=4), uneven) == [((0, 1, 2, 4, 5, 6), "tp 0-2"), ((3, 7), "tp 3")]


def test_the_first_replica_counts_what_was_summed_before():
    facts, layout = model_facts(as_module(EVEN)), Layout(dp_replicate=4, dp_shard=1)
    techniques = {"sync_grad_accum": True, "data_parallel": "ddp"}
    plan = make_plan(facts, layout, cluster=Cluster(4), techniques=as_techniques(techniques))
    assert [kind.ranks for kind in kinds_of_ranks(plan, facts, BATCH)] == [(0, 1, 2, 3)]
    found = kinds_of_ranks(plan, facts, Batch(32, 32, microbatch_rows=2))
    assert [(kind.ranks, kind.work) for kind in found] == [((0,), "dp_replicate 0"), ((1, 2, 3), "dp_replicate 1-3")]


def test_replicas_tell_no_ranks_apart_and_every_rank_has_a_kind():
    plan, facts = planned(ODD, Layout(pp=2, dp_replicate=4, dp_shard=8, tp=2))
    found = kinds_of_ranks(plan, facts, BATCH)
    assert sorted(rank for kind in found for rank in kind.ranks) == list(range(128))
    for kind in found:
        places = {tuple(coordinates(plan, rank)[axis] for axis in WORLD_AXES) for rank in kind.ranks}
        others = {place[:1] + place[2:] for place in places}
        assert places == {(pp, replica, *rest) for (pp, *rest), replica in product(others, range(4))}
