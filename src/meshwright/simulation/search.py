"""Search the layouts and switches of a job for the fastest that fit."""

from __future__ import annotations

import heapq
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product

from meshwright.core.errors import ConfigError, nearest
from meshwright.planning.layout import Layout
from meshwright.planning.pipeline.orders import schedule_kind
from meshwright.planning.pipeline.schedule import read_schedule
from meshwright.simulation.job import Execution, Job
from meshwright.simulation.step_memory import SavedBytes, StepMemory, least_memory, rising_memory, step_memory
from meshwright.simulation.step_time import Kinds, StepTime, least_step_seconds, least_time, step_time

# --- pin parts of a layout

SIZES = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "microbatch", "stages_per_rank", "loss_chunks")
WORDS: Mapping[str, tuple[str, ...]] = {
    "recompute": ("none", "selective", "full"),
    "reshard": ("true", "false"),
    "sync_grad_accum": ("true", "false"),
    "schedule": ("1f1b", "interleaved_1f1b", "zbv_zero_bubble"),
}
COMPARISONS: Mapping[str, Callable[[int, int], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "=": operator.eq,
}
_WRITTEN = re.compile(r"\s*(\w+)\s*(<=|>=|=)\s*(\w+)\s*")


@dataclass(frozen=True)
class Pin:
    """A condition on one size or switch of a candidate, such as ``tp <= 8`` or ``recompute = none``."""

    key: str
    comparison: str
    value: str

    @classmethod
    def parse(cls, text: str) -> Pin:
        """Read ``tp<=8``, ``recompute=none``.

        Raises:
            ConfigError: an unknown key, or a value that the key cannot have.
        """
        found = _WRITTEN.fullmatch(text)
        if found is None:
            raise ConfigError(f"pin {text!r}: a pin is a key, one of <= >= =, and a value, such as tp<=8 or pp=1")
        key, comparison, value = found.groups()
        keys = (*SIZES, *WORDS)
        if key not in keys:
            raise ConfigError(f"pin {text!r}: unknown key '{key}'.{nearest(key, keys)} Legal are {', '.join(keys)}.")
        if key in WORDS and (comparison != "=" or value not in WORDS[key]):
            raise ConfigError(f"pin {text!r}: legal are {', '.join(f'{key}={word}' for word in WORDS[key])}")
        if key in SIZES and not (value.isdigit() and int(value)):
            raise ConfigError(f"pin {text!r}: {key} is a whole number from 1 on")
        return cls(key, comparison, value)

    def holds(self, values: Mapping[str, int | str]) -> bool:
        """Return whether a candidate's values keep the condition; keys that are not there are not judged."""
        if self.key not in values:
            return True
        value = values[self.key]
        if self.key in ("reshard", "sync_grad_accum"):  # a number of ranks, and "shard", are ways to do it
            return (str(value) == "false") == (self.value == "false")
        if self.key in WORDS:
            return str(value) == self.value
        return COMPARISONS[self.comparison](int(value), int(self.value))

    def __str__(self) -> str:
        return f"{self.key}{self.comparison}{self.value}"


def hold(pins: tuple[Pin, ...], **values: int | str) -> bool:
    """Return whether all pins hold."""
    return all(pin.holds(values) for pin in pins)


# --- enumerate the layouts and switches that a search tries

STAGES_PER_RANK = (1, 2, 4)
ZERO_BUBBLE, MOST_RANKS = "zbv_zero_bubble", 16
"""The schedule that is tried beside 1F1B and its loops, and the pipeline ranks up to which it is."""
LARGEST_CONTEXT = 16
MICROBATCH_TOKENS = 1 << 16
"""Tokens of a microbatch on one rank beyond which products get no faster."""


@cache
def divisors(number: int) -> tuple[int, ...]:
    """List the divisors of a number, smallest first."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return tuple(sorted({*small, *(number // n for n in small)}))


@dataclass(frozen=True)
class Mesh:
    """Sizes of a layout before the data ranks are split into replicas and shards."""

    pp: int
    data: int
    cp: int
    tp: int
    ep: int

    def shards(self) -> list[int]:
        """List the legal sizes of dp_shard."""
        return [n for n in divisors(self.data) if (n * self.cp * self.tp) % self.ep == 0]

    def layout(self, shard: int) -> Layout:
        return Layout(self.pp, self.data // shard, shard, self.cp, self.tp, self.ep)


def meshes(base: Job, pins: tuple[Pin, ...], *, usual: bool = True) -> Iterator[Mesh]:
    """Yield the meshes whose sizes divide the batch and the GPUs of a job's machines.

    Args:
        usual: those alone whose tensor axes divide heads within a node, and whose few context ranks have equal parts;
            else rules say what is legal.
    """
    gpus, model, length = base.machines.gpus, base.architecture, base.seq_len
    heads = max((b.attention.heads for b in model.blocks if b.attention), default=1)
    keys = max((b.attention.kv_heads for b in model.blocks if b.attention), default=1)
    experts = max((b.experts.number for b in model.blocks if b.experts), default=1)
    for pp in divisors(gpus):
        if pp > len(model.blocks) or not hold(pins, pp=pp):
            continue
        for tp in divisors(gpus // pp):
            divides = tp <= base.machines.per_node and not (heads % tp or max(keys, tp) % min(keys, tp))
            if (usual and not divides) or not hold(pins, tp=tp):
                continue
            for cp in divisors(gpus // pp // tp):
                divides = cp <= LARGEST_CONTEXT and not (length % (2 * cp) or (length / cp) % tp)
                if (usual and not divides) or not hold(pins, cp=cp):
                    continue
                data = gpus // pp // tp // cp
                if base.rows % data:
                    continue
                for ep in divisors(experts):
                    if (data * cp * tp) % ep == 0 and hold(pins, ep=ep):
                        yield Mesh(pp, data, cp, tp, ep)


def microbatches(base: Job, mesh: Mesh, pins: tuple[Pin, ...]) -> list[int]:
    """List the legal sequences of a forward on one rank, fewest first; many tokens only where a pin states them.

    More than a rank's rows are all of them, as in training.
    """
    rows, stated = base.rows // mesh.data, {int(p.value) for p in pins if (p.key, p.comparison) == ("microbatch", "=")}
    most = max(MICROBATCH_TOKENS * mesh.cp // base.seq_len, base.together)
    sizes = stated or {n for n in divisors(rows) if n <= most}  # the last microbatch may be smaller than stated
    whole = (n for n in sizes if not (n % base.together or rows % base.together))
    return sorted({min(n, rows) for n in whole if hold(pins, microbatch=n)})


def recomputations(base: Job, pins: tuple[Pin, ...]) -> list[Execution]:
    """List the ways to recompute that the pins allow, each as the base job's execution with that mode.

    A pin to a mode that no search tries keeps the base job's own.
    """
    if any(pin.key == "recompute" and pin.value not in WORDS["recompute"] for pin in pins):
        return [base.execution]
    return [
        replace(base.execution, recompute=mode, recomputed=1.0, named="", offloads=False)  # type: ignore[arg-type]
        for mode in ("none", "selective", "full")
        if hold(pins, recompute=mode)
    ]


def chunkings(pins: tuple[Pin, ...]) -> list[int]:
    """List the chunks in which the loss may be computed, fewest first."""
    stated = {int(pin.value) for pin in pins if (pin.key, pin.comparison) == ("loss_chunks", "=")}
    return [chunks for chunks in sorted(stated or {1, 8}) if hold(pins, loss_chunks=chunks)]


def stages_per_rank(base: Job, mesh: Mesh, microbatch: int, pins: tuple[Pin, ...]) -> list[int]:
    """List how many stages each pipeline rank may have (1F1B, or interleaved)."""
    cuts = len(base.execution.cuts)  # as many stages as a config states
    if mesh.pp == 1:
        return [1] if hold(pins, stages_per_rank=1) and not cuts else []
    blocks, found = len(base.architecture.blocks), []
    number = -(-base.rows // mesh.data // microbatch)
    pinned = {int(pin.value) for pin in pins if pin.key == "stages_per_rank"}
    for per_rank in [cuts // mesh.pp] if cuts else sorted({*STAGES_PER_RANK, *pinned}):
        stages = mesh.pp * per_rank
        if not 0 < stages <= blocks or stages != (cuts or stages) or not hold(pins, stages_per_rank=per_rank):
            continue
        kind = schedule_kind("1f1b" if per_rank == 1 else "interleaved_1f1b")
        size = -(-blocks // stages)
        if kind.legal(number, mesh.pp) == number and (cuts or per_rank == 1 or -(-blocks // size) == stages):
            found.append(per_rank)
    return found


def schedules(base: Job, mesh: Mesh, microbatch: int, pins: tuple[Pin, ...]) -> list[tuple[int, str]]:
    """List (stages per rank, schedule) that a pipeline may have; "": 1F1B or its loops.

    Rules refuse a backward in two parts where blocks are compiled or gradients reduced with every microbatch. A pin to
    a schedule that no search tries has that one alone.
    """
    blocks, number = len(base.architecture.blocks), -(-base.rows // mesh.data // microbatch)
    cuts = len(base.execution.cuts)
    name = next((pin.value for pin in pins if pin.key == "schedule" and pin.value not in WORDS["schedule"]), "")
    if name and mesh.pp > 1:
        if name.endswith(".csv"):
            table = read_schedule(name)
            per_rank = len(table.rank_of) // len(table.ranks)
            fits = (len(table.ranks), table.microbatches) == (mesh.pp, number)
        else:
            kind = schedule_kind(name)
            per_rank = cuts // mesh.pp if cuts and kind.loops else kind.per_rank(blocks, mesh.pp)
            fits = kind.legal(number, mesh.pp) == number
        fits = (
            fits
            and per_rank * mesh.pp in ([cuts] if cuts else range(blocks + 1))
            and hold(pins, stages_per_rank=per_rank)
        )
        return [(per_rank, name)] if fits else []
    found = [
        (per_rank, "")
        for per_rank in stages_per_rank(base, mesh, microbatch, pins)
        if mesh.pp == 1 or hold(pins, schedule="1f1b" if per_rank == 1 else "interleaved_1f1b")
    ]
    splits = not (base.execution.fused or base.execution.reduces_each)
    fits = 1 < mesh.pp <= MOST_RANKS and 2 * mesh.pp in ([cuts] if cuts else range(blocks + 1))
    if splits and fits and hold(pins, stages_per_rank=2, schedule=ZERO_BUBBLE):
        found.append((2, ZERO_BUBBLE))
    return found


def reductions(job: Job, schedule: str, pins: tuple[Pin, ...]) -> list[bool]:
    """List whether gradients may be reduced with every microbatch: shards of them accumulate then, not whole ones.

    Rules refuse that with a backward in two parts. A config that asks for it keeps it.
    """
    if job.execution.reduces_each or job.microbatches == 1 or job.execution.zero != 3:
        found = [job.execution.reduces_each]
    else:
        found = [False] if schedule == ZERO_BUBBLE else [False, True]
    return [each for each in found if hold(pins, sync_grad_accum=str(each).lower())]


# --- find the fastest layouts of a model on a cluster, and those that need least memory for their speed

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
        """The choices, for comparing candidates; when gradients are reduced makes no other candidate."""
        return (self.job.layout, *(value for key, value in self.job.switches.items() if key != "sync_grad_accum"))


@dataclass
class Found:
    """The result of a search.

    Attributes:
        best: candidates that fit, fastest first.
        front: candidates of which no other is both faster and smaller, fastest first.
        smallest: the candidate with the least memory, whether it fits or not.
        tried: number of candidates that were compared.
    """

    best: list[Candidate] = field(default_factory=list)
    front: list[Candidate] = field(default_factory=list)
    smallest: Candidate | None = None
    tried: int = 0


def search(
    base: Job, pins: tuple[Pin, ...] = (), *, keep: int = 24, usual: bool = True, progress: Progress | None = None
) -> Found:
    """Search all layouts of a job's machines for the ``keep`` fastest that fit.

    Groups of candidates are tried in the order of a lower bound of their time, and candidates simulated in the order of
    a closer one. Either is passed over if its states alone do not fit; or if the bound is above the slowest that is
    kept, and something faster needs less memory, so that it has no part in the front.

    Args:
        base: the model, batch, machines, and the switches that are not searched; its layout is not used.
        usual: of meshes (see there).
        progress: receives the fraction that is done.
    """
    found, chosen = Found(), _Chosen(keep)
    smallest: tuple[_Group, Job, StepMemory] | None = None  # of those that do not fit
    limit = base.machines.device.memory_bytes
    groups = sorted(_groups(base, pins, progress, usual=usual), key=lambda entry: entry[:2])
    for bound, _, group, least in groups:
        chosen.judge_up_to(bound)
        if chosen.is_beaten(bound, least):
            continue
        for least_s, shards in group.variants(base, pins, bound):
            for job in shards:
                found.tried += 1
                bounds = rising_memory(job, group.saved)
                if any((memory := bound).total > limit or chosen.is_beaten(least_s, memory.total) for bound in bounds):
                    if memory.total > limit and (smallest is None or memory.total < smallest[2].total):
                        memory = step_memory(job, group.saved)
                        if smallest is None or memory.total < smallest[2].total:
                            smallest = group, job, memory
                    break  # fewer shards need more
                chosen.add(max(least_s, least_step_seconds(job, group.kinds)), found.tried, group, job, memory)
    chosen.judge_up_to(math.inf)
    found.best = [candidate for _, _, candidate in sorted(chosen.best, key=lambda entry: (-entry[0], entry[1]))]
    found.front = [c for c in chosen.front if c.time.seconds <= FRONT * found.best[0].time.seconds]
    if smallest is not None:
        group, job, memory = smallest
        found.smallest = Candidate(job, step_time(job, group.kinds), memory)
    return found


class _Chosen:
    """The candidates simulated so far that are among the fastest, or that nothing faster and smaller beats; and those
    that wait for their turn, in the order of a lower bound of their time."""

    def __init__(self, keep: int):
        self.keep = keep
        self.best: list[tuple[float, int, Candidate]] = []
        """A heap, slowest first."""
        self.front: list[Candidate] = []
        self._waiting: list[tuple[float, int, bool, _Group, Job, StepMemory]] = []

    def is_beaten(self, seconds: float, size: float) -> bool:
        """Return whether a candidate that takes so long at least, and so much memory, is of no interest."""
        if len(self.best) < self.keep or seconds <= -self.best[0][0]:
            return False
        if seconds > FRONT * self.front[0].time.seconds:
            return True
        return any(c.time.seconds <= seconds and c.memory.total <= size for c in self.front)

    def add(self, seconds: float, number: int, group: _Group, job: Job, memory: StepMemory) -> None:
        """Let a candidate wait that takes so long at least."""
        heapq.heappush(self._waiting, (seconds, number, job.layout.pp == 1, group, job, memory))

    def judge_up_to(self, bound: float) -> None:
        """Simulate all that may take less than a bound, unless their own bounds show that they are of no interest."""
        while self._waiting and self._waiting[0][0] <= bound:
            seconds, number, is_close, group, job, memory = heapq.heappop(self._waiting)
            if self.is_beaten(seconds, memory.total):
                continue
            if not is_close:
                closer = max(seconds, least_step_seconds(job, group.kinds, closely=True))
                heapq.heappush(self._waiting, (closer, number, True, group, job, memory))
                continue
            candidate = Candidate(job, step_time(job, group.kinds), memory)
            front: list[Candidate] = []
            for one in sorted([*self.front, candidate], key=lambda c: (c.time.seconds, c.memory.total)):
                if not front or one.memory.total < front[-1].memory.total:
                    front.append(one)
            self.front = front
            heapq.heappush(self.best, (-candidate.time.seconds, number, candidate))
            if len(self.best) > self.keep:
                heapq.heappop(self.best)


def _groups(
    base: Job, pins: tuple[Pin, ...], progress: Progress | None, *, usual: bool
) -> Iterator[tuple[float, int, _Group, float]]:
    """Yield (bound of the time, number, group, bound of the memory) of all groups whose states fit."""
    known: dict[tuple, tuple[Kinds, SavedBytes]] = {}
    candidates, number = list(meshes(base, pins, usual=usual)), 0
    fitting = [(mesh, least_memory(base.with_layout(mesh.layout(mesh.data)))) for mesh in candidates]
    smallest = min((least for _, least in fitting), default=0.0)
    runs = [replace(run, stages_per_rank=1, schedule="") for run in recomputations(base, pins)]
    for place, (mesh, least) in enumerate(fitting):
        if progress is not None:
            progress(place / len(fitting))
        if least > max(base.machines.device.memory_bytes, smallest):
            continue
        layout = mesh.layout(mesh.data)
        for microbatch in microbatches(base, mesh, pins):
            for run in runs:
                job = replace(base, layout=layout, microbatch=microbatch, execution=run)
                key = Kinds.key(job)
                if key not in known:
                    known[key] = Kinds(job), SavedBytes(job)
                kinds, saved = known[key]
                number += 1
                yield least_time(job, kinds), number, _Group(mesh, job, kinds, saved), least


@dataclass(frozen=True)
class _Group:
    """Candidates whose blocks take the same time: one mesh, microbatch and recomputation."""

    mesh: Mesh
    job: Job
    kinds: Kinds
    saved: SavedBytes

    def variants(self, base: Job, pins: tuple[Pin, ...], bound: float) -> Iterator[tuple[float, Iterator[Job]]]:
        """Yield (bound of the time, candidates with most shards first) of what differs besides: schedule and stages per
        rank, the parameters that stay gathered, the chunks of the loss, and when gradients are reduced."""
        for per_rank, schedule in schedules(base, self.mesh, int(self.job.microbatch), pins):
            # with weight gradients in its place, a wait may vanish
            waits = 0.0 if schedule else bound / self.job.microbatches * (self.mesh.pp - 1) / per_rank
            alone = self.mesh.data * self.mesh.cp == 1  # nothing is gathered
            for reshard, chunks, each in product((True, False), chunkings(pins), reductions(self.job, schedule, pins)):
                if alone or hold(pins, reshard=str(reshard).lower()):
                    job = self.job.with_execution(
                        schedule=schedule,
                        stages_per_rank=per_rank,
                        gathers_each=reshard,
                        loss_chunks=chunks,
                        reduces_each=each,
                    )
                    yield bound + waits, self._shards(job, pins)

    def _shards(self, job: Job, pins: tuple[Pin, ...]) -> Iterator[Job]:
        for shard in reversed(self.mesh.shards()):
            layout = self.mesh.layout(shard)
            shares = job.execution.reduces_each and not self.job.execution.reduces_each
            if shard * layout.cp == 1 and (shares or not job.execution.gathers_each):
                continue  # nothing is gathered, and gradients are whole anyway
            if hold(pins, dp_shard=shard, dp_replicate=layout.dp_replicate):
                yield job.with_layout(layout)
