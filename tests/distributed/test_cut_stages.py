"""Stage modules of a pipeline, each cut over the tensor axis by itself, in the order that KempnerForge documents."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.fsdp import MixedPrecisionPolicy

from meshwright import Layout
from meshwright.comparison.equality import relative_errors
from meshwright.distributed import (
    PipelineStageModule,
    apply_ac,
    apply_float8,
    apply_fsdp2,
    apply_tensor_parallel,
    build_pipeline_schedule,
    build_pipeline_stage,
    build_stage_module,
    get_pp_rank,
    init_distributed,
)
from meshwright.distributed.mesh import data_position
from meshwright.distributed.parallelizer import to_cpu
from meshwright.models.decoder_config import DecoderConfig

FP32 = MixedPrecisionPolicy()
SMALL = DecoderConfig(61, 16, 3, n_heads=2, n_kv_heads=2, hidden_dim=24, max_seq_len=16)
TOKENS = torch.arange(48).reshape(4, 12) * 7 % 61


def mean(logits, labels):
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def gradients(model):
    return {name: to_cpu(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def staged(layout: Layout, mode: str):
    """A stage composed in KempnerForge's order, and what one process makes of its parameters."""
    mesh = init_distributed(layout)
    rank = get_pp_rank(mesh)
    with torch.device("meta"):
        stage = build_stage_module(SMALL, rank, layout.pp)
    apply_tensor_parallel(stage, mesh)
    apply_ac(stage, mode)
    apply_fsdp2(stage, mesh, FP32, reshard_after_forward=False)
    stage.to_empty(device="cpu")
    stage.init_weights_and_freqs(3)
    place, ranks = data_position(mesh)
    rows = TOKENS[place * 4 // ranks : (place + 1) * 4 // ranks]
    made = build_pipeline_stage(stage, mesh, "cpu", 1, rows.shape[1], torch.float32)
    run = build_pipeline_schedule(made, len(rows), mean)
    run.step(*([rows] if stage.is_first else []), **({"target": rows.roll(-1, 1)} if stage.is_last else {}))
    whole = PipelineStageModule(SMALL, 0, 1, (0, SMALL.n_layers), seed=3)
    mean(whole(TOKENS), TOKENS.roll(-1, 1)).backward()
    truth = gradients(whole)
    found = gradients(stage)
    return relative_errors(found, {name: truth[name] for name in found}), len(found), len(truth)


@pytest.mark.all
@pytest.mark.parametrize("mode", ("none", "full"))
def test_every_stage_can_be_cut(spmd, mode):
    """A later stage takes hidden states, and shows by itself nothing that could be measured."""
    ranks = spmd(4, staged, Layout(pp=2, tp=2, dp_shard=1), mode)
    assert max(max(errors.values()) for errors, _, _ in ranks) < 1e-5
    assert sum(count for _, count, _ in ranks) == 2 * ranks[0][2]


def between(config: DecoderConfig = SMALL, float8: bool = False):
    """Of the middle stage, cut and whole: hidden states, their gradient, those of its parameters."""
    mesh, found, dtype = init_distributed(Layout(tp=2, dp_shard=1)), [], torch.float32 if float8 else torch.float64
    for cut in (False, True):
        stage = PipelineStageModule(config, 1, 3, (1, 2)).to(dtype)
        if float8:
            apply_float8(stage, False)
        given = torch.linspace(-9, 9, 2 * 5 * config.dim, dtype=dtype).reshape(2, 5, -1).sin().requires_grad_()
        made = (apply_tensor_parallel(stage, mesh) if cut else stage)(given)
        made.cos().sum().backward()
        found.append({"out": made.detach(), "in": given.grad} | gradients(stage))
    return max(relative_errors(found[1], found[0]).values())


def test_a_middle_stage_takes_and_gives_whole_sequences(spmd):
    assert max(spmd(2, between)) < 1e-10


@pytest.mark.all
def test_a_stage_multiplies_in_float8_with_the_scales_of_the_whole(spmd):
    wide = replace(SMALL, dim=64, n_heads=4, n_kv_heads=4, hidden_dim=64)
    worst = max(spmd(2, between, wide, True))
    assert worst < 1e-4
