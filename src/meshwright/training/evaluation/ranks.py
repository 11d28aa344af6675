"""Run an evaluation on the ranks of a launcher, or on worker processes of this host."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from meshwright.data.options import SourceOptions
from meshwright.distributed.process.workers import WorkerFailed, WorkerPool
from meshwright.distributed.process.world import get_world_info
from meshwright.planning.layout import Layout
from meshwright.training.config import ProcessConfig
from meshwright.training.launch import CPU_PROCESSES, for_the_user, gpu_count

Request = TypeVar("Request")
Result = TypeVar("Result")


@dataclass(frozen=True)
class DataOptions(SourceOptions):
    """How the source that is evaluated is read."""

    seq_len: int = 0
    """Tokens per row; 0: the run's data.seq_len, of a model of transformers at most 2048."""
    cache: str = ""
    """Folder that keeps tokenized text; empty: meshwright's folder in the user's cache."""


@dataclass(frozen=True)
class EvaluationOptions:
    """Flags of ``meshwright evaluate`` with a section."""

    layout: Layout = field(default_factory=Layout)
    process: ProcessConfig = field(default_factory=ProcessConfig)
    data: DataOptions = field(default_factory=DataOptions)


def resolved_layout(layout: Layout, process: ProcessConfig, *, is_open: bool) -> tuple[Layout, int]:
    """Return the layout to evaluate on, and the number of processes to start; 1 under a launcher.

    Without one, an axis that nobody sizes has one rank, unless the number of processes is given.

    Args:
        is_open: ``layout.dp_shard`` is what is left, and nobody said so.

    Raises:
        ConfigError: the layout does not fit the number of ranks.
    """
    world = get_world_info()[2]
    if world > 1:
        return layout.resolve(world), 1
    if is_open and not process.count:
        layout = replace(layout, dp_shard=1)
    count = process.count or (layout.world if layout.is_resolved else gpu_count() or CPU_PROCESSES)
    return layout.resolve(count, ranks_per_node=count), count


def on_ranks(job: Callable[[Request], Result], request: Request, count: int, *, insists: bool) -> Result:
    """Run ``job(request)`` here, or on ``count`` worker processes, and return rank 0's result.

    Args:
        insists: somebody gave that number (``process.count``).

    Raises:
        MeshwrightError: a rank refused the request or failed; the text is for the user.
    """
    if count == 1:
        return ended(job, request)
    pool = WorkerPool(count, oversubscribe=insists)
    with closing(pool):
        try:
            return pool.run(ended, job, request)[0]
        except WorkerFailed as failure:
            raise for_the_user(failure) from None


def ended(job: Callable[[Any], Result], request: Any) -> Result:
    """Run a job, and tear down the process group that it brought up."""
    from meshwright.distributed.setup import destroy_distributed

    try:
        return job(request)
    finally:
        destroy_distributed()
