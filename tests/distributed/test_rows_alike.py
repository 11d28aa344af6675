"""Rows that every data rank brings: right, and the same work several times; said once, with the way out."""

from __future__ import annotations

import warnings

import pytest
import torch
from support.users import User
from torch.utils.data import DistributedSampler

from meshwright import Layout, parallelize


def warned(share):
    torch.manual_seed(0)
    model = parallelize(User(), Layout(dp_shard=-1), audit=False)
    tokens = torch.arange(32).view(8, 4)
    given = {"tokens": tokens, "labels": tokens}
    if share == "sampled":
        own = list(DistributedSampler(range(8), model.data_ranks, model.data_rank))
        given = {key: rows[own] for key, rows in given.items()}
    elif share:
        given = {key: rows[model.data_rank :: model.data_ranks] for key, rows in given.items()}
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        model.evaluate({"tokens": tokens[:1], "labels": tokens[:1]})  # whose rows may be alike: one fills up
        losses = [float(model.forward_backward(given).loss) for _ in range(2)]
    return [str(one.message) for one in found if "the same rows" in str(one.message)], losses


@pytest.mark.follows("model.data_rank", "model.data_ranks")
def test_rows_that_every_rank_brings_are_said_once_with_the_way_out(spmd):
    alike, shares = spmd(4, warned, ""), [*spmd(4, warned, "cut"), *spmd(4, warned, "sampled")]
    assert [len(said) for said, _ in alike] == [1, 0, 0, 0], "once, by the first rank"
    assert "all 4 data ranks brought the same rows" in alike[0][0][0]
    assert "{key: rows[model.data_rank :: model.data_ranks] for key, rows in batch.items()}" in alike[0][0][0]
    assert all(not said for said, _ in shares)
    assert [losses for _, losses in shares] == [pytest.approx(alike[0][1], rel=1e-6)] * 8
