"""Find the fastest layouts of a model on a cluster, and those that need least memory for their speed."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from meshwright.simulation.workload.block_times import BlockTimes
from meshwright.simulation.workload.execution import Job
from meshwright.simulation.workload.step_memory import StepMemory, least_memory, step_memory
from meshwright.simulation.workload.step_time import Kinds, StepTime, least_time, step_time

from .pins import Pin, hold
from .space import Mesh, meshes, microbatches, recomputations, stages_per_rank

Progress = Callable[[float], None]
FRONT = 1.5
"""Layouts that take more than this many times the best one's time are not part of the front."""


@dataclass(frozen=True)
class Candidate:
    """A layout with its switches, and what is foreseen of it."""

    job: Job
    time: StepTime
    memory: StepMemory

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.job.machines.device.memory_bytes

    @property
    def key(self) -> tuple:
        """The choices, for comparing candidates."""
        run = self.job.execution
        return (
            self.job.layout,
            self.job.microbatch,
            run.recompute,
            run.stages_per_rank,
            run.gathers_each,
            run.loss_chunks,
        )


@dataclass
class Found:
    """The result of a search.

    Attributes:
        best: candidates that fit, fastest first.
        front: candidates of which no other is both faster and smaller, fastest first.
        smallest: the candidate with the least memory, whether it fits or not.
        tried, passed: number of candidates that were simulated, and that bounds left out.
    """

    best: list[Candidate] = field(default_factory=list)
    front: list[Candidate] = field(default_factory=list)
    smallest: Candidate | None = None
    tried: int = 0
    passed: int = 0


def search(base: Job, pins: tuple[Pin, ...] = (), *, keep: int = 24, progress: Progress | None = None) -> Found:
    """Search all layouts of a job's machines for the ``keep`` fastest that fit.

    Groups of candidates are tried in the order of a lower bound of their time. A group is passed over if its states
    alone do not fit; or if the bound is above the slowest that is kept, and something faster needs less memory than
    the group's states, so that the group has no part in the front.

    Args:
        base: the model, batch, machines, and the switches that are not searched; its layout is not used.
        progress: receives the fraction that is done.
    """
    found, limit = Found(), base.machines.device.memory_bytes
    best: list[tuple[float, int, Candidate]] = []  # a heap, slowest first
    shown: list[Candidate] = []
    groups = _groups(base, pins, found, progress)
    for bound, _, group, least in sorted(groups, key=lambda entry: entry[:2]):
        slower = len(best) >= keep and bound > -best[0][0]
        if slower and (bound > FRONT * -max(best)[0] or _beaten(shown, bound, least)):
            found.passed += 1
            continue
        for per_rank, shards in group.variants(base, pins):
            least_s = bound + bound / group.job.microbatches * (group.mesh.pp - 1) / per_rank
            for job in shards:
                memory = step_memory(job)
                found.tried += 1
                if memory.total > limit:
                    if found.smallest is None or memory.total < found.smallest.memory.total:
                        found.smallest = Candidate(job, step_time(job, group.kinds), memory)
                    break  # fewer shards need more
                if len(best) >= keep and least_s > -best[0][0] and _beaten(shown, least_s, memory.total):
                    break
                candidate = Candidate(job, step_time(job, group.kinds), memory)
                shown.append(candidate)
                heapq.heappush(best, (-candidate.time.seconds, found.tried, candidate))
                if len(best) > keep:
                    heapq.heappop(best)
            shown = _front(shown)
    found.best = [candidate for _, _, candidate in sorted(best, key=lambda entry: (-entry[0], entry[1]))]
    found.front = [c for c in shown if c.time.seconds <= FRONT * found.best[0].time.seconds] if best else []
    return found


def _groups(
    base: Job, pins: tuple[Pin, ...], found: Found, progress: Progress | None
) -> Iterator[tuple[float, int, _Group, float]]:
    """Yield (bound of the time, number, group, bound of the memory) of all groups whose states fit."""
    priced: dict[tuple, BlockTimes] = {}
    candidates, number = list(meshes(base, pins)), 0
    fitting = [(mesh, least_memory(replace(base, layout=mesh.layout(mesh.data)))) for mesh in candidates]
    smallest = min((least for _, least in fitting), default=0.0)
    for place, (mesh, least) in enumerate(fitting):
        if progress is not None:
            progress(place / len(fitting))
        if least > max(base.machines.device.memory_bytes, smallest):
            found.passed += 1
            continue
        layout = mesh.layout(mesh.data)
        for microbatch in microbatches(base, mesh, pins):
            for run in recomputations(base, pins):
                run = replace(run, stages_per_rank=1, split_backward=False)
                job = replace(base, layout=layout, microbatch=microbatch, execution=run)
                kinds = Kinds(job, priced)
                number += 1
                yield least_time(job, kinds), number, _Group(mesh, job, kinds), least


def _beaten(shown: list[Candidate], seconds: float, size: float) -> bool:
    """Return whether a candidate is as fast as these seconds, and needs no more than these bytes."""
    return any(c.time.seconds <= seconds and c.memory.total <= size for c in shown)


def _front(candidates: list[Candidate]) -> list[Candidate]:
    """Return the candidates of which no other is both faster and smaller, fastest first."""
    front: list[Candidate] = []
    for candidate in sorted(candidates, key=lambda c: (c.time.seconds, c.memory.total)):
        if not front or candidate.memory.total < front[-1].memory.total:
            front.append(candidate)
    return front


@dataclass(frozen=True)
class _Group:
    """Candidates whose blocks take the same time: one mesh, microbatch and recomputation."""

    mesh: Mesh
    job: Job
    kinds: Kinds

    def variants(self, base: Job, pins: tuple[Pin, ...]) -> Iterator[tuple[int, Iterator[Job]]]:
        """Yield (stages per rank, candidates with most shards first) of what differs besides: the parameters that stay
        gathered, and the chunks of the loss."""
        for per_rank in stages_per_rank(base, self.mesh, int(self.job.microbatch), pins):
            for reshard in (True, False):
                for chunks in (1, 8):
                    if hold(pins, reshard=str(reshard).lower(), loss_chunks=chunks):
                        run = replace(
                            self.job.execution, stages_per_rank=per_rank, gathers_each=reshard, loss_chunks=chunks
                        )
                        yield per_rank, self._shards(replace(self.job, execution=run), pins)

    def _shards(self, job: Job, pins: tuple[Pin, ...]) -> Iterator[Job]:
        for shard in reversed(self.mesh.shards()):
            layout = self.mesh.layout(shard)
            if shard * layout.cp == 1 and not job.execution.gathers_each:
                continue  # nothing is gathered
            if hold(pins, dp_shard=shard, dp_replicate=layout.dp_replicate):
                yield replace(job, layout=layout)
