"""Rehearse a run: real steps of one rank, without the others.

Beside peers or without them: a test holds both against each other.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median

import torch

from meshwright.core.config import from_dict
from meshwright.core.devices import CPU, check_device_type, finish_stream, is_accelerator, local_device
from meshwright.core.dtypes import bytes_text, duration_text
from meshwright.core.errors import ConfigError, MeshwrightError, UnsupportedError
from meshwright.distributed.process.absent_peers import Duration, Message, Operator, OperatorRecorder, absent_peers
from meshwright.distributed.process.workers import WorkerDied, WorkerFailed, WorkerPool, with_variables
from meshwright.distributed.process.world import STORE
from meshwright.introspection.cluster import Cluster
from meshwright.planning.explain import columns
from meshwright.planning.memory import MemoryUse
from meshwright.planning.plan import Plan
from meshwright.planning.rank_kinds import RankKind, axes_among, coordinates, kinds_of_ranks
from meshwright.planning.values import Batch
from meshwright.simulation.cards import Machines, message_s
from meshwright.simulation.step_memory import RehearsedRank
from meshwright.training.build import Run, batch_of, build_run, device_name, facts_of, plan_run
from meshwright.training.config import Config
from meshwright.training.memory import KINDS, MemoryReading, read_memory, reset_peak
from meshwright.training.model_source import model_source, planned_tokenizer
from meshwright.training.preference import pretend_references
from meshwright.training.stopping import StopRequest
from meshwright.training.throughput import StartupTimeline
from meshwright.training.views.progress import Progress
from meshwright.training.views.watching import MemoryWatch

# --- take steps of a run and observe them

Context = AbstractContextManager[object]
UNWATCHED: Context = nullcontext()


@dataclass(frozen=True)
class StepsOfRank:
    """The observations of a rank's steps.

    Attributes:
        memory: the most bytes at one time in the first step, by kind, as a run accounts for them.
        peak: the process's memory after all steps; on an accelerator the most in them.
        operators: the operators of the second step, in order: forward, backward, optimizer step.
        messages: the messages among them.
        first_seconds: seconds of the first step, which compiles.
        seconds: seconds of the steps behind the second.
    """

    memory: Mapping[MemoryUse, int]
    peak: MemoryReading
    operators: tuple[Operator, ...]
    messages: tuple[Message, ...]
    first_seconds: float
    seconds: tuple[float, ...]


def observe(run: Run, steps: int) -> StepsOfRank:
    """Take two steps that are watched, and ``steps`` that are timed. Collective where peers are there."""
    run.model.learn_documents()
    pretend_references(run.config, run.feed)
    reset_peak(run.model.device)
    watch, recorder = MemoryWatch(run), OperatorRecorder()
    first = _step(run, 0, watch.computing(), watch.stepping())
    watch.end_first_step()
    _step(run, 1, recorder, recorder)
    seconds = tuple(_step(run, number) for number in range(2, 2 + steps))
    peak = read_memory(run.model.device)
    return StepsOfRank(watch.found, peak, tuple(recorder.recorded), tuple(recorder.messages), first, seconds)


def _step(run: Run, number: int, computing: Context = UNWATCHED, stepping: Context = UNWATCHED) -> float:
    """Take an optimizer step, as the trainer does, and return its seconds."""
    finish_stream(run.model.device)
    began = time.perf_counter()
    run.schedule.apply(run.optimizer.optimizer, number)
    batch = run.feed.next_batch()
    with computing:
        run.model.forward_backward(batch)
    with stepping:
        run.model.optimizer_step(run.optimizer.optimizer, run.config.optimizer.max_norm)
    finish_stream(run.model.device)
    return time.perf_counter() - began


# --- define the result of a rehearsal

FORMAT = 1
"""Version of the JSON; another meaning of a field gets another number."""


@dataclass(frozen=True)
class MessageRow:
    """The messages of one kind in a step.

    Attributes:
        bytes: those that the rank sends.
        seconds: foreseen seconds of all of them; 0 where messages took none.
    """

    op: str
    axis: str
    ranks: int
    calls: int
    bytes: float
    seconds: float = 0.0


@dataclass(frozen=True)
class Rehearsal:
    """One rank's steps, taken alone.

    Attributes:
        rank, world: the rank, and the number of ranks of the run.
        coordinates: axis of the mesh -> the rank's place on it.
        alike: number of ranks with the same work, this one included; 0: not counted.
        work: what tells these ranks from others, in words.
        device: name of the device.
        build_seconds: seconds to build the run: plan, data, weights, layout.
        first_step_seconds: seconds of the first step, compilation included.
        step_seconds: seconds of each later step that was timed; with ``links`` messages take time in them.
        memory: kind of memory -> the most bytes at one time in forward and backward of the first step, and the
            optimizer's state behind it.
        peak_bytes: the most bytes at one time in all steps, by the device's allocator; on a CPU of the whole process.
        peak_label: name of that quantity.
        operators: operator -> number of its calls in a step.
        messages: the messages of a step.
        links: the devices and links whose messages' seconds were foreseen; empty: messages took no time.
        plan: digest of the plan and the batch (``digest``).
        refused: why the rank could not go on; empty where it could.
        exit_status: the exit status that this error has.
    """

    rank: int
    world: int
    coordinates: dict[str, int] = field(default_factory=dict)
    alike: int = 0
    work: str = ""
    device: str = ""
    build_seconds: float = 0.0
    first_step_seconds: float = 0.0
    step_seconds: tuple[float, ...] = ()
    is_compiled: bool = False
    memory: dict[str, int] = field(default_factory=dict)
    peak_bytes: int = 0
    peak_label: str = ""
    operators: dict[str, int] = field(default_factory=dict)
    messages: tuple[MessageRow, ...] = ()
    links: str = ""
    plan: str = ""
    refused: str = ""
    exit_status: int = 0

    @property
    def seconds(self) -> float:
        """Typical seconds of a step: the median; NaN-free 0 where none was timed."""
        return median(self.step_seconds) if self.step_seconds else 0.0

    @property
    def compile_seconds(self) -> float:
        """Seconds by which compilation made the first step longer than a later one; 0 where nothing is compiled."""
        return max(0.0, self.first_step_seconds - self.seconds) if self.is_compiled and self.step_seconds else 0.0

    def __str__(self) -> str:
        place = ", ".join(f"{axis} {number}" for axis, number in self.coordinates.items())
        head = f"rank {self.rank} of {self.world}" + f" ({place})" * bool(place)
        head += f" on {self.device}" * bool(self.device)
        if self.alike:
            head += f"; {self.alike} rank{'s' * (self.alike > 1)} like it: {self.work}"
        if self.refused:
            return f"{head}\n  refused: {self.refused}"
        seen = " (compiled blocks: what they keep is not seen)" if self.is_compiled else ""
        rows = [(text, bytes_text(self.memory[kind])) for kind, text in KINDS.items() if kind in self.memory]
        memory = columns(rows, (f"the most at a time of{seen}", "bytes"))
        compiled = [("compilation, in the first step", _short(self.compile_seconds))] if self.is_compiled else []
        times = [
            ("building the run", duration_text(self.build_seconds)),
            ("first step", _short(self.first_step_seconds)),
            *compiled,
            (f"step, median of {len(self.step_seconds)}", _short(self.seconds)),
            ("operators of a step", f"{sum(self.operators.values()):,}"),
        ]
        parts = [head, f"{memory}\n  {self.peak_label} {bytes_text(self.peak_bytes)}"]
        parts.append(columns(times, (f"with messages of {self.links}" if self.links else "without messages", "time")))
        if self.messages:
            heads = ("message", "axis", "ranks", "calls", "bytes per step", *(["foreseen"] if self.links else []))
            values = [
                (m.op, m.axis, str(m.ranks), str(m.calls), bytes_text(m.bytes), _short(m.seconds))
                for m in self.messages
            ]
            parts.append(columns([row[: len(heads)] for row in values], heads))
        return "\n\n".join(parts)


def digest(plan: Plan, batch: Batch) -> str:
    """Return a text that tells plans and batches apart, but not their notes, and is the same in all processes."""
    return hashlib.sha256(f"{replace(plan, notes=()).to_json()} {batch}".encode()).hexdigest()


def to_json(rehearsals: Sequence[Rehearsal]) -> str:
    """Write rehearsals as one JSON object, with the version of its format."""
    return json.dumps({"format": FORMAT, "rehearsals": [asdict(one) for one in rehearsals]}, indent=1)


def from_json(text: str, where: str = "this text") -> list[Rehearsal]:
    """Read what ``to_json`` wrote; at least one rehearsal.

    Raises:
        ConfigError: damaged, or of another version.
    """
    try:
        values = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{where} is no rehearsal: it is not JSON ({error})") from None
    if not isinstance(values, Mapping) or "format" not in values or not values.get("rehearsals"):
        raise ConfigError(
            f"{where} is no rehearsal: write one with meshwright rehearse CONFIG --gpus N --each-kind --json=FILE"
        )
    if values["format"] != FORMAT:
        raise ConfigError(
            f"{where} is a rehearsal in format {values['format']}, and this meshwright reads format {FORMAT}: rehearse"
            f" again"
        )
    rows = values["rehearsals"]
    if not isinstance(rows, list) or not all(isinstance(row, Mapping) for row in rows):
        raise ConfigError(f"{where} is a damaged rehearsal: 'rehearsals' is not a list of objects. Rehearse again")
    try:
        return [from_dict(Rehearsal, row, where=f"rehearsals[{place}]") for place, row in enumerate(rows)]
    except ConfigError as error:
        raise ConfigError(f"{where} is a damaged rehearsal ({str(error).splitlines()[0]}). Rehearse again") from None


def read(path: Path) -> list[Rehearsal]:
    """Read a file that ``meshwright rehearse --json=FILE`` wrote; ConfigError where it cannot be read."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    return from_json(text, str(path))


def _short(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms" if seconds < 1 else duration_text(seconds)


# --- rehearse one rank in this process


def rehearse(
    config: Config, rank: int, world: int, *, per_node: int = 0, steps: int = 3, machines: Machines | None = None
) -> Rehearsal:
    """Build the run of a config as one of ``world`` ranks, take steps, and return the figures.

    Nothing is written, and an error of the run is part of the result.

    Args:
        per_node: ranks on a host; 0: all on one.
        steps: steps that are timed, behind two that are watched.
        machines: the cluster whose links messages are taken to use; None: messages take no time.

    Raises:
        ConfigError: there is no such rank.
    """
    with alone_as(rank, world, per_node, None if machines is None else partial(message_s, machines=machines)):
        began = time.perf_counter()
        try:
            run = built(config)
            seconds = time.perf_counter() - began
            observed = observe(run, steps)
        except Exception as error:  # noqa: BLE001  (whatever a rank meets is what a rehearsal is for)
            if os.environ.get("MESHWRIGHT_DEBUG"):
                traceback.print_exception(error, file=sys.stderr)
            if isinstance(error, MeshwrightError):
                return Rehearsal(rank, world, refused=str(error), exit_status=error.exit_status)
            first_line = next(iter(str(error).strip().splitlines()), "")
            return Rehearsal(rank, world, refused=f"{type(error).__name__}: {first_line}", exit_status=1)
        run.feed.loader.close()
    sums: dict[tuple[str, str, int], tuple[int, float, float]] = {}  # of messages, by kind and axis
    for op, ranks, larger, sent in observed.messages:
        if len(ranks) > 1:  # a message to oneself is none
            key = op, axes_among(run.plan, ranks), len(ranks)
            calls, moved, foreseen = sums.get(key, (0, 0.0, 0.0))
            taken = 0.0 if machines is None else message_s(op, ranks, larger, machines)
            sums[key] = calls + 1, moved + sent, foreseen + taken
    return Rehearsal(
        rank,
        run.plan.world,
        places(run.plan, rank),
        device=device_name(run.model),
        build_seconds=seconds,
        first_step_seconds=observed.first_seconds,
        step_seconds=observed.seconds,
        is_compiled=bool(run.plan.compiled),
        memory={str(kind): size for kind, size in observed.memory.items()},
        peak_bytes=observed.peak.peak,
        peak_label=observed.peak.label,
        operators=dict(Counter(name for name, _ in observed.operators)),
        messages=tuple(MessageRow(*key, *figures) for key, figures in sums.items()),
        links="" if machines is None else machines.words,
    )


CLIPPED = 1e-6
"""Norm of the gradients above which they are clipped in a rehearsal, where clipping is on: always."""


def built(config: Config) -> Run:
    """Build the run of a config, with nothing shown and no signal awaited.

    Gradients that are clipped at all are clipped in every step: their norm is not that of a run.
    Rows of whole answers or conversations are as long in each step as the longest of them all.
    """
    optimizer = replace(config.optimizer, max_norm=min(config.optimizer.max_norm, CLIPPED))
    silent = StartupTimeline(), Progress(), StopRequest()
    return build_run(replace(config, run="", optimizer=optimizer), *silent, longest_rows=True)


@contextmanager
def alone_as(rank: int, world: int, per_node: int = 0, duration: Duration | None = None) -> Iterator[None]:
    """Make this process one of ``world`` ranks that a launcher started, with nobody else there: the first of its host.

    Raises:
        ConfigError: there is no such rank.
    """
    own = {"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": per_node or world, STORE: None}
    with with_variables(own), absent_peers(rank, world, duration):
        yield


def places(plan: Plan, rank: int) -> dict[str, int]:
    """Return a rank's place on the axes larger than 1."""
    sizes = dict(plan.mesh) | dict(plan.experts.mesh if plan.experts is not None else ())
    return {str(axis): place for axis, place in coordinates(plan, rank).items() if sizes.get(axis, 1) > 1}


# --- rehearse ranks one after the other, each in a process of its own, so that memory and errors are that rank's


@dataclass(frozen=True)
class Cast:
    """The run that is rehearsed.

    Attributes:
        config: the config, computing on the device.
        plan: its plan on ``world`` ranks.
        kinds: the ranks by their work.
        per_node: ranks on a host; 0: all on one.
        digest: digest of plan and batch, by which a forecast knows them again.
        machines: the cluster whose links messages are taken to use; None: messages take no time.
    """

    config: Config
    plan: Plan
    kinds: tuple[RankKind, ...]
    per_node: int
    digest: str
    machines: Machines | None = None


def cast(config: Config, world: int, per_node: int = 0, device: str = "", machines: Machines | None = None) -> Cast:
    """Plan the run, and refuse what no rank of it could rehearse; without a process group.

    Args:
        device: type of the device to compute on; by default this machine's accelerator, or the CPU.
        machines: the cluster whose links messages are taken to use; None: messages take no time.

    Raises:
        ConfigError, UnsupportedError: the run is refused, or cannot be rehearsed here.
    """
    device = device or local_device()
    config = _computing_on(config, device)
    tokenizer = planned_tokenizer(config)
    batch, facts = batch_of(config, tokenizer), facts_of(model_source(config, tokenizer))
    plan = plan_run(config, facts, Cluster(world, per_node or world, device), batch)
    if plan.tensor is not None and plan.tensor.async_tensor_parallel:
        raise UnsupportedError(
            "techniques.async_tensor_parallel reads other ranks' memory, and in a rehearsal they are absent: rehearse"
            " with techniques.async_tensor_parallel = false, which computes the same products."
        )
    return Cast(config, plan, kinds_of_ranks(plan, facts, batch), per_node, digest(plan, batch), machines)


def _computing_on(config: Config, device: str) -> Config:
    check_device_type(device, "--device")
    if is_accelerator(device) and device != local_device():
        raise ConfigError(
            f"--device = {device}: there is none here, and a rehearsal computes. Run it on a machine that has one, or"
            f" with --device cpu and a small model."
        )
    if device == CPU and is_accelerator(local_device()):
        return replace(config, process=replace(config.process, backend="gloo"))
    return config


def one_rank(parts: Cast, rank: int) -> list[RankKind]:
    """Return a rank's kind as the only one, with that rank first. Raises ConfigError where there is no such rank."""
    kind = next((kind for kind in parts.kinds if rank in kind.ranks), None)
    if kind is None:
        raise ConfigError(f"--rank = {rank}: {parts.plan.world} GPUs have the ranks 0 to {parts.plan.world - 1}")
    return [replace(kind, ranks=(rank, *(other for other in kind.ranks if other != rank)))]


def rehearse_each(
    parts: Cast, kinds: Sequence[RankKind], steps: int, show: Callable[[Rehearsal], None] = lambda found: None
) -> list[Rehearsal]:
    """Rehearse the first rank of each kind, in a process of its own.

    Args:
        steps: steps that are timed.
        show: called with each result as soon as it is there.
    """
    found, world = [], parts.plan.world
    alone = partial(rehearse, per_node=parts.per_node, steps=steps, machines=parts.machines)
    for kind in kinds:
        with closing(WorkerPool(1, threads=torch.get_num_threads())) as pool:
            try:
                result = pool.run(alone, parts.config, kind.ranks[0], world)[0]
            except WorkerFailed as failure:
                if failure.error is None or isinstance(failure.error, KeyboardInterrupt):
                    raise
                raise failure.error from None
            except WorkerDied as death:
                hint = ": its host has too little memory" if death.exit_code == -signal.SIGKILL else ""
                result = Rehearsal(kind.ranks[0], world, refused=f"the process {death.how}{hint}", exit_status=1)
        result = replace(result, alike=len(kind.ranks), work=kind.work, plan=parts.digest)
        show(result)
        found.append(result)
    return found


# --- let rehearsals stand in a forecast for what it would foresee of the same ranks


def rehearsals_for(path: Path, cluster: Cluster, machines: Machines) -> list[Rehearsal]:
    """Read the rehearsals in a file, which must be of such a cluster.

    Raises:
        ConfigError: the file cannot be read; a rank was refused; another number of ranks, or another device.
    """
    found = read(path)
    for one in found:
        if one.refused:
            raise ConfigError(f"{path}: rank {one.rank} did not get through its rehearsal: {one.refused}")
        if one.world != cluster.world:
            raise ConfigError(f"{path} is a rehearsal for {one.world} ranks, and --gpus is {cluster.world}")
        card = machines.device.name
        plain_card, plain_device = (re.sub(r"[^a-z0-9]", "", name.lower()) for name in (card, one.device))
        model = re.match(r"[a-z]+\d+[a-z]*", card.lower().replace(" ", ""))  # such as h100 in the driver's longer name
        if plain_card != plain_device and (model is None or model[0] not in plain_device):
            raise ConfigError(
                f"{path} was rehearsed on {one.device or 'an unnamed device'}, whose seconds and bytes are not those of"
                f" {card}. Rehearse on such a device, or ask about the device that it ran on"
            )
    return found


def rehearsed_ranks(rehearsals: Sequence[Rehearsal]) -> list[RehearsedRank]:
    """Return the figures of rehearsals that a forecast takes over."""
    return [
        RehearsedRank(one.coordinates.get("pp", 0), one.seconds, float(one.peak_bytes), bool(one.links))
        for one in rehearsals
    ]


def check_same(path: Path, rehearsals: Sequence[Rehearsal], plan: Plan, batch: Batch) -> None:
    """Refuse rehearsals of another plan or batch than a forecast is of; raises ConfigError."""
    if any(one.plan != digest(plan, batch) for one in rehearsals):
        raise ConfigError(
            f"{path} is a rehearsal of another run: its model, layout, batch or techniques are not those of this"
            f" config. Rehearse this one: meshwright rehearse CONFIG --gpus {plan.world} --each-kind --json={path}"
        )
