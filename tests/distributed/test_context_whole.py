"""Rows are cut while every rank has whole parameters: gradients are summed over all copies."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from meshwright import Layout, parallelize, plan
from meshwright.core.axes import Axis
from meshwright.distributed.mesh import data_position
from meshwright.models.decoder import Decoder
from meshwright.models.decoder_config import DecoderConfig
from meshwright.planning.data import stage_of
from meshwright.planning.layout import Shares

pytestmark = pytest.mark.all

DECODER = DecoderConfig(vocab_size=64, dim=16, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=24, max_seq_len=64)
DDP = {"data_parallel": "ddp"}


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
