"""Who shares what is said once: the plan's figures follow from one table of axes, and a new axis is a word in it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import meshwright
from meshwright import Layout, plan
from meshwright.core.axes import Axis
from meshwright.models.decoder_config import DecoderConfig
from meshwright.planning.layout import BATCH, SAMPLES, SHARDS, Shares, shares_of

MODEL = DecoderConfig(256, 64, 2, 4, 2, 128, 64)
MESH = {"pp": 2, "dp_replicate": 3, "dp_shard": 5, "cp": 7, "tp": 11}


def test_every_axis_has_its_part():
    shares = Shares(MESH, sharded=True, cuts_sequences=True)
    assert (shares.data_ranks, shares.shards, shares.replicas) == (15, 35, 3)
    assert shares.size(*shares.routed) == 3 * 5 * 7 * 11 and shares.size(*BATCH) == 3 * 5 * 7
    assert (
        Shares(MESH).shards == 1
        and Axis.TP not in Shares(MESH).routed
        and set(SAMPLES) < set(BATCH)
        and Axis.CP in SHARDS
    )


@pytest.mark.parametrize(
    ("layout", "shards", "replicas"), [(Layout(dp_shard=4), 4, 1), (Layout(dp_replicate=2, dp_shard=1), 1, 2)]
)
def test_a_plan_has_the_shares_of_its_layout(layout, shards, replicas):
    made = plan(MODEL, layout)
    assert (made.shares.shards, made.shares.replicas, made.data_ranks) == (shards, replicas, shards * replicas)
    assert shares_of(layout, made.data.technique).shards == shards


def test_with_tensor_parallel_sequences_routers_are_given_other_tokens_on_each_rank():
    cut, whole = (
        plan(MODEL, Layout(dp_shard=1, tp=2), techniques={"sequence_parallel": yes}).shares.routed
        for yes in (True, False)
    )
    assert Axis.TP in cut and Axis.TP not in whole


def test_the_product_of_data_axes_is_taken_in_one_place():
    """dp_replicate × dp_shard is written where layouts are filled, and otherwise read from Shares."""
    root = Path(meshwright.__file__).parent
    found = []
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
                named = {getattr(side, "attr", "") for side in (node.left, node.right)}
                if named == {"dp_replicate", "dp_shard"}:
                    found.append(str(path.relative_to(root)))
    assert found == []
