"""Compiled blocks are verified as they train: whole, and each time anew.

What is observed of them is what they return.
"""

from __future__ import annotations

import pytest
import torch
from support import mutants
from support.problems import UNTIED
from test_verify import BATCHES, FSDP

from meshwright.comparison.equality import Comparison
from meshwright.comparison.sketch import is_inside, observing
from meshwright.verification.compare import differences, references
from meshwright.verification.outcome import Outcome, candidate
from meshwright.verification.problem import Problem

COMPILED = {"compile": True, "compile_backend": "aot_eager"}


def compiled_problem(dtype: str = "float64") -> Problem:
    return Problem(UNTIED, BATCHES, 2, dtype=dtype, optimizer="sgd", techniques=COMPILED)


def graphs(problems: list[Problem]) -> tuple[list[Outcome], list[tuple[int, dict]]]:
    """The outcomes, and (graphs, what broke a graph) of each; one version of a block is all that torch may compile."""
    import torch._dynamo as dynamo
    from torch._dynamo.utils import counters

    outcomes, found = [], []
    with dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True):
        for problem in problems:
            counters.clear()
            outcomes.append(candidate(problem, FSDP))
            found.append((counters["stats"]["unique_graphs"], dict(counters["graph_break"])))
    return outcomes, found


@pytest.fixture(scope="module")
def outcomes(pool):
    return pool.run(graphs, [compiled_problem(), compiled_problem("float32")], world=2, timeout=120)


@pytest.mark.all
def test_observing_leaves_a_compiled_block_in_one_piece_and_what_was_compiled_before_does_not_count(outcomes):
    for _, found in outcomes:
        assert found == [(1, {}), (1, {})], "three equal blocks share a graph, in both steps"


@pytest.mark.all
def test_what_a_compiled_block_returns_is_compared_and_nothing_inside(outcomes, spmd):
    found = outcomes[0][0][0]
    one, floor = spmd(1, references, compiled_problem())[0]
    comparison = Comparison("float64", tuple(differences(found, one, floor, "float64")))
    assert comparison.is_equal, comparison.lines()
    for stage in ("forward", "backward"):
        seen = getattr(one.seen[0], stage)[1]
        assert [d.name for d in comparison.differences if d.stage == stage and d.step == 1] == [
            name for name in seen if not name.startswith("layers.") or name.count(".") == 1
        ]
    for rank in found.seen:
        rank.forward[1].pop("layers.1")
    first = Comparison("float64", tuple(differences(found, one, floor, "float64"))).first
    assert first is not None and first.place == "the output of layers.1 (forward)", "only what is inside may be missing"


def mixing_documents(problem: Problem) -> Outcome:
    with mutants.documents_mixed(), mutants.unaudited():
        return candidate(problem, FSDP)


@pytest.mark.kills("verify", mutant="inside a compiled block")
def test_a_fault_inside_a_compiled_block_is_found_at_the_block(spmd):
    one, floor = spmd(1, references, compiled_problem())[0]
    found = spmd(2, mixing_documents, compiled_problem())[0]
    first = Comparison("float64", tuple(differences(found, one, floor, "float64"))).first
    assert first is not None and first.place == "the output of layers.0 (forward)"


def test_a_model_that_is_compiled_as_a_whole_is_observed_from_outside():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    calls = []
    model._compiled_call_impl = lambda x: calls.append(x) or model._call_impl(x)
    compiled = model._compiled_call_impl
    with observing(model) as observed:
        model(torch.ones(3, 4)).sum().backward()
    forward, backward = observed.rows()
    assert list(forward) == list(backward) == [""] and observed.compiled == [""]
    assert len(calls) == 1 and model._compiled_call_impl is compiled and not model[0]._forward_hooks


@pytest.mark.parametrize(
    ("name", "modules", "inside"),
    [
        ("layers.1.norm", ["layers.1"], True),
        ("layers.1.norm (call 2)", ["layers.1"], True),
        ("layers.1", ["layers.1"], False),
        ("layers.10.norm", ["layers.1"], False),
        ("head", [""], True),
        ("", [""], False),
        ("head", [], False),
    ],
)
def test_what_is_inside_of_what(name, modules, inside):
    assert is_inside(name, modules) is inside
