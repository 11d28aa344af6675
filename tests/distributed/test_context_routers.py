"""Routers count whole sequences while ranks have parts of each."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.distributed.tensor import DTensor

from meshwright import Layout, parallelize
from meshwright.distributed.context import context_parallel
from meshwright.models.decoder_config import DecoderConfig, MoEConfig

DENSE = DecoderConfig(vocab_size=64, dim=16, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=24, max_seq_len=64)
SEQUENCE = MoEConfig(n_experts=4, top_k=2, hidden_dim=12, sequence_loss=0.3, z_loss=0.1)


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
