"""Find the numbers of GPUs next to one that no layout fills."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from meshwright.core.errors import ConfigError, MeshwrightError
from meshwright.planning.layout import Layout
from meshwright.planning.shares import shares_of
from meshwright.planning.techniques import Techniques
from meshwright.simulation.hardware.links import Machines
from meshwright.simulation.workload.execution import Job
from meshwright.simulation.workload.step_memory import least_memory, step_memory

from .answer import techniques_of
from .pins import Pin, hold
from .space import meshes, microbatches, recomputations, stages_per_rank

FARTHEST = 4
"""Counts are looked for from a quarter of the requested one to four times as many."""
TRIED = 6
"""Candidates of one count that rules may refuse before it is given up."""
MEASURED = 1000
"""Candidates of one count that may be too large before it is given up; the first need least."""


def nearest_counts(count: int, works: Callable[[int], bool]) -> tuple[int | None, int | None]:
    """Return the nearest count below and the nearest above that ``works``; None where none does within the range."""
    below = next((n for n in range(count - 1, math.ceil(count / FARTHEST) - 1, -1) if works(n)), None)
    above = next((n for n in range(count + 1, FARTHEST * count + 1) if works(n)), None)
    return below, above


def words(count: int, works: Callable[[int], bool]) -> str:
    """Return a sentence with the nearest counts that ``works``: "Nearest counts that work: 288 or 304 GPUs."."""
    found = [n for n in nearest_counts(count, works) if n is not None]
    least, most = math.ceil(count / FARTHEST), FARTHEST * count
    if not found:
        return f"No count from {least} to {most} GPUs works."
    if len(found) == 2:
        return f"Nearest counts that work: {found[0]} or {found[1]} GPUs."
    other = f"above, up to {most}" if found[0] < count else f"below, down to {least}"
    return f"Nearest count that works: {found[0]} GPU{'s' * (found != [1])} (none {other}, does)."


def open_works(
    base: Job,
    pins: tuple[Pin, ...],
    techniques: Techniques,
    machines: Callable[[int], Machines],
    legal: Callable[[int, Layout, Techniques, int], object],
) -> Callable[[int], bool]:
    """Return a test whether some layout fills a number of GPUs, fits, and is legal.

    Args:
        base: the model and batch of the search.
        machines: gives the cluster of a number of GPUs; ConfigError where there is none.
        legal: plans a layout with techniques and rows of a microbatch on a number of GPUs; raises where a rule refuses.
    """

    def works(count: int) -> bool:
        try:
            job = replace(base, machines=machines(count))
        except ConfigError:
            return False
        refused = 0
        for place, one in enumerate(_smallest(job, pins)):
            if refused == TRIED or place == MEASURED:
                return False
            if step_memory(one).total > job.machines.device.memory_bytes:
                continue
            try:
                legal(count, one.layout, techniques_of(one, techniques), int(one.microbatch))
                return True
            except MeshwrightError:
                refused += 1
        return False

    return works


def _smallest(base: Job, pins: tuple[Pin, ...]) -> Iterator[Job]:
    """Yield jobs of all meshes that the pins allow, those whose states are smallest first, with what saves most."""
    sized = [(least_memory(replace(base, layout=mesh.layout(mesh.data))), mesh) for mesh in meshes(base, pins)]
    for _, mesh in sorted(sized, key=lambda entry: entry[0]):
        shards = [
            layout
            for layout in map(mesh.layout, reversed(mesh.shards()))
            if hold(pins, dp_shard=layout.dp_shard, dp_replicate=layout.dp_replicate)
        ]
        sizes = microbatches(base, mesh, pins)
        for rows in dict.fromkeys((*sizes[:1], *sizes[-1:])):  # one microbatch alone accumulates no whole gradients
            for run in recomputations(base, pins)[-1:]:
                for per_rank in stages_per_rank(base, mesh, rows, pins):
                    for reshard, chunks in ((True, 8), (True, 1), (False, 8), (False, 1)):
                        # one shard gathers nothing that could stay gathered
                        legal = shards and (reshard or shards[0].dp_shard * mesh.cp > 1)
                        if legal and hold(pins, reshard=str(reshard).lower(), loss_chunks=chunks):
                            run = replace(run, stages_per_rank=per_rank, gathers_each=reshard, loss_chunks=chunks)
                            yield replace(base, layout=shards[0], microbatch=rows, execution=run)


def stated_works(layout: Layout, rows: int, legal: Callable[[int], object]) -> Callable[[int], bool]:
    """Return a test whether a layout that leaves a size open is legal on a number of GPUs, with these rows per step.

    Args:
        legal: plans the layout on a number of GPUs; raises where a rule refuses.
    """

    def works(count: int) -> bool:
        if not fills(layout, count, rows):
            return False
        try:
            legal(count)
            return True
        except MeshwrightError:
            return False

    return works


def fills(layout: Layout, count: int, rows: int) -> bool:
    """Return whether a layout's sizes divide ``count`` ranks, and its data ranks the rows."""
    try:
        return rows % shares_of(layout.resolve(count)).data_ranks == 0
    except ConfigError:
        return False


@contextmanager
def refusing(layout: Layout, count: int, rows: int, works: Callable[[int], bool]) -> Iterator[None]:
    """Add the nearest counts to the error of a stated layout that ``count`` GPUs or their rows do not divide into."""
    try:
        yield
    except ConfigError as error:
        if layout.is_resolved or fills(layout, count, rows):
            raise
        raise ConfigError(f"{error} {words(count, works)}") from None
