"""Models that each do something odd, on layouts of two ranks: equal to one process of plain torch, or refused."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from support.premises import IDS, MODELS, RARE
from support.ranks import ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright import Layout, UnsupportedError, parallelize
from meshwright.distributed.data import fully_sharded
from meshwright.distributed.mesh import data_position
from meshwright.distributed.parallel_model import ParallelModel
from meshwright.distributed.process.workers import WorkerDied

ROWS, SEQ, STEPS, RATE = 4, 6, 3, 0.05
EPS = 1e-6
"""AdamW's: a gradient that is rounding alone, as of a bias before a normalisation, is not made a step of."""
CLOSE = 1e-9
"""Relative, in fp64."""
LAYOUTS: dict[str, tuple[Layout, dict[str, Any], int]] = {
    "ddp": (Layout(dp_shard=1, dp_replicate=2), {}, 0),
    "fsdp": (Layout(dp_shard=2), {}, 0),
    "fsdp, accumulated": (Layout(dp_shard=2), {}, 1),
    "fsdp, recomputed": (Layout(dp_shard=2), {"activation_checkpointing": "full"}, 0),
    "tp": (Layout(dp_shard=1, tp=2), {}, 0),
    "tp, whole sequences": (Layout(dp_shard=1, tp=2), {"sequence_parallel": False}, 0),
    "pp": (Layout(dp_shard=1, pp=2), {}, 0),
}
BY_CHANCE = ("Dropping", "FixedNoise", "LayerDrop", "Noisy", "OwnGenerator")
"""Ranks draw other numbers than one process."""


def batches() -> Iterator[dict[str, Tensor]]:
    """The rare id is in the first rank's rows of the second step, and in no others."""
    generator = torch.Generator().manual_seed(5)
    for step in range(STEPS):
        tokens = torch.randint(0, RARE, (ROWS, SEQ), generator=generator)
        if step == 1:
            tokens[0, 2] = RARE
        yield {"tokens": tokens, "labels": (tokens + 1) % IDS}


def one_process(build, ranks: int, rows: int) -> tuple[list[float], dict[str, Tensor]]:
    """Losses, and parameters and buffers at the end, with ``rows`` of each data rank per forward (0: all)."""
    torch.manual_seed(0)
    model = build().double()
    optimizer = torch.optim.AdamW(model.parameters(), RATE, eps=EPS, weight_decay=0.1)
    losses = []
    for batch in batches():
        total = 0.0
        by_rank = {key: value.view(ranks, ROWS // ranks, SEQ) for key, value in batch.items()}
        for start in range(0, ROWS // ranks, rows or ROWS):
            tokens, labels = (
                by_rank[key][:, start : start + (rows or ROWS)].flatten(0, 1) for key in ("tokens", "labels")
            )
            logits: Any = model(tokens)
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / (ROWS * SEQ)
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, {name: value.detach() for name, value in [*model.named_parameters(), *model.named_buffers()]}


def trained(build, layout: Layout, requested: dict[str, Any], rows: int) -> tuple[list[float], dict[str, Tensor]]:
    """The same by ``parallelize``: what this rank has."""

    def in_double() -> nn.Module:
        return build().double()

    model = parallelize(in_double, layout, techniques=requested, microbatch_rows=rows)
    optimizer = torch.optim.AdamW(model.parameters(), RATE, eps=EPS, weight_decay=0.1)
    rank, ranks = data_position(model.mesh)
    own = slice(rank * ROWS // ranks, (rank + 1) * ROWS // ranks)
    losses = []
    for batch in batches():
        losses.append(float(model.forward_backward({key: value[own] for key, value in batch.items()})))
        model.optimizer_step(optimizer)
    return losses, whole(model)


def whole(model: ParallelModel) -> dict[str, Tensor]:
    parameters = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in model.named_parameters()}
    return {name: value.detach() for name, value in parameters.items()} | dict(model.named_buffers())


def tried(name: str, *layouts: str) -> dict[str, str]:
    """By layout: "equal", the words of a refusal, or what differs."""
    found, build = {}, MODELS[name]
    for key in layouts or LAYOUTS:
        layout, requested, rows = LAYOUTS[key]
        try:
            losses, values = trained(build, layout, requested, rows)
        except UnsupportedError as error:
            found[key] = f"refused: {error}"
            continue
        expected, one = one_process(build, layout.dp_replicate * layout.dp_shard, rows)
        errors = {
            n: float((v - one[n]).abs().max() / (one[n].abs().max() + 1e-12)) for n, v in values.items() if v.numel()
        }
        errors["the loss"] = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
        worst = max(errors, key=errors.__getitem__)
        found[key] = "equal" if errors[worst] <= CLOSE else f"{worst}: {errors[worst]:.1e}"
    return found


REFUSED_AS = (
    *(
        "rows of a batch depend on each other",
        "decides by the values of all rows of a batch",
        "keeps state",
        "counts its rows or tokens",
        "writes its parameters",
        "only some rows use",
        "a loss of its own",
    ),
    *(
        "is a sparse tensor",
        "has a hook",
        "computes otherwise as the number of its calls grows",
        "cannot be cut",
        "could not be measured",
    ),
    *(
        "was rehearsed",
        "no layers of this model were found",
        "is no sum over tokens",
        "a second time, and they keep state",
    ),
)
NEVER_REFUSED = ("ddp", "fsdp", "fsdp, accumulated", "fsdp, recomputed")
SOUND = (
    "ChecksValues",
    "ChoosesTokens",
    "Counting",
    "DecidesRowByRow",
    "Detached",
    "ChecksMeans",
    "ExpertList",
    "ExpertsByCount",
    "ExpertsByItem",
    "ExpertsByList",
    "ExpertsByShape",
    "ExpertsInOrder",
    "RowByRowMeans",
    "Flattens",
    "ForOneToken",
    "FrozenBatchNorm",
    "GroupNormed",
)
SOUND += ("Pads", "Reads", "Sound", "Spare", "Table", "Tied", "WeightNormed")


@pytest.mark.first("WithLoss")
@pytest.mark.parametrize("name", [name for name in MODELS if name not in BY_CHANCE])
def test_an_odd_model_is_equal_to_one_process_or_refused(spmd, name):
    for found in spmd(2, tried, name):
        for key, said in found.items():
            assert said == "equal" or any(words in said for words in REFUSED_AS), (key, said)
            assert said == "equal" or name not in SOUND or key not in NEVER_REFUSED, (key, said)


@pytest.mark.all
@pytest.mark.parametrize("name", BY_CHANCE)
@ranks(2)
def test_ranks_that_draw_other_layers_do_not_wait_for_each_other(name):
    losses, _ = trained(MODELS[name], LAYOUTS["fsdp"][0], {}, 0)
    assert all(torch.tensor(losses).isfinite())


# --- faults


nothing_is_filled_up = partial(patch.object, fully_sharded, "fill", lambda model, plan, mesh: None)
zeros_for_what_nobody_used = partial(
    patch.object, fully_sharded._Usage, "agree", lambda self: setattr(self, "_is_waiting", False)
)


FAULTS = {"nothing_is_filled_up": "ForOneToken", "zeros_for_what_nobody_used": "ForOneToken"}


def tried_with(fault: str) -> str:
    with globals()[fault]():
        return tried(FAULTS[fault], "fsdp")["fsdp"]


@pytest.mark.kills("odd models", "fault")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_what_ranks_agree_on_is_caught(spmd, fault):
    try:
        found = spmd(2, tried_with, fault)
    except WorkerDied:  # messages of unequal size: gloo ends the process
        found = ("aborted",)
    assert "equal" not in found
