"""Rows are cut while every rank has whole parameters: gradients are summed over all copies."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from support.laid_out import assert_estimated, counted, estimated
from support.ranks import ranks

from meshwright import Layout, parallelize, plan, verify
from meshwright.core.axes import Axis
from meshwright.distributed.mesh import data_position
from meshwright.distributed.process.absent_peers import WireCounter
from meshwright.models.decoder import Decoder
from meshwright.models.decoder_config import DecoderConfig, MoEConfig
from meshwright.planning.data import stage_of
from meshwright.planning.layout import Shares
from meshwright.planning.values import Batch
from meshwright.verification.problem import RandomBatches

pytestmark = pytest.mark.all

DECODER = DecoderConfig(vocab_size=64, dim=16, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=24, max_seq_len=64)
EXPERTS = replace(DECODER, moe=MoEConfig(n_experts=4, top_k=2))
DDP = {"data_parallel": "ddp"}
CASES = {
    "ddp, cp 2": (DECODER, Layout(dp_shard=1, cp=2), DDP),
    "ddp 2, cp 2": (DECODER, Layout(dp_replicate=2, dp_shard=1, cp=2), DDP),
    "ddp, cp 4, ring": (DECODER, Layout(dp_shard=1, cp=4), DDP | {"context_parallel_method": "ring"}),
    "ddp, cp 2, recomputed": (DECODER, Layout(dp_shard=1, cp=2), DDP | {"activation_checkpointing": "full"}),
    "ddp, cp 2, each microbatch": (DECODER, Layout(dp_shard=1, cp=2), DDP | {"sync_grad_accum": True}),
    "ddp, cp 2, experts on each rank": (EXPERTS, Layout(dp_shard=1, cp=2), DDP),
    "shards for a part of the ranks, cp 4": (DECODER, Layout(dp_shard=1, cp=4), {"reshard_after_forward": 2}),
}
"""Not in the array (test_ways): DDP where shards are the rule."""


@pytest.mark.parametrize("name", CASES)
def test_a_layout_with_whole_parameters_and_cut_rows_is_equal(pool, name):
    model, layout, techniques = CASES[name]
    options = {"dtypes": ("float64",), "techniques": techniques, "microbatch_rows": 2, "pool": pool}
    report = verify(model, layout, RandomBatches(DECODER.vocab_size, rows=8, seq_len=22), steps=2, **options)
    assert report, report


@ranks(4)
def test_what_ddp_sends_is_what_the_plan_says():
    model = parallelize(DECODER, Layout(dp_replicate=2, dp_shard=1, cp=2), techniques=DDP)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = torch.randint(0, 61, (2, 24), generator=torch.Generator().manual_seed(0))
    for _ in range(3):  # DDP arranges its buckets anew in the second step
        with WireCounter() as wire:
            model.forward_backward({"tokens": tokens, "labels": tokens})
            model.optimizer_step(optimizer, 1.0)
    assert_estimated(estimated(model.plan, Batch(4, 24)), counted(wire))


def test_a_stage_says_who_has_which_part_of_the_parameters():
    layouts = {0: (1, 2), 1: (2, 1), 2: (2, 1), 3: (2, 1)}
    for stage, (shards, replicas) in layouts.items():
        made = plan(DECODER, Layout(dp_shard=1, cp=2), techniques={"zero_stage": stage})
        assert (stage_of(made), made.shares.shards, made.shares.replicas) == (stage, shards, replicas), stage


def gradient_error(axes: tuple[Axis, ...] | None) -> float:
    """Error of the gradients against one process; ``axes``: over which they are summed, not what the plan says."""
    with pytest.MonkeyPatch.context() as patch:
        if axes is not None:
            patch.setattr(Shares, "replica_axes", property(lambda shares: axes))
        torch.manual_seed(0)
        whole = Decoder(DECODER).double()
        tokens = torch.randint(0, 64, (2, 21), generator=torch.Generator().manual_seed(0))
        loss = F.cross_entropy(whole(tokens).flatten(0, 1), tokens.flatten())
        names, parameters = zip(*whole.named_parameters(), strict=True)
        expected = dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))
        layout = Layout(dp_replicate=2, dp_shard=1, cp=2)
        model = parallelize(whole, layout, techniques=DDP, audit=False)
        row = data_position(model.mesh)[0]
        mine = tokens[row : row + 1]
        model.forward_backward({"tokens": mine, "labels": mine})
        return max(float((p.grad - expected[n]).norm() / expected[n].norm()) for n, p in model.named_parameters())


def test_gradients_are_summed_over_all_copies(spmd):
    assert max(spmd(4, gradient_error, None)) < 1e-10


@pytest.mark.kills("context", "fault")
@pytest.mark.parametrize("fault", ["replicas alone", "ranks of rows alone"])
def test_gradients_that_are_summed_over_one_axis_are_seen(spmd, fault):
    axes = (Axis.DP_REPLICATE,) if fault == "replicas alone" else (Axis.CP,)
    assert min(spmd(4, gradient_error, axes)) > 1e-3
