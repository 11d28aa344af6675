"""Build a PipelinePlan from model facts and requested techniques."""

from __future__ import annotations

from meshwright.core.names import owner
from meshwright.introspection.facts import ModelFacts
from meshwright.introspection.stages.block_flow import Flow, flow_of
from meshwright.planning.layout import Layout
from meshwright.planning.techniques import Techniques
from meshwright.planning.values import PrecisionPlan

from .plan import PipelinePlan, StagePlan
from .rules import count_stages
from .schedules.orders import schedule_kind
from .schedules.table import read_schedule
from .split import balanced, given_cuts


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
