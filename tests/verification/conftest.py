"""What one process makes of a problem, and what a sound layout makes of it, is computed once per session."""

import pytest
from support import broken

from meshwright.comparison.equality import Comparison
from meshwright.verification.compare import differences, references
from meshwright.verification.problem import Problem


@pytest.fixture(scope="session")
def judged(pool):
    """``judged(problem, layout, fault)``: the comparison with one process."""
    known: list[tuple[Problem, tuple]] = []
    sound: list[tuple[tuple, Comparison]] = []

    def oracle(problem):
        for other, found in known:
            if other == problem:
                return found
        known.append((problem, pool.run(references, problem, world=1, timeout=120)[0]))
        return known[-1][1]

    def ask(problem, layout, fault=""):
        if not fault:
            for other, found in sound:
                if other == (problem, layout):
                    return found
        one, floor = oracle(problem.of_one_process())
        outcome = pool.run(broken.outcome, fault, problem, layout, world=layout.world, timeout=120)[0]
        found = Comparison(problem.dtype, tuple(differences(outcome, one, floor, problem.dtype)))
        if not fault:
            sound.append(((problem, layout), found))
        return found

    return ask
