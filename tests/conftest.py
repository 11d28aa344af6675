"""One pool of gloo workers for the whole session; a distributed test is one line: ``spmd(4, job, *args)``."""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # workers import the jobs by module name
os.environ.setdefault("OMP_NUM_THREADS", "1")

from meshwright.distributed.local import WorkerPool

LARGEST_WORLD = 4


class Workers(WorkerPool):
    """A pool whose workers remember how models can be cut (support/remembered)."""

    def run(self, function, *args, **options):
        from support.remembered import Remembering

        return super().run(Remembering(function), *args, **options)


@pytest.fixture(scope="session")
def pool():
    with Workers(LARGEST_WORLD, threads=1) as workers:
        yield workers


@pytest.fixture
def spmd(pool):
    """``spmd(world, job, *args)``: run ``job(*args)`` on ``world`` ranks and return the results in rank order.

    ``job`` is a module-level function. World 1 runs in a worker too: the one-process reference sees the same environment.
    """

    def run(world, job, *args, timeout=120.0):
        return pool.run(job, *args, world=world, timeout=timeout)

    return run


@pytest.fixture(scope="session")
def reference(pool):
    """``reference(problem)``: what the oracle makes of it in one process, computed once per session (``job``: another question)."""
    from support.oracle import oracle

    known = {}

    def ask(problem, job=oracle):
        if (problem, job) not in known:
            known[problem, job] = pool.run(job, problem, world=1, timeout=120)[0]
        return known[problem, job]

    return ask


@pytest.fixture(scope="session")
def floor(reference):
    """``floor(problem)``: the error that rounding alone makes, by reordering one process's own sums."""
    from support.oracle import floors

    return lambda problem: reference(problem, floors)


FIGURES = pytest.StashKey[dict]()


@pytest.fixture
def measured(request):
    """``measured(who, what, {quantity: error})``: keep the largest for the table at the end of the session (-v)."""
    table = request.config.stash.setdefault(FIGURES, {})

    def note(who, what, errors):
        row = table.setdefault((what, who), {})
        for quantity, error in errors.items():
            row[quantity] = max(row.get(quantity, 0.0), error)

    return note


def pytest_terminal_summary(terminalreporter, config):
    table = config.stash.get(FIGURES, {})
    if table and config.get_verbosity() > 0:
        terminalreporter.section("measured")
        for (what, who), row in sorted(table.items()):
            figures = "  ".join(f"{quantity} {error:.1e}" for quantity, error in row.items())
            terminalreporter.write_line(f"{what:32} {who:48} {figures}")
