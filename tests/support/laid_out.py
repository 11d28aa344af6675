"""A model laid out in a job: its rows of a batch, what its plan foresees and what it sent, and what it holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.distributed.mesh import data_position
from meshwright.distributed.parallel_model import ParallelModel
from meshwright.distributed.process.absent_peers import WireCounter
from meshwright.distributed.weights.shards import whole_on_first
from meshwright.planning.collectives import step_traffic
from meshwright.planning.values import Batch

Figures = dict[tuple[str, int], tuple[int | None, float]]
"""(operation, ranks) -> (calls, bytes per rank)."""

Held = tuple[dict[str, Tensor], dict[str, Tensor]]
"""Weights and buffers, moments."""


def own_rows(model: ParallelModel, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    rank, ranks = data_position(model.mesh)
    rows = len(batch["tokens"]) // ranks
    return {key: value[rank * rows : (rank + 1) * rows] for key, value in batch.items()}


def estimated(plan: Any, batch: Batch) -> Figures:
    """What a plan says that a step sends; no calls where it does not say how many."""
    figures: Figures = {}
    for t in step_traffic(plan, batch):
        calls, moved = figures.get((t.op, t.ranks), (0, 0.0))
        figures[t.op, t.ranks] = None if calls is None or t.calls is None else calls + t.calls, moved + t.bytes
    return figures


def counted(wire: WireCounter) -> Figures:
    """What was sent; over one rank nothing travels."""
    figures: Figures = {}
    for sent in wire.sent:
        if sent.ranks > 1:
            calls, moved = figures.get((sent.op, sent.ranks), (0, 0.0))
            figures[sent.op, sent.ranks] = (calls or 0) + 1, moved + sent.bytes
    return figures


def assert_estimated(planned: Figures, sent: Figures) -> None:
    assert sent.keys() == planned.keys()
    for key, (calls, moved) in sent.items():
        assert moved == pytest.approx(planned[key][1], rel=1e-12), key
        assert calls == planned[key][0] or planned[key][0] is None, key


def held(model: ParallelModel, optimizer: torch.optim.Optimizer) -> Held:
    """All that a checkpoint keeps of them, whole, on rank 0."""
    differ = model.plan.pipeline is not None
    moments = {
        f"{name} {key}": value for name, p in model.named_parameters() for key, value in optimizer.state[p].items()
    }
    weights = dict(model.named_parameters()) | dict(model.named_buffers())
    return whole_on_first(weights, differ=differ), whole_on_first(moments, differ=differ)


def assert_same(found: Held, wanted: Held, where: object) -> None:
    """Bit by bit."""
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine.keys() == theirs.keys(), where
        assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == [], where
