"""A checkpoint of rows that were cut knows no layout: bit by bit the same weights and moments in every other."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from support.laid_out import assert_same, held

from meshwright import Layout, parallelize
from meshwright.checkpoint import load, save
from meshwright.checkpoint.saving import StatePiece
from meshwright.distributed.process.world import get_world_info
from meshwright.models.decoder_config import DecoderConfig

DECODER = DecoderConfig(257, 24, 2, n_heads=4, n_kv_heads=2, hidden_dim=20, max_seq_len=32, qk_norm=True)
EXACT = {"precision": {"master": "float64"}}
LAYOUTS = {
    "one": Layout(dp_shard=1),
    "cp 2": Layout(dp_shard=1, cp=2),
    "cp 4": Layout(dp_shard=1, cp=4),
    "cp 2, tp 2": Layout(dp_shard=1, cp=2, tp=2),
    "cp 2, pp 2": Layout(dp_shard=1, cp=2, pp=2),
    "tp 2": Layout(dp_shard=1, tp=2),
    "dp 4": Layout(dp_shard=4),
}


def laid_out(layout: Layout, seed: int):
    model = parallelize(DECODER, layout, techniques=EXACT, seed=seed)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def step(model, optimizer) -> None:
    tokens = torch.randint(0, 257, (4, 22), generator=torch.Generator().manual_seed(0))
    model.forward_backward({"tokens": tokens, "labels": tokens.roll(-1, 1)})
    model.optimizer_step(optimizer)


def saved(name: str, folder: str, lost: bool = False):
    """Take a step and save; ``lost``: the second rank of a row writes zeros."""
    model, optimizer = laid_out(LAYOUTS[name], seed=1)
    step(model, optimizer)
    zeros = lost and get_world_info()[0] == 1
    data: Any = StatePiece.data
    with patch.object(StatePiece, "data", property(lambda own: data.fget(own) * 0)) if zeros else nullcontext():
        save(model, folder, optimizer=optimizer)
    return held(model, optimizer)


def loaded(name: str, folder: str, again: str):
    """Load into another layout, and save there."""
    model, optimizer = laid_out(LAYOUTS[name], seed=2)
    load(model, folder, optimizer=optimizer)
    save(model, again, optimizer=optimizer)
    return held(model, optimizer)


WAYS = [("cp 2", other) for other in ("one", "tp 2", "dp 4", "cp 4", "cp 2, tp 2", "cp 2, pp 2")]


@pytest.mark.all
@pytest.mark.parametrize(("one", "other"), WAYS)
def test_a_checkpoint_goes_to_another_layout_and_back(spmd, tmp_path, one, other):
    here, there, back = (str(tmp_path / name) for name in ("here", "there", "back"))
    wanted = spmd(LAYOUTS[one].world, saved, one, here)[0]
    assert_same(spmd(LAYOUTS[other].world, loaded, other, here, there)[0], wanted, other)
    assert_same(spmd(LAYOUTS[one].world, loaded, one, there, back)[0], wanted, f"{other} and back")


@pytest.mark.kills("context", "fault")
@pytest.mark.parametrize("fault", ["a_checkpoint_without_the_second_ranks_weights"])
def test_a_checkpoint_that_loses_weights_is_seen(spmd, tmp_path, fault):
    here, there = (str(tmp_path / name) for name in ("here", "there"))
    wanted = spmd(2, saved, "cp 2", here, True)[0]
    with pytest.raises(AssertionError):
        assert_same(spmd(1, loaded, "one", here, there)[0], wanted, "one")
