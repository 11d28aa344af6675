"""Rows are cut while every rank has whole parameters: equal to one process, gradients summed over all copies."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from support.laid_out import assert_estimated, counted, estimated

from meshwright import Layout, load, parallelize, plan, save, verify
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
BATCHES = RandomBatches(DECODER.vocab_size, rows=8, seq_len=22)
DDP, WHOLE = {"data_parallel": "ddp"}, {"zero_stage": 0}

CASES = {
    "ddp, cp 2": (DECODER, Layout(dp_shard=1, cp=2), DDP),
    "ddp 2, cp 2": (DECODER, Layout(dp_replicate=2, dp_shard=1, cp=2), DDP),
    "ddp, cp 4, ring": (DECODER, Layout(dp_shard=1, cp=4), DDP | {"context_parallel_method": "ring"}),
    "ddp, cp 2, recomputed": (DECODER, Layout(dp_shard=1, cp=2), DDP | {"activation_checkpointing": "full"}),
    "ddp, cp 2, each microbatch": (DECODER, Layout(dp_shard=1, cp=2), DDP | {"sync_grad_accum": True}),
    "ddp, cp 2, experts on each rank": (EXPERTS, Layout(dp_shard=1, cp=2), DDP),
    "stage 0, cp 2": (DECODER, Layout(dp_shard=1, cp=2), WHOLE),
    "stage 0, cp 2, tp 2": (DECODER, Layout(dp_shard=1, cp=2, tp=2), WHOLE),
    "stage 0, cp 2, pp 2": (DECODER, Layout(dp_shard=1, cp=2, pp=2), WHOLE),
    "stage 0, hsdp 2, cp 2": (
        DECODER,
        Layout(dp_replicate=2, dp_shard=1, cp=2),
        WHOLE | {"data_parallel": "fully_shard"},
    ),
    "stage 0, cp 2, ep 2": (EXPERTS, Layout(dp_shard=1, cp=2, ep=2), WHOLE),
    "stage 0, cp 4, ep 2": (EXPERTS, Layout(dp_shard=1, cp=4, ep=2), WHOLE),
    "stage 1, cp 2": (DECODER, Layout(dp_shard=1, cp=2), {"zero_stage": 1}),
    "stage 2, hsdp 2, cp 2": (DECODER, Layout(dp_shard=2, cp=2), {"zero_stage": 2}),
    "shards for a part of the ranks, cp 4": (DECODER, Layout(dp_shard=1, cp=4), {"reshard_after_forward": 2}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_layout_with_whole_parameters_and_cut_rows_is_equal(pool, name):
    model, layout, techniques = CASES[name]
    report = verify(
        model, layout, BATCHES, steps=2, dtypes=("float64",), techniques=techniques, microbatch_rows=2, pool=pool
    )
    assert report, report


def step_on_the_wire(layout: Layout, techniques: dict) -> tuple:
    model = parallelize(DECODER, layout, techniques=techniques)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = torch.randint(0, 61, (2, 24), generator=torch.Generator().manual_seed(0))
    for warm in (False, False, True):  # DDP arranges its buckets anew in the second step
        with WireCounter() if warm else nullcontext() as wire:
            model.forward_backward({"tokens": tokens, "labels": tokens})
            model.optimizer_step(optimizer, 1.0)
    rows = 2 * model.plan.data_ranks
    return estimated(model.plan, Batch(rows, 24)), counted(wire)


WIRES = {
    "ddp": (Layout(dp_replicate=2, dp_shard=1, cp=2), DDP),
    "stage 0 and tp": (Layout(dp_shard=1, cp=2, tp=2), WHOLE),
    "stage 0 and replicas": (Layout(dp_replicate=2, dp_shard=1, cp=2), WHOLE | {"data_parallel": "fully_shard"}),
}


@pytest.mark.parametrize("name", WIRES)
def test_what_travels_is_what_the_plan_says(spmd, name):
    for said, found in spmd(4, step_on_the_wire, *WIRES[name]):
        assert_estimated(said, found)


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


def resumed(folder: str, techniques: dict, layout: Layout) -> tuple[bool, bool]:
    """Whether a saved model goes on bit by bit, and whether it does so without rows that are cut."""
    tokens = torch.randint(0, 61, (4, 24), generator=torch.Generator().manual_seed(0))

    def made(layout: Layout, techniques: dict):
        model = parallelize(DECODER, layout, techniques=techniques, seed=3)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(model, optimizer) -> float:
        row, rows = data_position(model.mesh)
        share = len(tokens) // rows
        mine = tokens[row * share : (row + 1) * share]
        loss = float(model.forward_backward({"tokens": mine, "labels": mine}))
        model.optimizer_step(optimizer, 1.0)
        return loss

    one = made(layout, techniques)
    step(*one)
    save(one[0], folder, optimizer=one[1])
    expected = [step(*one) for _ in range(2)]
    two = made(layout, techniques)
    load(two[0], folder, optimizer=two[1])
    found = [step(*two) for _ in range(2)]
    other = made(Layout(dp_replicate=layout.world, dp_shard=1), DDP)
    load(other[0], folder, optimizer=other[1])
    elsewhere = [step(*other) for _ in range(2)]
    return found == expected, max(abs(a - b) for a, b in zip(elsewhere, expected, strict=True)) < 1e-5


@pytest.mark.parametrize("name", ["ddp", "stage 0"])
def test_a_checkpoint_of_whole_parameters_goes_on(spmd, tmp_path, name):
    layout = Layout(dp_replicate=2, dp_shard=1, cp=2) if name == "ddp" else Layout(dp_shard=1, cp=2, tp=2)
    techniques = DDP if name == "ddp" else WHOLE
    for found in spmd(4, resumed, str(tmp_path / "saved"), techniques, layout):
        assert found == (True, True)
