"""The parity check can fail: every fault in the gallery (support/mutants) is caught, and the healthy original passes
the same check.

Most are applied to a way, in which tests/mutants.txt says that they die; the others where a step is disturbed.
"""

from __future__ import annotations

import pytest
from support.asked import EXACT, answers
from support.galleries import DISTURBED, gallery, on_ways, read_kills
from support.oracle import bf16_gradients, differences, faults, worst
from support.problems import FSDP2, Problem, Way
from support.train import gradients_of_first_step, train
from support.ways import ways

KILLS = read_kills()
DISTURBANCES = {
    "context_not_restored": ("raise",),
    "stale_after_evaluation": ("evaluate",),
    "skip_not_agreed": ("infinite",),
    "never_skips": ("infinite",),
}
"""Mutant -> what happens in the second step, in which it shows."""


@pytest.mark.kills("parity", "name")
@pytest.mark.parametrize("name", on_ways())
def test_a_mutant_dies_in_a_way(pool, reference, tmp_path, measured, name):
    """In the first of the ways that tests/mutants.txt has, by the questions that it says.

    The original passes there (test_ways).
    """
    assert KILLS.get(name), f"{name} dies in no way: run python scripts/mutants.py"
    kill = KILLS[name][0]
    assert kill.way in ways(), f"{kill.way} is no way of the array any more: run python scripts/mutants.py"
    found = answers(kill.way, pool, reference(kill.way.problem), tmp_path, mutant=name)
    assert set(kill.questions) <= set(found.faults), found.text()
    if "equal" in kill.questions:
        assert max(found.worst.values()) > 1e6 * EXACT, "caught by a hair"
    measured(name, "mutant", found.worst)


@pytest.mark.all
@pytest.mark.parametrize("disturbances", dict.fromkeys(DISTURBANCES.values()), ids=str)
def test_the_original_passes(spmd, reference, disturbances):
    assert not faults(spmd(2, train, Problem(), Way(FSDP2), disturbances), reference(Problem()), EXACT)


@pytest.mark.kills("parity", "name")
@pytest.mark.parametrize("name", DISTURBANCES)
def test_a_mutant_dies_in_a_disturbed_run(spmd, reference, measured, name):
    runs = spmd(2, train, Problem(), Way(FSDP2), DISTURBANCES[name], name)
    assert faults(runs, reference(Problem()), EXACT)
    errors = worst(differences(runs[0], reference(Problem())))
    assert max(errors.values()) > 1e6 * EXACT, "caught by a hair"
    measured(name, "mutant", errors)


def test_every_mutant_of_the_gallery_is_tried():
    assert {*DISTURBANCES, "bf16_reduction"} == DISTURBED and set(KILLS) == set(on_ways()) == set(gallery()) - DISTURBED


@pytest.mark.kills("parity", mutant="bf16_reduction")
def test_a_reduction_in_bf16_is_caught(spmd):
    problem = Problem(dtype="float32")
    way = Way(FSDP2, (("precision", {"compute": "bfloat16", "reduce": "float32"}),))
    one_16 = spmd(1, bf16_gradients, problem, way)[0]
    errors = {}
    for mutant in ("", "bf16_reduction"):
        found = spmd(2, gradients_of_first_step, problem, way, mutant)[0]
        errors[mutant] = max(((found[name] - one_16[name]).norm() / one_16[name].norm()).item() for name in one_16)
    assert errors[""] < 1e-6 < 1e-4 < errors["bf16_reduction"]
