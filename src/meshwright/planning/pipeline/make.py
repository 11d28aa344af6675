"""Build a PipelinePlan from model facts and requested techniques, and check it."""

from __future__ import annotations

from meshwright.core.errors import ConfigError, UnsupportedError
from meshwright.core.names import owner
from meshwright.introspection.facts import ModelFacts
from meshwright.introspection.structure.structure import Flow, flow_of
from meshwright.planning.case import Case, Found
from meshwright.planning.layout import Layout
from meshwright.planning.techniques import Techniques
from meshwright.planning.tensor.rules import no_blocks
from meshwright.planning.values import PrecisionPlan

from .plan import PipelinePlan, StagePlan, balanced, given_cuts
from .schedules.orders import ScheduleKind, schedule_kind
from .schedules.table import read_schedule

# --- check pipeline parallelism


def pipeline_requested(case: Case) -> Found:
    """Require that the pipeline settings fit together, the model and the mesh."""
    t, ranks = case.techniques, case.layout.pp
    if ranks == 1:
        if t.pipeline_cuts or t.layers_per_stage:
            key = "pipeline_cuts" if t.pipeline_cuts else "layers_per_stage"
            yield ConfigError(
                f"techniques.{key} cuts the model into pipeline stages, but layout.pp = 1. Leave it out, or set"
                f" layout.pp."
            )
        return
    blocks = len(case.facts.token_blocks)
    if not blocks:
        yield ConfigError(no_blocks(f"layout.pp = {ranks}", case.facts))
        return
    try:
        stages = count_stages(t, ranks, blocks)
        if t.pipeline_cuts:
            given_cuts(t.pipeline_cuts, blocks, stages)
    except ConfigError as error:
        yield error
        return
    if stages > blocks:
        most = blocks // (stages // ranks)
        way = f"Legal here: layout.pp = 1 to {most}." if most else "Use 1f1b, which makes one stage for each rank."
        yield ConfigError(
            f"layout.pp = {ranks} with {t.pipeline_schedule} makes {stages} stages, but {case.facts.kind} has {blocks}"
            f" blocks, and each stage needs one. {way}"
        )


def pipeline_companions(case: Case) -> Found:
    """Refuse techniques that do not combine with a pipeline."""
    t, ranks = case.techniques, case.layout.pp
    if ranks == 1:
        return
    if case.technique == "ddp":
        yield UnsupportedError(
            f"techniques.data_parallel = ddp does not go with layout.pp = {ranks}: it reduces its buckets in the"
            f" first backward that it"
            f" sees. Set techniques.data_parallel = fully_shard, which replicates over layout.dp_replicate too."
        )
    if t.sync_grad_accum is not False and _splits_backward(case):
        by_stage = t.zero_stage in (2, 3)
        key = f"zero_stage = {t.zero_stage}" if by_stage else f"sync_grad_accum = {str(t.sync_grad_accum).lower()}"
        yield UnsupportedError(
            f"techniques.{key} does not go with techniques.pipeline_schedule = {t.pipeline_schedule}, which computes"
            f" input and weight gradients apart, so that no microbatch has all of its gradients at one time. Use 1f1b"
            f" or interleaved_1f1b, or techniques.{'zero_stage = 1' if by_stage else 'sync_grad_accum = false'}."
        )
    if t.compile and _splits_backward(case):
        yield UnsupportedError(
            f"techniques.compile does not go with techniques.pipeline_schedule = {t.pipeline_schedule}, which computes"
            f" input and weight gradients apart: a compiled block computes both at once. Use 1f1b or interleaved_1f1b,"
            f" or techniques.compile = false."
        )


def check_trained(facts: ModelFacts, plan: PipelinePlan) -> None:
    """Check that every rank has something to train.

    Raises:
        ConfigError: a rank has nothing; the message names its blocks.
    """
    trained = [name for p in facts.parameters if p.trainable for name in (p.name, *p.aliases)]
    for rank in range(plan.ranks):
        stages = plan.stages_on(rank)
        if not any(plan.has(stage, name) for stage in stages for name in trained):
            blocks = [block for stage in stages for block in plan.stages[stage].blocks]
            raise ConfigError(
                f"layout.pp = {plan.ranks}: all that rank {rank} of the pipeline has ({blocks[0]} to {blocks[-1]}) is"
                f" frozen, so an optimizer there would have nothing to train. Cut elsewhere (techniques.pipeline_cuts),"
                f" or freeze less."
            )


def check_microbatches(plan: PipelinePlan, rows: int, microbatch_rows: int, together: int = 1) -> None:
    """Check that the rows of a rank make a number of microbatches that can be scheduled; ``together`` stay in one.

    Raises:
        ConfigError: they do not; the message names that number, and the least that can be scheduled.
    """
    size = microbatch_rows or plan.rows_per_microbatch(rows, together)
    number = -(-rows // size)
    if (legal := plan.legal(number)) == number:
        return
    takes = (
        f"{legal} microbatches and no other number"
        if plan.schedule.endswith(".csv")
        else f"{plan.least} microbatches at least"
    )
    if not plan.schedule.endswith(".csv") and schedule_kind(plan.schedule).multiple(plan.ranks) > 1:
        takes = f"a multiple of {plan.least} microbatches"
    raise ConfigError(
        f"techniques.pipeline_schedule = {plan.schedule} on layout.pp = {plan.ranks} takes {takes}, but the {rows} rows"
        f" of a rank make {number} of {size} rows each. Set batch.global_batch to {legal} times batch.microbatch for"
        f" each data rank, or use 1f1b, which takes any number."
    )


def count_stages(t: Techniques, ranks: int, blocks: int) -> int:
    """Count the stages that the request makes; ConfigError if its schedule cannot be read."""
    if t.pipeline_schedule.endswith(".csv"):
        schedule = read_schedule(t.pipeline_schedule)
        if len(schedule.ranks) != ranks:
            raise ConfigError(
                f"techniques.pipeline_schedule = {t.pipeline_schedule}: it has {len(schedule.ranks)} rows, one for each"
                f" rank, but layout.pp = {ranks}"
            )
        return schedule.stages
    kind = schedule_kind(t.pipeline_schedule)
    if t.pipeline_cuts and kind.loops:
        return len(t.pipeline_cuts) + 1
    if not t.layers_per_stage:
        return ranks * kind.per_rank(blocks, ranks)
    return _stages_of_size(kind, t.layers_per_stage, ranks, blocks)


def _stages_of_size(kind: ScheduleKind, layers: int, ranks: int, blocks: int) -> int:
    stages = -(-blocks // layers) if layers > 0 else 0
    per_rank = stages // ranks
    can = per_rank >= 1 and stages % ranks == 0 and (per_rank == 2 if kind.is_v else kind.loops or per_rank == 1)
    if not can:
        wanted = f"{2 * ranks}" if kind.is_v else f"a multiple of {ranks}" if kind.loops else f"{ranks}"
        raise ConfigError(
            f"techniques.layers_per_stage = {layers} makes {stages} stages of {blocks} blocks, but {kind.name} on"
            f" layout.pp = {ranks} takes {wanted}"
        )
    return stages


def _splits_backward(case: Case) -> bool:
    name = case.techniques.pipeline_schedule
    try:
        return read_schedule(name).splits_backward if name.endswith(".csv") else schedule_kind(name).splits_backward
    except ConfigError:  # another rule reports it
        return False


# --- build a PipelinePlan from model facts and requested techniques


def make_pipeline_plan(
    facts: ModelFacts, layout: Layout, requested: Techniques, precision: PrecisionPlan
) -> PipelinePlan:
    """Decide stages, ranks and cuts; UnsupportedError tells why a model cannot be cut between its blocks."""
    assert facts.module is not None
    measured = facts.measurements.structure(layout.tp)
    flow = flow_of(facts.module, measured)
    own = measured.structure.blocks
    stages = count_stages(requested, layout.pp, len(own))
    ranks = _rank_of(requested.pipeline_schedule, layout.pp, stages)
    cuts = _cuts(facts, own, flow, requested, stages)
    return PipelinePlan(
        ranks=layout.pp,
        schedule=_name(requested.pipeline_schedule),
        stages=tuple(StagePlan(rank, own[start:end]) for rank, (start, end) in zip(ranks, cuts, strict=True)),
        kinds=flow.kinds,
        before=flow.before,
        behind=flow.behind,
        tied=_tied(facts, flow),
        width=flow.width,
        dtype=precision.compute,
        counts_tokens_behind=flow.counts_tokens_behind,
        of_images=measured.structure.of_images,
    )


def _name(request: str) -> str:
    return request if request.endswith(".csv") else schedule_kind(request).name


def _rank_of(request: str, ranks: int, stages: int) -> tuple[int, ...]:
    return (
        read_schedule(request).rank_of
        if request.endswith(".csv")
        else schedule_kind(request).rank_of(ranks, stages // ranks)
    )


def _cuts(
    facts: ModelFacts, own: tuple[str, ...], flow: Flow, requested: Techniques, stages: int
) -> list[tuple[int, int]]:
    blocks = len(own)
    if requested.pipeline_cuts:
        return given_cuts(requested.pipeline_cuts, blocks, stages)
    if requested.layers_per_stage:
        size = requested.layers_per_stage
        return [(start, min(start + size, blocks)) for start in range(0, blocks, size)]
    sizes = [float(sum(p.numel for p in facts.of_unit(block))) for block in own]
    before, behind = (
        float(sum(p.numel for p in facts.parameters if any(owner(name) in modules for name in (p.name, *p.aliases))))
        for modules in (flow.before, flow.behind)
    )
    before += sum(p.numel for p in facts.parameters if facts.is_of_images(p.name))
    return balanced(sizes, stages, head=behind, embedding=before)


def _tied(facts: ModelFacts, flow: Flow) -> tuple[tuple[str, str], ...]:
    """List parameters that are used both before and after the blocks, each by a name on either side."""
    found = []
    for p in facts.parameters:
        names = (p.name, *p.aliases)
        first = next((name for name in names if owner(name) in flow.before), None)
        last = next((name for name in names if owner(name) in flow.behind), None)
        if first is not None and last is not None:
            found.append((first, last))
    return tuple(found)
