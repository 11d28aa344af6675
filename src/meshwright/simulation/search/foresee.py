"""Answer which layout of a model to use on a cluster: the public ``plan`` and ``foresee``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from meshwright.core.errors import ConfigError
from meshwright.distributed.memory.dry_run import saved_by_blocks
from meshwright.introspection.blocks import Hints
from meshwright.introspection.cluster import Cluster
from meshwright.introspection.facts import ModelFacts, facts_with
from meshwright.planning.build import plan as build_plan
from meshwright.planning.layout import Layout
from meshwright.planning.plan import Plan
from meshwright.planning.techniques import RunTechniques, Techniques, as_techniques
from meshwright.planning.values import Batch
from meshwright.simulation.hardware.cards import Machines, card_names
from meshwright.simulation.hardware.measured import computing_in, machines_of
from meshwright.simulation.workload.architecture import Architecture
from meshwright.simulation.workload.execution import Job
from meshwright.simulation.workload.step_memory import RehearsedRank, rehearsed_memory, rehearsed_time, step_memory
from meshwright.simulation.workload.step_time import step_time

from .answer import Foresight, legal_among, open_works, proposal, refusing, stated_works, words
from .from_model import job_of_plan, with_saved
from .search import Candidate, Found, Pin, Progress, search

OPEN = Layout()
"""The layout that states no size."""


def plan(
    model: Any,
    layout: Layout,
    *,
    batch: Batch | None = None,
    cluster: Cluster | None = None,
    techniques: RunTechniques | dict | None = None,
    reduction: str = "sum",
    hints: Hints | None = None,
) -> Plan:
    """Decide everything about a layout, with no process group and no GPU.

    With ``Cluster(64, gpu="h100")`` the plan is for these GPUs (bfloat16 unless the techniques choose otherwise), and a
    note of it has the forecast of memory and time: a stated layout is judged, an open one (``Layout()``) is searched
    and the plan is that of the layout that ``foresee`` chooses.

    Args:
        model: a model config, a module (on meta or not), or a function that returns one.
        layout: mesh sizes; open ones (-1) need a ``cluster`` to be filled from.
        batch: the shape of a step's data, checked against model and mesh; the plan itself holds for any batch. A
            cluster of GPUs that are named needs it.
        cluster: ranks, ranks per node and device, or GPUs by their name; by default the layout's own size on this
            machine's device.
        techniques: the typed request, or a plain dict of it.
        reduction: "sum", or "mean" for the functions that keep torch's averaging of gradients.
        hints: facts about a model that measurement cannot read, for a module or a function that returns one.

    Raises:
        ConfigError, UnsupportedError: a rule is broken; the message names the rule and the remedy.
    """
    if cluster is None or not (cluster.gpu or cluster.profile):
        return build_plan(
            model,
            layout,
            batch=batch,
            cluster=cluster,
            techniques=techniques,
            reduction=reduction,
            hints=hints,
        )
    return _Question.of(model, layout, batch, cluster, techniques, (), reduction, hints).answer().candidates[0].plan


def foresee(
    model: Any,
    layout: Layout = OPEN,
    *,
    batch: Batch,
    cluster: Cluster,
    techniques: RunTechniques | dict | None = None,
    pins: Sequence[str] = (),
    hints: Hints | None = None,
    progress: Progress | None = None,
    rehearsed: Sequence[RehearsedRank] = (),
    imbalance: float = 1.0,
    straggler: float = 1.0,
) -> Foresight:
    """Foresee memory and time of a model on GPUs that need not be here, and which layout to use there.

    Forecasts are arithmetic over data sheets; docs/rent.md has their errors against published measurements.

    Args:
        model: a model config, a module (on meta or not), or a function that returns one.
        layout: a stated layout is judged; an open one, the default, is searched.
        batch: rows and tokens of a step; a search chooses its microbatch.
        cluster: the GPUs, such as ``Cluster(64, gpu="h100", ranks_per_node=8, link="ib400")``.
        techniques: the typed request, or a plain dict of it; a search chooses recomputation, chunks of the loss, what
            stays gathered and the pipeline's schedule.
        pins: conditions that a search keeps, such as "tp<=8", "recompute=none".
        hints: facts about a model that measurement cannot read, for a module or a function that returns one.
        progress: receives the fraction of a search that is done.
        rehearsed: figures of real steps of the stated layout's ranks, which replace those that would be foreseen.
        imbalance: tokens of the fullest expert rank over the mean, 1 or more.
        straggler: time of the slowest rank over the others', 1 or more.

    Raises:
        ConfigError: an unknown card or link, a cluster that cannot be, or nothing fits or is legal; with what would.
        UnsupportedError: a rule refuses the stated layout.
    """
    if rehearsed and _is_open(layout):
        raise ConfigError("rehearsals are of one layout, and the layout is open: state the layout that was rehearsed")
    for name, value in (("imbalance", imbalance), ("straggler", straggler)):
        if not 1.0 <= value < float("inf"):
            raise ConfigError(f"{name} = {value}: the fullest or slowest over the mean is 1 or more")
    question = _Question.of(model, layout, batch, cluster, techniques, pins, "sum", hints)
    return replace(question, imbalance=imbalance, straggler=straggler).answer(progress, rehearsed)


@dataclass(frozen=True)
class _Question:
    """A model, its batch and its techniques on a cluster of GPUs."""

    facts: ModelFacts
    layout: Layout
    batch: Batch
    cluster: Cluster
    techniques: Techniques
    pins: tuple[Pin, ...]
    reduction: str
    imbalance: float = 1.0
    straggler: float = 1.0

    @classmethod
    def of(
        cls,
        model: Any,
        layout: Layout,
        batch: Batch | None,
        cluster: Cluster,
        techniques: RunTechniques | dict | None,
        pins: Sequence[str],
        reduction: str,
        hints: Hints | None,
    ) -> _Question:
        """Check everything that does not need the model before the model is read."""
        if not (cluster.gpu or cluster.profile):
            raise ConfigError(
                f'the cluster names no GPU: give one, such as Cluster({cluster.world}, gpu="h100"). Known are'
                f" {', '.join(card_names())}."
            )
        cluster = replace(cluster, device=machines_of(cluster).device.kind)
        if batch is None:
            raise ConfigError(
                "memory and time on a GPU are of a batch: give batch=Batch(global_rows, seq_len), with microbatch_rows"
                " where the layout is stated"
            )
        conditions, is_open = tuple(map(Pin.parse, pins)), _is_open(layout)
        if conditions and not is_open:
            raise ConfigError(
                f"pins are for a layout that is searched, and the request states one ({layout}). Leave the layout out"
                f" and pin its sizes, such as tp={layout.tp}."
            )
        requested = as_techniques(techniques)
        facts = facts_with(model, requested.adapters, hints)
        return cls(facts, layout, batch, cluster, replace(requested, adapters=None), conditions, reduction)

    def answer(self, progress: Progress | None = None, rehearsed: Sequence[RehearsedRank] = ()) -> Foresight:
        """Judge a stated layout, search for an open one."""
        return self._searched(progress) if _is_open(self.layout) else self._judged(rehearsed)

    def _machines(self, count: int) -> Machines:
        return machines_of(self.cluster, count)

    def _plan(self, count: int, layout: Layout, techniques: Techniques, batch: Batch | None) -> Plan:
        """Plan for a number of these GPUs."""
        here = Cluster(count, self._machines(count).per_node, self.cluster.device)
        return build_plan(
            self.facts, layout, batch=batch, cluster=here, techniques=techniques, reduction=self.reduction
        )

    @cached_property
    def _architecture(self) -> Architecture:
        """The model's architecture, with what its code was found to save in a dry run of one row on one rank."""
        one, row = Layout(dp_shard=1), Batch(1, self.batch.seq_len, 1, self.batch.vocab_size)
        here = Cluster(1, 1, self.cluster.device)
        plain = build_plan(self.facts, one, cluster=here, techniques={"precision": self.techniques.precision})
        job = job_of_plan(self.facts, plain, row, self._machines(1))
        return with_saved(job.architecture, saved_by_blocks(self.facts, plain, row), job)

    def _job(self, plan: Plan) -> Job:
        here = computing_in(self._machines(self.cluster.world), plan.precision.compute)
        job = job_of_plan(self.facts, plan, self.batch, here)
        execution = replace(job.execution, imbalance=self.imbalance, straggler=self.straggler)
        job = replace(job, architecture=self._architecture, execution=execution)
        device = job.machines.device
        if job.execution.products not in device.flops:
            raise ConfigError(
                f"{device.name} has no products in {job.execution.products}. Set techniques.precision.compute to one"
                f" that it has ({', '.join(device.flops)}), and techniques.float8 = none where it lacks float8."
            )
        return job

    def _judged(self, rehearsed: Sequence[RehearsedRank]) -> Foresight:
        rows, world = self.batch.global_rows, self.cluster.world

        def stated(count: int) -> Plan:
            return self._plan(count, self.layout, self.techniques, self.batch)

        with refusing(self.layout, world, rows, stated_works(self.layout, rows, stated)):
            plan = stated(world)
        job = self._job(plan)
        time = rehearsed_time(job, rehearsed) if rehearsed else step_time(job)
        memory = rehearsed_memory(job, rehearsed) if rehearsed else step_memory(job)
        judged = proposal(Candidate(job, time, memory), self.techniques, plan)
        return Foresight(judged if judged.fits else None, (judged,), (judged,), (), 1, searched=False)

    def _searched(self, progress: Progress | None) -> Foresight:
        world = self.cluster.world

        def legal_on(count: int, layout: Layout, techniques: Techniques, rows: int) -> Plan:
            return self._plan(count, layout, techniques, replace(self.batch, microbatch_rows=rows))

        def legal(layout: Layout, techniques: Techniques, rows: int) -> Plan:
            return legal_on(world, layout, techniques, rows)

        job = self._job(self._plan(world, self.layout, self.techniques, None))
        works = open_works(job, self.pins, self.techniques, self._machines, legal_on)
        found = search(job, self.pins, progress=progress)
        if not found.best:
            raise ConfigError(_nothing(found, world, works))
        shown, refused = legal_among(found.best, self.techniques, legal)
        front, _ = legal_among(found.front, self.techniques, legal)
        if not shown:
            raise ConfigError(f"no layout that fits {world} GPUs is legal. {refused[0].reason}. {words(world, works)}")
        return Foresight(shown[0], tuple(shown), tuple(front), tuple(refused), found.tried, searched=True)


def _is_open(layout: Layout) -> bool:
    """Return whether a layout states no size, whatever its class."""
    return all(value == getattr(layout, axis) for axis, value in vars(OPEN).items())


def _nothing(found: Found, world: int, works: Callable[[int], bool]) -> str:
    if found.smallest is None:
        return f"{world} GPUs: no layout fills them with this batch and these pins. {words(world, works)}"
    smallest = found.smallest
    job, device = smallest.job, smallest.job.machines.device
    beyond = (smallest.memory.total - device.memory_bytes) / 1e9
    return (
        f"nothing fits on {world} {device.name}: the smallest layout ({job.layout}, recompute"
        f" {job.execution.recompute}) needs {smallest.memory.total / 1e9:.1f} GB on a GPU, {beyond:.1f} GB too much."
        f" Take more GPUs or a larger card, techniques.optimizer_state = 8bit, or shorter rows."
    )
