"""Say which layouts to use: those that the rules allow among the fastest, as figures, a table and TOML."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from meshwright.core.errors import MeshwrightError
from meshwright.planning.layout import Layout
from meshwright.planning.techniques import Techniques
from meshwright.simulation.workload.execution import Job

from .search import Candidate, Found

Legal = Callable[[Layout, Techniques, int], Any]
"""Plans a layout with techniques and rows of a microbatch; raises where a rule refuses."""
SECONDS_OF_A_DAY = 86_400


@dataclass(frozen=True)
class Refused:
    """A candidate that a rule refuses, with the rule's first sentence."""

    candidate: Candidate
    reason: str


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
) -> tuple[list[Candidate], list[Refused]]:
    """Return the first ``keep`` candidates that the rules allow, and those before them that they refuse."""
    allowed: list[Candidate] = []
    refused: list[Refused] = []
    for candidate in candidates:
        if len(allowed) == keep:
            break
        job = candidate.job
        try:
            legal(job.layout, techniques_of(job, techniques), int(job.microbatch))
            allowed.append(candidate)
        except MeshwrightError as error:
            refused.append(Refused(candidate, str(error).split(". ")[0]))
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


def as_json(shown: list[Candidate], found: Found, refused: list[Refused]) -> dict[str, Any]:
    """Return the whole answer: ``chosen`` (None if nothing fits), ``candidates``, ``front``, and what was refused."""
    return {
        "chosen": figures(shown[0]) if shown and shown[0].fits else None,
        "candidates": [figures(candidate) for candidate in shown],
        "front": [figures(candidate) for candidate in found.front],
        "refused": [{**figures(one.candidate), "reason": one.reason} for one in refused],
        "simulated": found.tried,
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


def toml(candidate: Candidate, techniques: Techniques) -> str:
    """Return the keys of a config that train with a candidate."""
    job, chosen = candidate.job, techniques_of(candidate.job, techniques)
    lines = ["[layout]"]
    lines += [f"{key} = {value}" for key, value in vars(job.layout).items() if value != 1 or key == "dp_shard"]
    lines += ["", "[batch]", f"global_batch = {job.rows}", f"microbatch = {int(job.microbatch)}"]
    changed = {key: value for key, value in vars(chosen).items() if value != getattr(Techniques(), key)}
    plain = {key: value for key, value in changed.items() if isinstance(value, bool | int | float | str)}
    if plain:
        lines += ["", "[techniques]", *(f"{key} = {_word(value)}" for key, value in plain.items())]
    return "\n".join(lines)


def _word(value: bool | int | float | str) -> str:
    return str(value).lower() if isinstance(value, bool) else f'"{value}"' if isinstance(value, str) else str(value)
