"""The parity check can fail: every fault in the gallery (support/mutants) is caught, and the healthy original passes the same check."""

from __future__ import annotations

import pytest
from support import mutants
from support.oracle import bf16_gradients, differences, faults, worst
from support.problems import DDP2, FSDP2, PARTLY_FROZEN, TIED, Problem, Way
from support.train import gradients_of_first_step, train

EXACT = 1e-10

ONE_FORWARD, SEVERAL = Way(FSDP2), Way(FSDP2, (), "list")
REPLICAS, REPLICAS_SYNCED = Way(DDP2), Way(DDP2, (("sync_grad_accum", True),), "rows")

GALLERY = {
    "per_rank_mean": (Problem(), ONE_FORWARD, ()),
    "mean_of_microbatch_means": (Problem(), SEVERAL, ()),
    "averaged_gradients": (Problem(), ONE_FORWARD, ()),
    "same_batch_on_every_rank": (Problem(), ONE_FORWARD, ()),
    "ddp_hook_without_sum": (Problem(), REPLICAS, ()),
    "divide_factor_on_the_root_only": (Problem(), ONE_FORWARD, ()),
    "untied": (Problem(TIED), REPLICAS, ()),
    "frozen_parameter_trained": (Problem(freeze=PARTLY_FROZEN), REPLICAS, ()),
    "clipped_by_the_local_norm": (Problem(), ONE_FORWARD, ()),
    "last_microbatch_unsynced": (Problem(), SEVERAL, ()),
    "synced_gradients_summed_again": (Problem(), REPLICAS_SYNCED, ()),
    "documents_mixed": (Problem(), ONE_FORWARD, ()),
    "positions_dropped": (Problem(), ONE_FORWARD, ()),
    "loss_mask_dropped": (Problem(), ONE_FORWARD, ()),
    "padding_counted": (Problem(), ONE_FORWARD, ()),
    "context_not_restored": (Problem(), ONE_FORWARD, ("raise",)),
    "stale_after_evaluation": (Problem(), ONE_FORWARD, ("evaluate",)),
    "stale_after_the_step": (Problem(), Way(FSDP2, (("zero_stage", 1),), "list"), ()),
    "shards_lost_between_microbatches": (Problem(), Way(FSDP2, (("zero_stage", 2),), "list"), ()),
    "skip_not_agreed": (Problem(), ONE_FORWARD, ("infinite",)),
    "never_skips": (Problem(), ONE_FORWARD, ("infinite",)),
    "same_block_on_every_rank": (Problem(), ONE_FORWARD, ()),
}
"""Mutant -> the problem, the way and the disturbances in which it shows."""


@pytest.mark.parametrize(
    "case", list(dict.fromkeys(GALLERY.values())), ids=lambda case: f"{case[1].layout}, {case[1].microbatches}, {case[2]}"
)
def test_the_original_passes(spmd, reference, case):
    problem, way, disturbances = case
    assert not faults(spmd(2, train, problem, way, disturbances), reference(problem), EXACT)


@pytest.mark.parametrize("name", GALLERY)
def test_the_mutant_is_caught(spmd, reference, measured, name):
    problem, way, disturbances = GALLERY[name]
    runs = spmd(2, train, problem, way, disturbances, name)
    assert faults(runs, reference(problem), EXACT)
    errors = worst(differences(runs[0], reference(problem)))
    assert max(errors.values()) > 1e6 * EXACT, "caught by a hair"
    measured(name, "mutant", errors)


def test_every_mutant_of_the_gallery_is_tried():
    helpers = {"unaudited", "bf16_reduction"}
    defined = {name for name, value in vars(mutants).items() if getattr(value, "__module__", "") == mutants.__name__}
    assert defined - helpers == set(GALLERY)


def test_a_reduction_in_bf16_is_caught(spmd):
    problem = Problem(dtype="float32")
    way = Way(FSDP2, (("precision", {"compute": "bfloat16", "reduce": "float32"}),))
    one_16 = spmd(1, bf16_gradients, problem, way)[0]
    errors = {}
    for mutant in ("", "bf16_reduction"):
        found = spmd(2, gradients_of_first_step, problem, way, mutant)[0]
        errors[mutant] = max(((found[name] - one_16[name]).norm() / one_16[name].norm()).item() for name in one_16)
    assert errors[""] < 1e-6 < 1e-4 < errors["bf16_reduction"]
