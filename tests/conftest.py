"""A pool of gloo workers for each pytest process; a distributed test is one line: ``spmd(4, job, *args)``."""

import os
import sys
from contextlib import suppress
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks.survey
sys.path.insert(0, str(Path(__file__).parent))  # workers import the jobs by module name
os.environ.setdefault("OMP_NUM_THREADS", "1")

from support.suite import Suite

from meshwright.distributed.process.workers import PRELOAD, WorkerPool

with suppress(ImportError):  # absent where the tests of one release alone run
    import hypothesis

    hypothesis.settings.register_profile("no time decides", deadline=None)
    hypothesis.settings.load_profile("no time decides")

LARGEST_WORLD = 4
PRELOADED = ("torchao.float8", "torchao.optim", "transformers.models.llama.modeling_llama", "peft")
"""Most workers need them, for seconds each; what is not installed is passed over."""


class Workers(WorkerPool):
    """A pool that remembers what one process computes, and whose workers remember how models can be cut
    (support/remembered).
    """

    def __init__(self, size, **options):
        super().__init__(size, **options)
        self._context.set_forkserver_preload([PRELOAD, *PRELOADED])

    def run(self, function, *args, **options):
        from support.remembered import Remembering, is_of_one_process, of_one_process

        def compute():
            return WorkerPool.run(self, Remembering(function), *args, **options)

        return of_one_process(function, args, compute) if is_of_one_process(function) else compute()


@pytest.fixture(scope="session")
def pool():
    with Workers(LARGEST_WORLD, threads=1) as workers:
        workers.run(os.getpid, world=LARGEST_WORLD)  # now, so that no test is said to cost what starting them does
        yield workers


@pytest.fixture
def spmd(pool):
    """``spmd(world, job, *args)``: run ``job(*args)`` on ``world`` ranks and return the results in rank order.

    ``job`` is a module-level function. World 1 runs in a worker too: the one-process reference sees the same
    environment.
    """

    def run(world, job, *args, timeout=120.0):
        return pool.run(job, *args, world=world, timeout=timeout)

    return run


@pytest.fixture(scope="module")
def eight():
    """A pool of eight workers, for tests of whole small clusters."""
    with Workers(8, threads=1) as workers:
        yield workers


@pytest.fixture(scope="session")
def device_pool():
    with Workers(LARGEST_WORLD, threads=1) as workers:
        workers.run(os.getpid, world=LARGEST_WORLD)
        yield workers


@pytest.fixture
def on_device(device_pool):
    """``on_device(world, job, *args)``: as ``spmd``, on ranks that have the pretend device."""
    from support.pretend import with_device

    def run(world, job, *args, timeout=120.0):
        return device_pool.run(with_device, job, *args, world=world, timeout=timeout)

    return run


@pytest.fixture(scope="session")
def reference(pool):
    """``reference(problem)``: what the oracle makes of it in one process, computed once per session (``job``: another
    question).
    """
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


def pytest_addoption(parser):
    group = parser.getgroup("the suite", "which tests run (tests/README.md)")
    group.addoption(
        "--tier", choices=("test", "rest", "all"), default="all", help="what make test has, the rest, or all"
    )
    group.addoption("--piece", metavar="K/N", default="", help="the K-th of N pieces")
    group.addoption("--minutes", type=float, help="skip the tests that begin later")


def pytest_configure(config):
    config.pluginmanager.register(Suite(config.getoption("minutes")), "suite")


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
