"""One pool of gloo workers for the whole session; a distributed test is one line: ``spmd(4, job, *args)``."""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # workers import the jobs by module name
os.environ.setdefault("OMP_NUM_THREADS", "1")

from meshwright.distributed.local import WorkerPool

LARGEST_WORLD = 4


@pytest.fixture(scope="session")
def pool():
    with WorkerPool(LARGEST_WORLD, threads=1) as workers:
        yield workers


@pytest.fixture
def spmd(pool):
    """``spmd(world, job, *args)``: run ``job(*args)`` on ``world`` ranks and return the results in rank order.

    ``job`` is a module-level function. World 1 runs in a worker too: the one-process reference sees the same environment.
    """

    def run(world, job, *args, timeout=60.0):
        return pool.run(job, *args, world=world, timeout=timeout)

    return run
