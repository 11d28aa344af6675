"""Layouts that cut the rows of models with recurrences equal one process, and send what the plan says."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from support import families
from support.laid_out import assert_estimated, counted, estimated
from support.ranks import ranks

from meshwright import Layout, parallelize, verify
from meshwright.distributed.process.absent_peers import WireCounter
from meshwright.planning.collectives import step_traffic
from meshwright.planning.values import Batch
from meshwright.verification.problem import RandomBatches

BATCHES = RandomBatches(families.VOCABULARY, rows=4, seq_len=22, keys=())
WHOLE_SEQUENCES = {"sequence_parallel": False}
CASES = {
    "mamba2, cp 2": ("mamba2", Layout(dp_shard=1, cp=2), {}),
    "mamba2, cp 4": ("mamba2", Layout(dp_shard=1, cp=4), {}),
    "lfm2, cp 2, hsdp": ("lfm2", Layout(dp_replicate=2, dp_shard=1, cp=2), {}),
    "lfm2, cp 2, tp 2": ("lfm2", Layout(dp_shard=1, cp=2, tp=2), WHOLE_SEQUENCES),
    "lfm2, cp 2, recomputed": ("lfm2", Layout(dp_shard=1, cp=2), {"activation_checkpointing": "full"}),
    "lfm2, cp 2, selective": ("lfm2", Layout(dp_shard=1, cp=2), {"activation_checkpointing": "selective_op"}),
    "lfm2, cp 2, compiled": ("lfm2", Layout(dp_shard=1, cp=2), {"compile": True, "compile_backend": "aot_eager"}),
    "qwen3_next, cp 2, fsdp 2": ("qwen3_next", Layout(dp_shard=2, cp=2), {}),
    "qwen3_next, cp 2, ep 2": ("qwen3_next", Layout(dp_shard=1, cp=2, ep=2), {}),
    "jamba, cp 2": ("jamba", Layout(dp_shard=1, cp=2), {}),
    "jamba, cp 2, tp 2": ("jamba", Layout(dp_shard=1, cp=2, tp=2), WHOLE_SEQUENCES),
    "lfm2, cp 2, pp 2": ("lfm2", Layout(dp_shard=1, cp=2, pp=2), {}),
    "bloom, cp 2, fsdp 2, recomputed": ("bloom", Layout(dp_shard=2, cp=2), {"activation_checkpointing": "full"}),
    "bloom, cp 2, tp 2": ("bloom", Layout(dp_shard=1, cp=2, tp=2), WHOLE_SEQUENCES),
    "bloom, cp 2, compiled": ("bloom", Layout(dp_shard=1, cp=2), {"compile": True, "compile_backend": "aot_eager"}),
    "bloom, cp 2, pp 2": ("bloom", Layout(dp_shard=1, cp=2, pp=2), {}),
    "mpt, cp 2, pp 2": ("mpt", Layout(dp_shard=1, cp=2, pp=2), {}),
    "gptj, cp 4": ("gptj", Layout(dp_shard=1, cp=4), {}),
    "rwkv, cp 2": ("rwkv", Layout(dp_shard=1, cp=2), {}),
}


def made(family: str) -> torch.nn.Module:
    config = families.config_of(family)
    config._experts_implementation = "eager"  # grouped kernels know no fp64
    return families.on_cpu(config)


@pytest.mark.first("bloom, cp 2, fsdp 2, recomputed")
@pytest.mark.parametrize("name", CASES)
def test_a_layout_with_mixers_is_equal(pool, name):
    family, layout, techniques = CASES[name]
    report = verify(
        partial(made, family),
        layout,
        BATCHES,
        steps=2,
        dtypes=("float64",),
        techniques=techniques,
        microbatch_rows=2,
        pool=pool,
    )
    assert report, report


@pytest.mark.all
@pytest.mark.parametrize("mode", ["none", "full"])
@pytest.mark.parametrize("family", ["lfm2", "jamba", "mamba2", "bloom", "gptj"])
@ranks(2)
def test_what_mixers_send_is_what_the_plan_says(family, mode):
    techniques = {"activation_checkpointing": mode}
    model = parallelize(made(family), Layout(dp_shard=1, cp=2), techniques=techniques)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = torch.randint(0, families.VOCABULARY, (2, 24), generator=torch.Generator().manual_seed(0))
    for warm in (False, True):
        with WireCounter() if warm else nullcontext() as wire:
            model.forward_backward({"tokens": tokens, "labels": tokens})
            model.optimizer_step(optimizer, 1.0)
    said, found = estimated(model.plan, Batch(2, 24)), counted(wire)
    assert_estimated(said, found)


@pytest.mark.all
def test_traded_bytes_are_those_of_the_formula(spmd):
    """Each rank sends (S / C) (C - 1) / C of what the first layers give and the last takes, both ways."""
    (planned, _), *_ = spmd(2, lfm2_bytes)
    width, rows, tokens, ranks = 32, 2, 24, 2
    assert planned == 2 * rows * (tokens / ranks) * (ranks - 1) / ranks * (3 * width + width) * 4


def lfm2_bytes() -> tuple[float, int]:
    model = parallelize(made("lfm2"), Layout(dp_shard=1, cp=2))
    (traffic,) = [t for t in step_traffic(model.plan, Batch(2, 24)) if t.op == "all_to_all"]
    return traffic.bytes, traffic.calls or 0
