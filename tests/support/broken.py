"""Jobs for workers: a problem of verify on a layout that has a fault of the galleries."""

from __future__ import annotations

from contextlib import AbstractContextManager

from meshwright.planning.layout import Layout
from meshwright.verification.outcome import Outcome, Seen, candidate
from meshwright.verification.problem import Problem
from meshwright.verification.sight import draws

from . import faults, mutants


def fault(name: str) -> AbstractContextManager:
    """The fault of that name in either gallery."""
    return getattr(mutants if hasattr(mutants, name) else faults, name)()


def outcome(name: str, problem: Problem, layout: Layout) -> Outcome:
    """``name``: of the fault; empty for none."""
    if not name:
        return candidate(problem, layout)
    with fault(name), mutants.unaudited():
        return candidate(problem, layout)


def drawn(name: str, problem: Problem, layout: Layout) -> list[Seen]:
    with fault(name):
        return draws(problem, layout)
