"""Packed conversations against each conversation alone in a row: the same loss, the same gradients, on every layout."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.oracle import build, relative_errors
from support.problems import DDP2, FSDP2, HSDP, ONE, Problem, Way, share
from support.train import gradients, lay_out

from meshwright.data import Whole
from meshwright.distributed.process.world import get_world_info

EXACT = 1e-10
SEQ = 16


def conversations() -> Whole:
    """21 conversations of 2 to 16 tokens, each read up to some place and learnt from there, with a second question in
    some.
    """
    draw = np.random.default_rng(5)
    lengths = np.array([16, 2, *draw.integers(2, 12, size=19)])
    learnt = [np.where(np.arange(n) >= draw.integers(1, n), draw.random(n) < 0.9, 0).astype(np.uint8) for n in lengths]
    learnt[0][-1] = 1
    return Whole(
        "training",
        draw.integers(0, 256, size=lengths.sum()),
        np.cumsum([0, *lengths]),
        np.concatenate(learnt),
        padding=256,
    )


def packed() -> dict[str, torch.Tensor]:
    """All of them, in rows; rows of nothing but padding fill the last batch up."""
    split = conversations()
    rows = split.rows(np.arange(split.n_samples(SEQ)), SEQ)
    batch = {key: torch.from_numpy(value) for key, value in rows.items()}
    fill = -len(batch["tokens"]) % 4
    empty = {"tokens": 256, "labels": -100, "positions": 0, "document_ids": 0}
    return {key: torch.cat([value, torch.full((fill, SEQ), empty[key])]) for key, value in batch.items()}


def one_by_one() -> tuple[float, dict[str, torch.Tensor]]:
    """Mean loss over learnt tokens and its gradients, each conversation in a forward of its own, with plain torch."""
    split, model = conversations(), build(Problem())
    total, count = torch.zeros((), dtype=torch.float64), 0
    for begin, end in zip(split.offsets[:-1], split.offsets[1:], strict=True):
        ids = torch.from_numpy(np.asarray(split.tokens[begin:end]))
        learnt = torch.from_numpy(split.is_learnt[begin + 1 : end].astype(bool))
        logits = model(ids[None, :-1])[0]
        total = total + F.cross_entropy(logits[learnt], ids[1:][learnt], reduction="sum")
        count += int(learnt.sum())
    (total / count).backward()
    return float(total / count), {name: p.grad for name, p in model.named_parameters()}


def step(layout, mutant: str):
    """The first step's loss and gradients of the packed conversations (gradients on rank 0)."""
    rank, _, world = get_world_info()
    batch = share(packed(), rank, world)
    model = lay_out(Problem(), Way(layout))
    loss = model.forward_backward(broken(batch, mutant))
    return float(loss), loss.tokens, gradients(model)


def broken(batch: dict[str, torch.Tensor], mutant: str) -> dict[str, torch.Tensor]:
    tokens, documents = batch["tokens"], batch["document_ids"]
    if mutant == "neighbours are seen":
        return {**batch, "document_ids": torch.zeros_like(documents)}
    if mutant == "prompts are learnt":
        ahead = torch.roll(tokens, -1, dims=1)
        inside = torch.roll(documents, -1, dims=1) == documents
        inside[:, -1] = False
        return {**batch, "labels": torch.where(inside, ahead, -100)}
    return batch


@pytest.mark.all
@pytest.mark.parametrize("layout", [ONE, DDP2, FSDP2, HSDP], ids=str)
def test_packed_conversations_teach_what_each_teaches_alone(spmd, layout):
    expected, gradient = spmd(1, one_by_one)[0]
    results = spmd(layout.world, step, layout, "")
    learnt = int(conversations().is_learnt[1:].sum() - conversations().is_learnt[conversations().offsets[1:-1]].sum())
    for loss, tokens, _ in results:
        assert tokens == learnt and loss == pytest.approx(expected, rel=EXACT)
    errors = relative_errors(results[0][2], gradient)
    assert max(errors.values()) <= EXACT, errors


@pytest.mark.kills("data", "mutant")
@pytest.mark.parametrize("mutant", ["neighbours are seen", "prompts are learnt"])
def test_the_mutant_is_caught(spmd, mutant):
    expected, gradient = spmd(1, one_by_one)[0]
    loss, _, found = spmd(1, step, ONE, mutant)[0]
    assert abs(loss - expected) > 1e4 * EXACT * expected
    assert max(relative_errors(found, gradient).values()) > 1e6 * EXACT
