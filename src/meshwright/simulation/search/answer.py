"""Choose the layouts that the rules allow among the fastest, with figures, rows of a table and TOML of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from meshwright.core.errors import MeshwrightError
from meshwright.planning.layout import Layout
from meshwright.planning.plan import Plan
from meshwright.planning.techniques import Techniques
from meshwright.simulation.workload.execution import Job

from .search import Candidate

Legal = Callable[[Layout, Techniques, int], Plan]
"""Plans a layout with techniques and rows of a microbatch; raises where a rule refuses."""
SECONDS_OF_A_DAY = 86_400


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
        return toml(self.candidate, self.techniques)


@dataclass(frozen=True)
class Refused(Forecast):
    """A layout that a rule refuses, with the rule's first sentence."""

    reason: str


def proposal(candidate: Candidate, techniques: Techniques, plan: Plan) -> Proposal:
    """Return a candidate as a proposal, with the forecast among the notes of its plan."""
    machines = candidate.job.machines
    note = (
        f"foreseen on {machines.gpus} {machines.device.name}: {candidate.memory.total / 1e9:.1f} of"
        f" {machines.device.memory_bytes / 1e9:.0f} GB on a GPU ({'fits' if candidate.fits else 'does not fit'}),"
        f" {candidate.time.seconds:.3g} s for a step"
    )
    return Proposal(candidate, techniques, replace(plan, notes=(*plan.notes, note)))


def techniques_of(job: Job, techniques: Techniques) -> Techniques:
    """Return the techniques with a candidate's switches."""
    run, layout = job.execution, job.layout
    changed = replace(
        techniques,
        activation_checkpointing=run.recompute,
        loss_chunks=run.loss_chunks,  # type: ignore[arg-type]
    )
    if layout.dp_shard * layout.cp > 1:
        changed = replace(changed, reshard_after_forward=run.gathers_each)
        if run.reduces_each:
            changed = replace(changed, sync_grad_accum=True)
    if layout.pp > 1:
        several = run.stages_per_rank > 1 and not run.schedule
        blocks = -(-len(job.architecture.blocks) // job.stages)
        changed = replace(
            changed,
            pipeline_schedule=job.schedule,
            layers_per_stage=blocks if several else 0,
        )
    return changed


def legal_among(
    candidates: list[Candidate], techniques: Techniques, legal: Legal, *, keep: int = 5
) -> tuple[list[Proposal], list[Refused]]:
    """Return the first ``keep`` candidates that the rules allow, and those before them that they refuse."""
    allowed: list[Proposal] = []
    refused: list[Refused] = []
    for candidate in candidates:
        if len(allowed) == keep:
            break
        job, chosen = candidate.job, techniques_of(candidate.job, techniques)
        try:
            allowed.append(proposal(candidate, chosen, legal(job.layout, chosen, int(job.microbatch))))
        except MeshwrightError as error:
            refused.append(Refused(candidate, chosen, str(error).split(". ")[0]))
    return allowed, refused


def figures(candidate: Candidate) -> dict[str, Any]:
    """Return a candidate's figures under the documented keys of ``meshwright plan --json``."""
    job, seconds = candidate.job, candidate.time.seconds
    tokens = job.rows * job.seq_len / job.machines.gpus / seconds
    device, run = job.machines.device, job.execution
    return {
        "layout": {key: value for key, value in vars(job.layout).items() if isinstance(value, int)},
        "microbatch": int(job.microbatch),
        "recompute": run.recompute,
        "schedule": job.schedule if job.layout.pp > 1 else "",
        "stages_per_rank": run.stages_per_rank,
        "reshard_after_forward": run.gathers_each,
        "sync_grad_accum": run.reduces_each,
        "loss_chunks": run.loss_chunks,
        "mem_gb": candidate.memory.total / 1e9,
        "mem_parts_gb": {name: size / 1e9 for name, size in candidate.memory.parts().items()},
        "fits": candidate.fits,
        "step_s": seconds,
        "step_parts_s": {str(cost): value for cost, value in candidate.time.costs.items() if value},
        "tok_s_gpu": tokens,
        "mfu": tokens * job.architecture.model_flops_per_token(job.seq_len) / device.flops[device.half],
        "tokens_per_day": tokens * job.machines.gpus * SECONDS_OF_A_DAY,
        "gpu_hours_per_billion_tokens": 1e9 / tokens / 3600,
    }


def row(candidate: Candidate) -> tuple[str, ...]:
    """Return a candidate's cells of the table."""
    values, run = figures(candidate), candidate.job.execution
    limit = candidate.job.machines.device.memory_bytes / 1e9
    beyond = values["mem_gb"] - limit
    switches = [f"microbatch {values['microbatch']}", f"recompute {run.recompute}"]
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
        "fits" if candidate.fits else f"{beyond:.1f} GB too much",
        f"{values['step_s']:.2f} s",
        f"{values['tok_s_gpu']:,.0f}",
        f"{values['mfu']:.1%}",
        ", ".join(f"{cost} {share:.0%}" for cost, share in candidate.time.bound_by()[:3]),
    )


HEADS = ("layout", "switches", "memory per GPU", "", "step", "tokens/s/GPU", "MFU", "spent on")


def toml(candidate: Candidate, chosen: Techniques) -> str:
    """Return the keys of a config that train with a candidate and its techniques."""
    job = candidate.job
    lines = ["[layout]"]
    lines += [f"{key} = {value}" for key, value in vars(job.layout).items() if value != 1 or key == "dp_shard"]
    lines += ["", "[batch]", f"global_batch = {job.rows}", f"microbatch = {int(job.microbatch)}"]
    changed = {key: value for key, value in vars(chosen).items() if value != getattr(Techniques(), key)}
    plain = {key: value for key, value in changed.items() if isinstance(value, bool | int | float | str)}
    if optimizer := plain.pop("optimizer", None):
        lines += ["", "[optimizer]", f"kind = {_word(optimizer)}"]
    if plain:
        lines += ["", "[techniques]", *(f"{key} = {_word(value)}" for key, value in plain.items())]
    return "\n".join(lines)


def _word(value: bool | int | float | str) -> str:
    return str(value).lower() if isinstance(value, bool) else f'"{value}"' if isinstance(value, str) else str(value)
