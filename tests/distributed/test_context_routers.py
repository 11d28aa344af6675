"""Routers count whole sequences while ranks have parts of each: losses and messages are those of the plan."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from support.laid_out import assert_estimated, counted, estimated
from torch.distributed.tensor import DTensor

from meshwright import Layout, parallelize, verify
from meshwright.distributed.context import context_parallel
from meshwright.distributed.process.absent_peers import WireCounter
from meshwright.models.decoder_config import DecoderConfig, MoEConfig
from meshwright.planning.values import Batch
from meshwright.verification.problem import RandomBatches

DENSE = DecoderConfig(vocab_size=64, dim=16, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=24, max_seq_len=64)
SEQUENCE = MoEConfig(n_experts=4, top_k=2, hidden_dim=12, sequence_loss=0.3, z_loss=0.1)
BATCH = replace(SEQUENCE, batch_loss=0.2, bias_rate=0.01, router="sigmoid")
BATCHES = RandomBatches(DENSE.vocab_size, rows=8, seq_len=22)
FULL = {"activation_checkpointing": "full"}

CASES = {
    "fsdp 2, cp 2, loss of batches too": (BATCH, Layout(dp_shard=2, cp=2), {}),
    "cp 2, tp 2, loss of batches too": (BATCH, Layout(dp_shard=1, cp=2, tp=2), FULL),
    "ddp, cp 2": (SEQUENCE, Layout(dp_shard=1, cp=2), {"data_parallel": "ddp"}),
}


@pytest.mark.all
@pytest.mark.parametrize("name", CASES)
def test_a_layout_with_routers_of_cut_rows_is_equal(pool, name):
    moe, layout, techniques = CASES[name]
    options = {"dtypes": ("float64",), "techniques": techniques, "microbatch_rows": 2, "pool": pool}
    report = verify(replace(DENSE, moe=moe), layout, BATCHES, steps=2, **options)
    assert report, report


def gradients(fault: bool) -> torch.Tensor:
    """Whole gradient of the first router, of one process or with cut rows."""
    with pytest.MonkeyPatch.context() as patch:
        if fault:
            patch.setattr(context_parallel, "count_whole_rows", lambda model, ranks: None)
        techniques = {"precision": {"master": "float64"}}
        model = parallelize(replace(DENSE, moe=SEQUENCE), Layout(dp_shard=1, cp=-1), techniques=techniques)
        tokens = torch.randint(0, 64, (2, 22), generator=torch.Generator().manual_seed(0))
        model.forward_backward({"tokens": tokens, "labels": tokens})
        (gradient,) = [p.grad for name, p in model.named_parameters() if name == "layers.0.feed_forward.router.weight"]
        return (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).detach().clone()


@pytest.mark.kills("context", mutant="routers count their own tokens")
def test_routers_that_count_their_own_tokens_are_seen(spmd):
    (one,) = spmd(1, gradients, False)
    for found, wrong in zip(spmd(2, gradients, False), spmd(2, gradients, True), strict=True):
        assert float((found - one).norm() / one.norm()) < 1e-10
        assert float((wrong - one).norm() / one.norm()) > 1e-3


def step_on_the_wire(moe: MoEConfig, layout: Layout, techniques: dict) -> tuple:
    model = parallelize(replace(DENSE, moe=moe), layout, techniques=techniques)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = torch.randint(0, 61, (2, 24), generator=torch.Generator().manual_seed(0))
    for warm in (False, True):
        with WireCounter() if warm else nullcontext() as wire:
            model.forward_backward({"tokens": tokens, "labels": tokens})
            model.optimizer_step(optimizer, 1.0)
    return estimated(model.plan, Batch(2, 24)), counted(wire)


@pytest.mark.all
@pytest.mark.parametrize(("tp", "mode"), [(1, "none"), (1, "full"), (2, "none")])
def test_what_travels_is_what_the_plan_says(spmd, tp, mode):
    layout, techniques = Layout(dp_shard=1, cp=2, tp=tp), {"activation_checkpointing": mode}
    for moe in (SEQUENCE, BATCH):
        for said, found in spmd(2 * tp, step_on_the_wire, moe, layout, techniques):
            assert_estimated(said, found)
