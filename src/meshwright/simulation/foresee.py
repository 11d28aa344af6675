"""Answer which layout of a model to use on a cluster: the public ``plan`` and ``foresee``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from operator import attrgetter
from typing import Any

from meshwright.core.config import from_dict, is_unset
from meshwright.core.errors import ConfigError, MeshwrightError
from meshwright.distributed.memory.dry_run import saved_by_blocks
from meshwright.introspection.blocks import Hints
from meshwright.introspection.cluster import Cluster
from meshwright.introspection.facts import ModelFacts, facts_with
from meshwright.planning.build import plan as build_plan
from meshwright.planning.layout import Layout
from meshwright.planning.plan import Plan
from meshwright.planning.recompute import ACTS_WITH
from meshwright.planning.techniques import RunTechniques, Techniques, as_techniques
from meshwright.planning.values import Batch
from meshwright.simulation.answer import (
    DEFAULTS,
    Foresight,
    Legal,
    Proposal,
    fills,
    legal_among,
    open_works,
    proposal,
    techniques_of,
    words,
)
from meshwright.simulation.cards import Machines, card_names
from meshwright.simulation.from_model import architecture_of, job_of_plan, left_out, with_saved
from meshwright.simulation.job import PARTS, Architecture, Job
from meshwright.simulation.measured import computing_in, machines_of
from meshwright.simulation.search import WORDS, Candidate, Pin, Progress, divisors, search
from meshwright.simulation.step_memory import RehearsedRank, rehearsed_memory, rehearsed_time, step_memory
from meshwright.simulation.step_time import step_time

WITHOUT = (("tp",), ("pp",), ("cp",), ("tp", "pp"), ("tp", "cp"), ("pp", "cp"), ("tp", "pp", "cp"))
AXES = (
    *(tuple(Pin(axis, "=", "1") for axis in axes) for axes in WITHOUT),
    *((Pin(axis, ">=", "2"),) for axis in ("tp", "cp", "pp")),
)
"""What is pinned of axes where rules refuse all of the fastest layouts: none, or one that a setting is about."""
BEYOND = 500
"""Candidates that rules are asked about before no layout is called legal."""
MOST_GPUS = 1 << 20
"""GPUs for which layouts are searched."""
FASTER = 0.98
"""Fraction of the time of the layout as stated below which another one is worth a line."""
OPEN = Layout()
"""The layout that states no size."""
CHOSEN = {
    "recompute": "activation_checkpointing",
    "loss_chunks": "loss_chunks",
    "reshard": "reshard_after_forward",
    "sync_grad_accum": "sync_grad_accum",
    "schedule": "pipeline_schedule",
    "layers_per_stage": "layers_per_stage",
    "pipeline_cuts": "pipeline_cuts",
}
"""Key of a pin -> technique that a search chooses where the request does not state it."""

ROWS = "batch.microbatch"
REMEDIES: tuple[tuple[str, Any], ...] = (
    ("techniques.loss_chunks", 64),
    ("techniques.sync_grad_accum", True),
    ("techniques.zero_stage", 3),
    (ROWS, 1),
    ("techniques.activation_checkpointing", "full"),
    ("techniques.optimizer_state", "8bit"),
    ("techniques.precision.master", "bfloat16"),
    ("techniques.cpu_offload", "optimizer"),
    ("techniques.cpu_offload", True),
)
"""Changes that make a layout smaller, in the order in which they are tried where nobody stated the key."""


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
        batch: rows and tokens of a step; a search chooses the microbatch if it states none.
        cluster: the GPUs, such as ``Cluster(64, gpu="h100", ranks_per_node=8, link="ib400")``.
        techniques: the typed request, or a plain dict of it; a search chooses recomputation, chunks of the loss, what
            stays gathered and the pipeline's schedule, as far as the request does not state them.
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
    if rehearsed and layout.is_open:
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
        cluster = from_dict(Cluster, cluster, where="cluster")
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
        batch = from_dict(Batch, batch, where="batch")
        conditions = tuple(map(Pin.parse, pins))
        if conditions and not layout.is_open:
            raise ConfigError(
                f"pins are for a layout that is searched, and the request states one ({layout}). Leave the layout out"
                f" and pin its sizes, such as tp={layout.tp}."
            )
        given = techniques if isinstance(techniques, dict) else vars(techniques or DEFAULTS)
        requested = as_techniques({key: value for key, value in given.items() if value != "auto"})
        facts = facts_with(model, requested.adapters, hints)
        return cls(facts, layout, batch, cluster, replace(requested, adapters=None), conditions, reduction)

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
        known, mode = Techniques(), self.techniques.activation_checkpointing
        shared, parts = ("precision", "freeze"), [key for key, other in ACTS_WITH.items() if other == mode in PARTS]
        plans = []
        for keys in (shared, ("activation_checkpointing", *parts)) if parts else (shared,):
            known = replace(known, **{key: getattr(self.techniques, key) for key in keys})
            plans.append(build_plan(self.facts, one, cluster=here, techniques=known))
        parameters = (replace(p, trainable=p.name not in plans[0].frozen) for p in self.facts.parameters)
        facts = replace(self.facts, parameters=tuple(parameters))
        architecture = architecture_of(facts, plans[-1].checkpointed)
        job = job_of_plan(facts, plans[0], row, self._machines(1), architecture)
        kinds, order = architecture.kinds
        firsts = [facts.blocks[order.index(kind)] for kind in range(len(kinds)) if facts.blocks]
        saved = [saved_by_blocks(self.facts, made, row, firsts) for made in plans]
        return with_saved(architecture, saved[0], saved[1] if parts else (), job)

    def _job(self, plan: Plan, rows: int = 0) -> Job:
        here = computing_in(self._machines(self.cluster.world), plan.precision.compute)
        batch = replace(self.batch, microbatch_rows=rows or self.batch.microbatch_rows)
        job = job_of_plan(self.facts, plan, batch, here, self._architecture)
        job = job.with_execution(imbalance=self.imbalance, straggler=self.straggler)
        device = job.machines.device
        if job.execution.products not in device.flops:
            raise ConfigError(
                f"{device.name} has no products in {job.execution.products}. Set techniques.precision.compute to one"
                f" that it has ({', '.join(device.flops)}), and techniques.float8 = none where it lacks float8."
            )
        return job

    def answer(self, progress: Progress | None = None, rehearsed: Sequence[RehearsedRank] = ()) -> Foresight:
        """Judge a stated layout, search for an open one."""
        if self.layout.is_open:
            return self._searched(progress)
        rows, world = self.batch.global_rows, self.cluster.world

        def stated(count: int) -> Plan:
            return self._plan(count, self.layout, self.techniques, self.batch)

        def works(count: int) -> bool:
            if not fills(self.layout, count, rows):
                return False
            with suppress(MeshwrightError):
                stated(count)
                return True
            return False

        try:
            plan = stated(world)
        except ConfigError as error:
            if fills(self.layout, world, rows) or any(size < 1 and size != -1 for size in vars(self.layout).values()):
                raise
            raise ConfigError(f"{str(error).partition('. Start ')[0].rstrip('.')}. {words(world, works)}") from None
        job = self._job(plan)
        time = rehearsed_time(job, rehearsed) if rehearsed else step_time(job)
        memory = rehearsed_memory(job, rehearsed) if rehearsed else step_memory(job)
        judged = proposal(Candidate(job, time, memory), self.techniques, plan)
        notes = tuple(left_out(self.facts, job.architecture, self.techniques))
        if not judged.fits:
            none = "No change of a switch that is not stated makes it fit: "
            scale = memory.total / step_memory(job).total if rehearsed else 1.0
            remedy = self._remedy(self.layout, self.techniques, self.batch.microbatch_rows, scale)
            notes = (remedy.strip() or f"{none}take another layout, more GPUs or shorter rows.", *notes)
        return Foresight(judged if judged.fits else None, (judged,), (judged,), (), 1, searched=False, notes=notes)

    def _searched(self, progress: Progress | None) -> Foresight:
        if (world := self.cluster.world) > MOST_GPUS:
            raise ConfigError(
                f"layouts are searched for up to {MOST_GPUS:,} GPUs, and the cluster has {world:,}: state a layout; one"
                f" is judged for any number"
            )
        legal = cache(partial(self._legal, world))  # most of the front are among the fastest
        job, kept = self._searchable(self.techniques), _kept(self.techniques, self.batch, self.pins)
        pins = (*self.pins, *kept, *self._implied(self.techniques))
        works = open_works(job, pins, self.techniques, self._machines, self._legal)
        found = search(job, pins, progress=progress)
        if not found.best and found.smallest is not None:
            smallest, device = found.smallest, job.machines.device
            beyond = (smallest.memory.total - device.memory_bytes) / 1e9
            chosen = techniques_of(smallest.job, self.techniques)
            remedy = self._remedy(smallest.job.layout, chosen, int(smallest.job.microbatch))
            raise ConfigError(
                f"nothing fits on {world} {device.name}: the smallest layout ({smallest.job.layout}, recompute"
                f" {smallest.job.execution.recompute}) needs {smallest.memory.total / 1e9:.1f} GB on a GPU,"
                f" {beyond:.1f} GB too much. {self._without(kept, legal)}{remedy}{'Or take' if remedy else 'Take'} more"
                f" GPUs or a larger card, or shorter rows."
            )
        shown, refused = legal_among(found.best, self.techniques, legal)
        front, _ = legal_among(found.front, self.techniques, legal)
        for some in AXES if found.best else ():
            if shown:
                break
            fewer = search(job, (*pins, *some))  # what rules refuse hangs on axes
            shown, front = (legal_among(one, self.techniques, legal)[0] for one in (fewer.best, fewer.front))
        if not shown:
            beyond_usual = search(job, pins, keep=BEYOND, usual=False)
            shown, others = legal_among(beyond_usual.best, self.techniques, legal)
            front, refused = legal_among(beyond_usual.front, self.techniques, legal)[0], refused or others
        if not (shown or refused):
            conditions = " and ".join([f"this batch of {self.batch.global_rows} rows", *map(str, pins)])
            raise ConfigError(
                f"{world} GPUs: no layout fills them with {conditions}. {self._without(kept, legal)}"
                f"{words(world, works)}"
            )
        if not shown:
            raise ConfigError(f"no layout that fits {world} GPUs is legal. {refused[0].reason}. {words(world, works)}")
        freed = tuple(one for one in self._freed(legal) if one.step_s < FASTER * shown[0].step_s) if kept else ()
        return Foresight(
            shown[0],
            tuple(shown),
            tuple(front),
            tuple(refused),
            found.tried,
            searched=True,
            kept=tuple(map(str, kept)),
            freed=freed[:2],
            notes=tuple(left_out(self.facts, job.architecture, self.techniques)),
        )

    def _remedy(self, layout: Layout, techniques: Techniques, own: int, scale: float = 1.0) -> str:
        """Say with which changes of what nobody stated a layout fits, and its memory then; "" where none are enough.

        Args:
            own: rows of a microbatch where they are not changed; 0: all of a rank.
            scale: bytes that the layout needs over those that are foreseen.
        """
        world = self.cluster.world

        @cache
        def memory(changes: tuple[tuple[str, Any], ...]) -> float:
            """Return the bytes on a GPU with changes; infinite where rules or pins refuse them."""
            values = {key.rpartition(".")[2]: value for key, value in changes}
            rows, dtype = values.pop("microbatch", 0), values.pop("master", techniques.precision.master)
            values["precision"] = replace(techniques.precision, master=dtype)
            with suppress(MeshwrightError):
                _kept(replace(self.techniques, **values), replace(self.batch, microbatch_rows=rows), self.pins)
                job = self._legal(world, layout, replace(techniques, **values), rows or own)[1]
                return scale * step_memory(job).total
            return float("inf")

        def is_open(key: str) -> bool:
            if key == ROWS:
                return not self.batch.microbatch_rows
            return not _is_stated(self.techniques, key.removeprefix("techniques."))

        usable = [(key, self.batch.rows_together if key == ROWS else value) for key, value in REMEDIES if is_open(key)]

        def tried() -> Iterator[tuple[tuple[str, Any], ...]]:
            """Yield each change alone, then more and more that rules allow together."""
            yield from ((one,) for one in usable)
            for first in (False, True):  # several microbatches may accumulate whole gradients
                some: dict[str, Any] = {}
                for key, value in sorted(usable, key=lambda one: one[0] != ROWS):
                    more = some | {key: value}
                    if (first or key != ROWS) and memory(tuple(more.items())) < float("inf"):
                        yield tuple((some := more).items())

        limit = self._machines(world).device.memory_bytes
        enough = next((changes for changes in tried() if memory(changes) <= limit), ())
        for one in enough[:-1]:  # leave out what is not needed
            fewer = tuple(other for other in enough if other != one)
            enough = fewer if memory(fewer) <= limit else enough
        words = ", ".join(f"{key} = {str(value).lower()}" for key, value in enough)
        return f"Set {words}: it fits then, with {memory(enough) / 1e9:.1f} GB on a GPU. " if enough else ""

    def _legal(self, count: int, layout: Layout, techniques: Techniques, rows: int) -> tuple[Plan, Job]:
        """Plan a candidate for a number of these GPUs, and return the job that it is then."""
        plan = self._plan(count, layout, techniques, replace(self.batch, microbatch_rows=rows))
        return plan, self._job(plan, rows)

    def _searchable(self, techniques: Techniques) -> Job:
        """Return a job to search from; its stages have the cuts that the techniques state, or none.

        Its layout is of data ranks alone; where rules refuse it, the first other one that they allow.

        Raises:
            ConfigError, UnsupportedError: they allow none; the reason is that of data ranks.
        """
        world = self.cluster.world
        sizes = [n for n in divisors(world) if n > 1]
        others = [(Layout(**{axis: n}), techniques) for n in sizes for axis in ("dp_replicate", "tp", "cp", "pp")]
        if is_unset(techniques.pipeline_schedule):
            loops = replace(techniques, pipeline_schedule="interleaved_1f1b")
            others += [(Layout(pp=n), loops) for n in sizes]
        try:
            whole = Pin("dp_shard", "=", "1") in self._implied(techniques)
            made = self._plan(world, Layout(dp_replicate=world, dp_shard=1) if whole else OPEN, techniques, None)
        except MeshwrightError as refused:
            for layout, changed in others:
                with suppress(MeshwrightError):
                    made = self._plan(world, layout, changed, None)
                    break
            else:
                raise refused from None
        job = self._job(made)
        return job if techniques.pipeline_cuts or techniques.layers_per_stage else job.with_execution(cuts=())

    def _implied(self, techniques: Techniques) -> Iterator[Pin]:
        """Yield what follows for a layout from techniques, so that no search tries what rules refuse."""
        if self.batch.pairs:
            yield Pin("loss_chunks", "=", "1")
        if techniques.data_parallel == "ddp" or techniques.zero_stage == 0:
            yield Pin("dp_shard", "=", "1")
        if techniques.sync_grad_accum == "shard":
            yield Pin("dp_replicate", ">=", "2")

    def _freed(self, legal: Legal) -> list[Proposal]:
        """Return the fastest legal layouts where switches that the request states are searched too."""
        free = replace(self.techniques, **{key: getattr(DEFAULTS, key) for key in CHOSEN.values()})
        pins = (*self.pins, *self._implied(free))
        return legal_among(search(self._searchable(free), pins).best, free, legal)[0]

    def _without(self, kept: tuple[Pin, ...], legal: Legal) -> str:
        """Say which layout fits where nothing of the switches is kept; "" where none does, or nothing was."""
        found = self._freed(legal) if kept else []
        if not found:
            return ""
        return f"Without {', '.join(map(str, kept))} this fits: {found[0]}. "


def _is_stated(techniques: Techniques, key: str) -> bool:
    stated, usual = (attrgetter(key)(one) for one in (techniques, DEFAULTS))
    return not is_unset(stated) if is_unset(usual) else stated != usual


def _kept(techniques: Techniques, batch: Batch, pins: tuple[Pin, ...]) -> tuple[Pin, ...]:
    """Return what a request states of the switches that a search chooses.

    Raises:
        ConfigError: a pin says otherwise.
    """
    rows = batch.microbatch_rows
    stated: list[tuple[str, str, Any]] = [("microbatch", "batch.microbatch", rows)] if rows else []
    for key, name in CHOSEN.items():
        if _is_stated(techniques, name):
            value = getattr(techniques, name)
            stated.append((key, f"techniques.{name}", list(value) if isinstance(value, tuple) else value))
    kept = []
    for key, name, value in stated:
        kept.append(Pin(key, "=", str(value).lower() if isinstance(value, bool) else str(value)))
        for pin in pins:
            if pin.key == key and not (pin.value == kept[-1].value if key in WORDS else pin.holds({key: value})):
                raise ConfigError(f"pin {pin} and {name} = {kept[-1].value} contradict each other: leave one out")
    return tuple(kept)
