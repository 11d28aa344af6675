"""Write a search's answer: the layouts with their figures, for people and for programs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

from meshwright.core.errors import ConfigError, MeshwrightError
from meshwright.planning.explain import columns
from meshwright.planning.layout import Layout, shares_of
from meshwright.planning.plan import Plan
from meshwright.planning.techniques import Techniques
from meshwright.simulation.cards import Machines
from meshwright.simulation.from_model import techniques_of
from meshwright.simulation.job import Job
from meshwright.simulation.search import (
    Candidate,
    Pin,
    chunkings,
    hold,
    meshes,
    microbatches,
    recomputations,
    reductions,
    stages_per_rank,
)
from meshwright.simulation.step_memory import least_memory, step_memory
from meshwright.simulation.step_time import step_time

# --- choose the layouts that the rules allow among the fastest, with figures, rows of a table and TOML of each

Legal = Callable[[Layout, Techniques, int], tuple[Plan, Job]]
"""Plans a layout with techniques and rows of a microbatch, with the job that it is; raises where a rule refuses."""
DEFAULTS = Techniques()
SHOWN = 5
"""Candidates that an answer has, of the fastest and of the front."""
SECONDS_OF_A_DAY = 86_400
SPREAD = 0.08
"""Error of memory within which four fifths of the forecasts of published measurements lie (docs/rent.md)."""


@dataclass(frozen=True)
class Forecast:
    """A layout with its switches, and what is foreseen of it.

    Attributes:
        candidate: the job that was simulated.
        techniques: the requested ones with the switches that the search chose.
    """

    candidate: Candidate
    techniques: Techniques

    @cached_property
    def figures(self) -> dict[str, Any]:
        """All figures, under the documented keys of ``meshwright plan --json``."""
        return figures(self.candidate)

    @property
    def layout(self) -> Layout:
        return self.candidate.job.layout

    @property
    def microbatch(self) -> int:
        """Rows of a forward on one rank."""
        return int(self.candidate.job.microbatch)

    @property
    def mem_gb(self) -> float:
        """10⁹ bytes on the fullest GPU at its peak."""
        return self.candidate.memory.total / 1e9

    @property
    def fits(self) -> bool:
        return self.candidate.fits

    @property
    def step_s(self) -> float:
        """Seconds of an optimizer step."""
        return self.candidate.time.seconds

    @property
    def tok_s_gpu(self) -> float:
        """Tokens per second and GPU."""
        return self.figures["tok_s_gpu"]

    @property
    def mfu(self) -> float:
        """Model FLOPs over the card's dense half-precision peak, from 0 to 1."""
        return self.figures["mfu"]

    def __str__(self) -> str:
        return ", ".join(cell for cell in row(self.candidate) if cell)


@dataclass(frozen=True)
class Proposal(Forecast):
    """A layout that the rules allow.

    Attributes:
        plan: its plan, as ``meshwright.plan`` returns it; a note has the forecast.
    """

    plan: Plan

    def toml(self) -> str:
        """Return the keys of a config that train with this layout."""
        job = self.candidate.job
        lines = ["[layout]"]
        lines += [f"{key} = {value}" for key, value in vars(job.layout).items() if value != 1 or key == "dp_shard"]
        lines += ["", "[batch]", f"global_batch = {job.rows}", f"microbatch = {self.microbatch}"]
        changed = {key: value for key, value in vars(self.techniques).items() if value != getattr(DEFAULTS, key)}
        if optimizer := changed.pop("optimizer", None):
            lines += ["", "[optimizer]", f"kind = {json.dumps(optimizer)}"]
        if changed:
            lines += ["", "[techniques]", *(f"{key} = {_toml(value)}" for key, value in changed.items())]
        return "\n".join(lines)


def _toml(value: Any) -> str:
    """Write a value of a config; a dataclass as an inline table of what differs from its defaults."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if not is_dataclass(value):
        return json.dumps(value)
    held = ((one.name, getattr(value, one.name), one.default) for one in fields(value))
    return f"{{ {', '.join(f'{key} = {_toml(v)}' for key, v, default in held if v not in (None, default))} }}"


@dataclass(frozen=True)
class Refused(Forecast):
    """A layout that a rule refuses, with the rule's first sentence."""

    reason: str


def proposal(candidate: Candidate, techniques: Techniques, plan: Plan) -> Proposal:
    """Return a candidate as a proposal, with the forecast among the notes of its plan."""
    machines = candidate.job.machines
    note = (
        f"foreseen on {machines.gpus} {machines.device.name}: {candidate.memory.total / 1e9:.1f} of"
        f" {machines.device.memory_bytes / 1e9:.0f} GB on a GPU ({verdict(candidate)}),"
        f" {candidate.time.seconds:.3g} s for a step"
    )
    return Proposal(candidate, techniques, replace(plan, notes=(*plan.notes, note)))


def legal_among(
    candidates: list[Candidate], techniques: Techniques, legal: Legal
) -> tuple[list[Proposal], list[Refused]]:
    """Return the first candidates that the rules allow, fastest first, as their own plans make them; and those before
    them that rules refuse, or that do not fit as planned.
    """
    allowed: list[Proposal] = []
    refused: list[Refused] = []
    for candidate in candidates:
        if len(allowed) == SHOWN:
            break
        job, chosen = candidate.job, techniques_of(candidate.job, techniques)
        try:
            plan, job = legal(job.layout, chosen, int(job.microbatch))
            planned = Candidate(job, step_time(job), step_memory(job))
            if planned.fits:
                allowed.append(proposal(planned, chosen, plan))
            else:
                refused.append(Refused(planned, chosen, f"it needs {planned.memory.total / 1e9:.1f} GB as planned"))
        except MeshwrightError as error:
            refused.append(Refused(candidate, chosen, str(error).split(". ")[0]))
    return sorted(allowed, key=lambda one: one.step_s), refused


def verdict(candidate: Candidate) -> str:
    """Return whether a candidate fits, is tight (it fits by less than forecasts are off), or does not fit."""
    share = candidate.memory.total / candidate.job.machines.device.memory_bytes
    return "fits" if share <= 1 - SPREAD else "tight" if share <= 1 else "does not fit"


def figures(candidate: Candidate) -> dict[str, Any]:
    """Return a candidate's figures under the documented keys of ``meshwright plan --json``."""
    job, seconds = candidate.job, candidate.time.seconds
    tokens = job.rows * job.seq_len / job.machines.gpus / seconds
    device = job.machines.device
    return {
        "layout": {key: value for key, value in vars(job.layout).items() if isinstance(value, int)},
        **job.switches,
        "mem_gb": candidate.memory.total / 1e9,
        "mem_parts_gb": {name: size / 1e9 for name, size in candidate.memory.parts().items()},
        "fits": candidate.fits,
        "verdict": verdict(candidate),
        "step_s": seconds,
        "step_parts_s": {str(cost): value for cost, value in candidate.time.costs.items() if value},
        "tok_s_gpu": tokens,
        "mfu": tokens
        * job.architecture.model_flops_per_token(job.seq_len, job.execution.trained)
        / device.flops[device.half],
        "tokens_per_day": tokens * job.machines.gpus * SECONDS_OF_A_DAY,
        "gpu_hours_per_billion_tokens": 1e9 / tokens / 3600,
    }


def row(candidate: Candidate) -> tuple[str, ...]:
    """Return a candidate's cells of the table."""
    values, run = figures(candidate), candidate.job.execution
    limit = candidate.job.machines.device.memory_bytes / 1e9
    beyond = values["mem_gb"] - limit
    switches = [f"microbatch {values['microbatch']}", f"recompute {values['recompute']}"]
    if candidate.job.layout.pp > 1:
        several = f", {run.stages_per_rank} stages per rank" if run.stages_per_rank > 1 else ""
        switches.append(candidate.job.schedule + several)
    if candidate.job.layout.dp_shard * candidate.job.layout.cp > 1 and not run.gathers_each:
        switches.append("stays gathered")
    if candidate.job.microbatches > 1 and run.reduces_each:
        switches.append("reduced each time")
    if run.loss_chunks > 1:
        switches.append(f"loss in {run.loss_chunks}")
    return (
        str(candidate.job.layout),
        ", ".join(switches),
        f"{values['mem_gb']:.1f} of {limit:.0f} GB",
        values["verdict"] if candidate.fits else f"{beyond:.1f} GB too much",
        f"{values['step_s']:.2f} s",
        f"{values['tok_s_gpu']:,.0f}",
        f"{values['mfu']:.1%}",
        ", ".join(f"{cost} {share:.0%}" for cost, share in candidate.time.bound_by()[:3]),
    )


HEADS = ("layout", "switches", "memory per GPU", "", "step", "tokens/s/GPU", "MFU", "spent on")


# --- find the numbers of GPUs next to one that no layout fills

FARTHEST, MOST_COUNTS = 4, 4096
"""Counts are looked for from a quarter of the requested one to four times as many, and so many on each side."""
TRIED = 6
"""Candidates of one count that rules may refuse before it is given up."""
MEASURED = 1000
"""Candidates of one count that may be too large before it is given up; the first need least."""


def words(count: int, works: Callable[[int], bool]) -> str:
    """Return a sentence with the nearest counts that ``works``: "Nearest counts that work: 288 or 304 GPUs."."""
    least, most = max(math.ceil(count / FARTHEST), count - MOST_COUNTS), min(FARTHEST * count, count + MOST_COUNTS)
    sides = range(count - 1, least - 1, -1), range(count + 1, most + 1)
    found = [n for n in (next(filter(works, side), None) for side in sides) if n is not None]
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
        for rows in dict.fromkeys((*sizes[:1], *sizes[-1:])):  # one microbatch alone accumulates nothing
            for run in recomputations(base, pins)[-1:]:
                for per_rank in stages_per_rank(base, mesh, rows, pins):
                    for reshard, chunks in product((True, False), reversed(chunkings(pins))):
                        # one shard gathers nothing that could stay gathered
                        legal = shards and (reshard or shards[0].dp_shard * mesh.cp > 1)
                        if legal and hold(pins, reshard=str(reshard).lower()):
                            run = replace(run, stages_per_rank=per_rank, gathers_each=reshard, loss_chunks=chunks)
                            made = replace(base, layout=shards[0], microbatch=rows, execution=run)
                            for each in reversed(reductions(made, made.schedule, pins)):
                                yield made.with_execution(reduces_each=each)


def fills(layout: Layout, count: int, rows: int) -> bool:
    """Return whether a layout's sizes divide ``count`` ranks, and its data ranks the rows."""
    try:
        return rows % shares_of(layout.resolve(count)).data_ranks == 0
    except ConfigError:
        return False


# --- hold the answer to which layout to use

SMALLER = 4
"""Proposals of the front that the text shows beside the fastest."""


@dataclass(frozen=True)
class Foresight:
    """Holds the forecasts of a model on a cluster: the answer of ``meshwright.foresee``.

    Printed, it is the table of ``meshwright plan --gpus``.

    Attributes:
        chosen: the fastest layout that fits, or the stated one; None where that does not fit.
        candidates: the fastest layouts that fit, or the stated one alone.
        front: layouts that need less memory than all faster ones, fastest first.
        refused: faster layouts that a rule refuses, with the reason.
        simulated: number of layouts that were compared.
        searched: whether the layout was open; else a stated one was judged.
        kept: what the request states of a candidate's switches, such as "recompute=full"; the search kept it.
        freed: faster layouts that do without some of it, fastest first.
        notes: sentences about what the forecast leaves out.
    """

    chosen: Proposal | None
    candidates: tuple[Proposal, ...]
    front: tuple[Proposal, ...]
    refused: tuple[Refused, ...]
    simulated: int
    searched: bool
    kept: tuple[str, ...] = ()
    freed: tuple[Proposal, ...] = ()
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the figures under the documented keys of ``meshwright plan --json``."""
        return {
            "chosen": None if self.chosen is None else self.chosen.figures,
            "candidates": [one.figures for one in self.candidates],
            "front": [one.figures for one in self.front],
            "refused": [{**one.figures, "reason": one.reason} for one in self.refused],
            "kept": list(self.kept),
            "freed": [one.figures for one in self.freed],
            "simulated": self.simulated,
            "notes": list(self.notes),
        }

    def to_json(self) -> str:
        """Return ``to_dict`` as text."""
        return json.dumps(self.to_dict(), indent=1)

    def __str__(self) -> str:
        return self.text()

    def text(self, notes: Sequence[str] = ()) -> str:
        """Return the table, with ``notes`` about its first row below it."""
        first = self.candidates[0]
        values, job = first.figures, first.candidate.job
        device = job.machines.device
        sold = f" (sold as {device.sold_gb} GB)" * (device.sold_gb > 0)
        head = (
            f"{job.architecture.name} on {job.machines.gpus} {device.name}{sold}, {job.machines.per_node} per"
            f" node, {job.rows} rows of {job.seq_len} tokens per step"
        )
        roomy = next((one for one in (*self.candidates, *self.front) if verdict(one.candidate) == "fits"), None)
        if verdict(first.candidate) == "tight" and roomy is not None:
            head += f"\ntight; it fits with {', '.join(filter(None, row(roomy.candidate)[:3]))}"
        parts = [
            f"{head}\n{columns([row(one.candidate) for one in self.candidates], HEADS)}",
            "memory of the first: "
            + ", ".join(f"{name} {size:.1f}" for name, size in values["mem_parts_gb"].items())
            + " GB",
            *self.notes,
            *notes,
            f"{values['tokens_per_day'] / 1e9:.2f} billion tokens a day,"
            f" {values['gpu_hours_per_billion_tokens']:,.0f} GPU hours for a billion."
            " MFU: 6 FLOPs per product parameter (4 where it is frozen) and 12 per attended feature, over the data"
            " sheet's half precision.",
        ]
        if self.searched:
            smaller = [row(one.candidate) for one in self.front if one.candidate.key != first.candidate.key][:SMALLER]
            if smaller:
                parts.append(f"less memory, more time\n{columns(smaller, HEADS)}")
            if self.freed:
                better = columns([row(one.candidate) for one in self.freed], HEADS)
                parts.append(f"faster, without some of what was set ({', '.join(self.kept)})\n{better}")
            several = "s were" if self.simulated != 1 else " was"
            head = f"{self.simulated} candidate{several} compared. To train with the first, beside what you set:"
            parts.append(f"{head}\n\n{first.toml()}")
        return "\n\n".join(parts)
