"""A middle stage of a pipeline, cut over the tensor axis by itself; test_contracts has whole pipelines of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from meshwright import Layout
from meshwright.comparison.equality import relative_errors
from meshwright.distributed import (
    PipelineStageModule,
    apply_float8,
    apply_tensor_parallel,
    init_distributed,
)
from meshwright.distributed.parallelizer import to_cpu
from meshwright.models.decoder_config import DecoderConfig

SMALL = DecoderConfig(61, 16, 3, n_heads=2, n_kv_heads=2, hidden_dim=24, max_seq_len=16)


def gradients(model):
    return {name: to_cpu(p.grad) for name, p in model.named_parameters() if p.grad is not None}


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
