"""ZeRO stages: every one computes what one process computes, moves what the plan says, and leaves nothing stale."""

from __future__ import annotations

import pytest
import torch
from support.laid_out import assert_estimated
from support.oracle import differences, faults, worst
from support.problems import FSDP2, FSDP4, Data, Problem, Way, make_optimizer, pieces, share
from support.ranks import ranks
from support.train import DISTURBANCES, lay_out, local, train
from test_wire import EVEN, even_sizes, one_warm_step
from torch.distributed.fsdp import FSDPModule

from meshwright import Layout
from meshwright.checkpoint import load, save
from meshwright.core.losses import cross_entropy_sum
from meshwright.distributed.parallel_model import ParallelModel
from meshwright.distributed.process.world import get_world_info
from meshwright.distributed.torch_private import groups_of_parameters

pytestmark = pytest.mark.all

EXACT = 1e-10
STAGES = (0, 1, 2, 3)
BF16 = ("precision", {"master": "float32", "compute": "bfloat16", "reduce": "float32"})


def layout_of(stage: int, ranks: int) -> Layout:
    return Layout(dp_shard=ranks) if stage else Layout(dp_replicate=ranks, dp_shard=1)


# --- equal to one process


@pytest.mark.first
@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_equals_one_process(spmd, reference, measured, stage):
    """By lists of microbatches; the array (test_ways) has the others."""
    way = Way(layout_of(stage, 2), (("zero_stage", stage),), "list")
    runs = spmd(2, train, Problem(), way)
    assert not faults(runs, reference(Problem()), EXACT)
    measured(f"ZeRO-{stage}", "fp64", worst(differences(runs[0], reference(Problem()))))


# --- what travels


@pytest.mark.parametrize("microbatches", ["one", "rows"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_plan_estimates_every_byte(spmd, stage, microbatches):
    """In bfloat16, on four ranks; the array (test_ways) has the stages beside all else."""
    way = Way(FSDP4, (("zero_stage", stage), BF16), microbatches)
    for planned, sent in spmd(4, one_warm_step, Problem(dtype="float32"), way):
        assert_estimated(planned, sent)


FORMULAS = {
    1: lambda parameters, microbatches: (parameters, parameters),
    2: lambda parameters, microbatches: (parameters, microbatches * parameters),
}
"""Stage -> what is gathered and what is reduced in a step, of so many bytes of parameters."""


@pytest.mark.parametrize("microbatches", ["one", "rows"])
@pytest.mark.parametrize("stage", FORMULAS)
def test_even_shapes_move_what_the_paper_says(spmd, stage, microbatches):
    problem = Problem(EVEN, dtype="float32", data=Data(vocab=256))
    _, sent = spmd(2, one_warm_step, problem, Way(FSDP2, (("zero_stage", stage),), microbatches))[0]
    every, times = even_sizes()[0], 3 if microbatches == "rows" else 1
    gathered, reduced = FORMULAS[stage](every / 2, times)
    assert sent["all_gather", 2][1] == gathered and sent["reduce_scatter", 2][1] == reduced


# --- nothing gathered goes stale


def held_gathered(model: ParallelModel) -> list[str]:
    """Units whose parameters are gathered."""
    return [
        name
        for part in model.parts
        for name, module in part.named_modules()
        if isinstance(module, FSDPModule) and any(group.is_unsharded for group in groups_of_parameters(module))
    ]


@pytest.mark.parametrize("stage", [1, 2])
@ranks(2)
def test_nothing_is_gathered_between_steps(stage):
    """Two steps of ``optimizer_step``, and two of a loop of the user's own: what is gathered between steps, and
    whether both agree.
    """
    way = Way(FSDP2, (("zero_stage", stage),), "rows")
    found, gathered = [], []
    for own in (False, True):
        model = lay_out(Problem(), way)
        optimizer = make_optimizer("adamw", model.parameters())
        for step in range(2):
            batch = share(Data().step(step), *get_world_info()[::2])
            if own:
                pieces_of_step = pieces(batch, (2, 4))
                tokens = sum(
                    int(((one["labels"] != -100) & one["loss_mask"]).sum()) for one in pieces(Data().step(step), ())
                )
                for number, piece in enumerate(pieces_of_step):
                    with model.accumulation_context(number == len(pieces_of_step) - 1):
                        logits = model.module(**{key: piece[key] for key in ("tokens", "positions", "document_ids")})
                        labels = piece["labels"].where(piece["loss_mask"], -100)
                        (cross_entropy_sum(logits, labels) / tokens).backward()
                optimizer.step()
                optimizer.zero_grad()
            else:
                model.forward_backward(batch)
                gathered += held_gathered(model)
                model.optimizer_step(optimizer)
            gathered += held_gathered(model)
        found.append({name: local(p).detach().clone() for name, p in model.named_parameters()})
    agree = all(torch.allclose(found[0][name], found[1][name], rtol=0, atol=1e-13) for name in found[0])
    assert gathered == [] and agree


@pytest.mark.parametrize("stage", [1, 2])
def test_a_disturbed_run_ends_like_an_undisturbed_one(spmd, reference, stage):
    way = Way(FSDP2, (("zero_stage", stage),), "list")
    found = faults(spmd(2, train, Problem(), way, DISTURBANCES), reference(Problem()), EXACT)
    assert not found, found[:8]


@pytest.mark.parametrize("stage", [1, 2])
@ranks(2)
def test_what_is_loaded_between_steps_is_used(tmp_path, stage):
    folder = str(tmp_path / "saved")
    model = lay_out(Problem(), Way(FSDP2, (("zero_stage", stage),), "rows"))
    optimizer = make_optimizer("sgd", model.parameters())
    batch = share(Data().step(0), *get_world_info()[::2])
    save(model, folder)
    losses = [float(model.forward_backward(batch))]
    model.optimizer_step(optimizer)
    losses.append(float(model.forward_backward(batch)))
    with model.accumulation_context(False):
        model.module(batch["tokens"]).sum().backward()
    assert held_gathered(model)
    load(model, folder)
    before, stepped, back = [*losses, float(model.forward_backward(batch))]
    assert before == back != stepped
