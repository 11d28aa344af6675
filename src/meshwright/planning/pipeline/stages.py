"""Restrict a plan and model facts to one pipeline stage, and list the messages of a pipeline's ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from meshwright.core.axes import Axis
from meshwright.core.names import is_within
from meshwright.introspection.facts import ModelFacts, ParameterFact
from meshwright.planning.collectives import (
    idle_agreement,
    over_batch,
    sharded_units,
    step_agreement,
    step_norm,
    token_count,
)
from meshwright.planning.context.collectives import attention_collectives, row_agreement
from meshwright.planning.data import Holding, at_rest, trained_cuts, units_outside_blocks
from meshwright.planning.experts import expert_collectives, router_collectives, without_experts
from meshwright.planning.float8 import scales_of_gathered
from meshwright.planning.optimizer_collectives import optimizer_collectives
from meshwright.planning.pipeline.plan import PipelinePlan
from meshwright.planning.plan import Plan
from meshwright.planning.tensor.collectives import tensor_collectives
from meshwright.planning.values import Collective, Unit


def plan_of_stage(plan: Plan, stage: int) -> Plan:
    """Restrict a plan to one stage's part of the model, for techniques to read."""
    pipeline = plan.pipeline
    assert pipeline is not None
    blocks, is_first, is_last = pipeline.stages[stage].blocks, stage == 0, stage == len(pipeline.stages) - 1
    tensor = plan.tensor

    def here(paths: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(path for path in paths if any(is_within(path, block) for block in blocks))

    also = tuple(last for first, last in pipeline.tied for name in (first, last) if name in plan.frozen)
    return replace(
        plan,
        units=tuple(unit for unit in plan.units if unit.outside_blocks or here((unit.name,))),
        experts=None if plan.experts is None else plan.experts.only(blocks),
        frozen=(*plan.frozen, *also),
        checkpointed=here(plan.checkpointed),
        compiled=here(plan.compiled),
        float8=None if plan.float8 is None else replace(plan.float8, modules=here(plan.float8.modules)),
        quantize=None if plan.quantize is None else replace(plan.quantize, modules=here(plan.quantize.modules)),
        tensor=None
        if tensor is None
        else replace(
            tensor.only(blocks),
            begins=is_first,
            embedding=tensor.embedding if is_first else "",
            head=tensor.head if is_last else "",
            gathers_after_blocks=tensor.gathers_after_blocks and is_last,
        ),
        loss=plan.loss if is_last else None,
    )


def facts_of_stages(facts: ModelFacts, pipeline: PipelinePlan) -> list[ModelFacts]:
    """Restrict facts to each stage's part; a parameter tied across stages has its name on the stage."""
    numbers = range(len(pipeline.stages))
    found: list[list[ParameterFact]] = [[] for _ in numbers]
    for fact in facts.parameters:
        places = [(name, stage) for name in (fact.name, *fact.aliases) for stage in pipeline.stages_with(name)]
        for stage in sorted({stage for _, stage in places}):
            name, *aliases = (name for name, place in places if place == stage)
            found[stage].append(replace(fact, name=name, aliases=tuple(aliases)))
    return [
        replace(
            facts,
            parameters=tuple(found[stage]),
            blocks=pipeline.stages[stage].blocks,
            attentions=tuple(path for path in facts.attentions if pipeline.has(stage, path)),
            routers=tuple(router for router in facts.routers if pipeline.has(stage, router.path)),
        )
        for stage in numbers
    ]


def pipeline_collectives(facts: ModelFacts, plan: Plan) -> list[tuple[Collective, ...]]:
    """List every collective and send in a step of each rank of the pipeline axis."""
    assert plan.pipeline is not None
    frozen, facts = set(plan.frozen), at_rest(facts, plan.precision)
    parameters = (replace(p, trainable=p.trainable and p.name not in frozen) for p in facts.parameters)
    facts = replace(facts, parameters=tuple(parameters))
    parts = facts_of_stages(facts, plan.pipeline)
    return [tuple(_of_rank(facts, parts, plan, rank)) for rank in range(plan.pipeline.ranks)]


def _of_rank(facts: ModelFacts, parts: Sequence[ModelFacts], plan: Plan, rank: int) -> Iterator[Collective]:
    pipeline, shares = plan.pipeline, plan.shares
    assert pipeline is not None
    shards = shares.shards
    yield from token_count(shares)
    if plan.context is not None:
        yield row_agreement(plan.context)
    for stage in pipeline.stages_on(rank):
        own, part = parts[stage], plan_of_stage(plan, stage)
        if plan.data.technique == "fully_shard":
            units = _units_of(own, part, shards)
            yield from sharded_units(units, part.data, part.precision, shares, part.experts, postponed=True)
            idle = sum(p.name in part.data.idle for p in own.parameters if p.trainable)
            yield from idle_agreement(shares, part.data, idle)
        recomputed = part.sends_again
        if part.tensor is not None:
            dense = without_experts(own, part.experts)
            yield from tensor_collectives(
                dense, part.tensor, part.precision, part.loss, recomputed, shards, part.float8
            )
        yield from scales_of_gathered(part.float8, part.tensor, shards)
        if part.context is not None:
            begins, ranks = stage == 0, shares.size(Axis.TP)
            yield from attention_collectives(
                own, part.context, part.precision, recomputed, ranks, begins=begins, blocks=own.blocks
            )
        if part.experts is not None:
            among, begins = plan.size(Axis.TP), stage == 0
            yield from expert_collectives(own, part.experts, part.precision, recomputed, begins=begins, among=among)
        # activations forward, gradients backward, per token; a rank's part of a cut sequence
        is_cut = plan.tensor is not None and plan.tensor.sequence_parallel
        for other, what in ((stage + 1, "activations"), (stage - 1, "gradients")):
            if 0 <= other < len(pipeline.stages) and pipeline.stages[other].rank != rank:
                unit = f"{what} to stage {other}"
                sent = "send", Axis.PP.value, 2, unit, pipeline.width, pipeline.dtype, "microbatch"
                yield Collective(*sent, by_token=True, filled=is_cut, among=plan.size(Axis.TP) if is_cut else 1)
    ends = pipeline.stages[0].rank, pipeline.stages[-1].rank
    if rank in ends and ends[0] != ends[1]:  # which exchange the gradients of tied parameters
        firsts = {first for first, _ in pipeline.tied}
        for p in (p for p in facts.parameters if p.trainable and firsts.intersection((p.name, *p.aliases))):
            shape = p.shape if plan.tensor is None else plan.tensor.local_shape(p.name, p.shape)
            size = -(-shape[0] // shards) * math.prod(shape[1:])
            yield Collective("send", Axis.PP.value, 2, f"gradient of {p.name}", size, p.dtype, "step")
    yield from over_batch(shares, "loss", 1, "float64")
    yield Collective("all_reduce", Axis.PP.value, pipeline.ranks, "loss", 1, "float64", "step")
    stages = [parts[stage] for stage in pipeline.stages_on(rank)]
    routers = tuple(router for stage in stages for router in stage.routers)
    of_routers = replace(facts, routers=routers)
    yield from router_collectives(of_routers, shares, plan.precision, plan.sends_again, plan.router_loss)
    copies = {last for _, last in pipeline.tied}
    own = [p for stage in stages for p in stage.parameters if p.name not in copies]
    cuts = trained_cuts(without_experts(replace(facts, parameters=tuple(own)), plan.experts), plan.tensor)
    experts = (
        plan.experts
        if plan.experts is not None and any(p.trainable and plan.experts.has(p.name) for p in own)
        else None
    )
    yield from step_norm({p.dtype for p in own if p.trainable}, shares, cuts, experts)
    yield Collective("all_reduce", Axis.PP.value, pipeline.ranks, "gradient norm", 1, "float64", "step")
    yield from step_agreement(shares)
    yield from optimizer_collectives(plan, own)


def units_of_stages(facts: ModelFacts, plan: Plan) -> tuple[tuple[Unit, ...], ...]:
    """List the communication units of each stage; the facts have the plan's dtypes at rest and frozen parameters."""
    assert plan.pipeline is not None
    shards, parts = plan.shares.shards, facts_of_stages(facts, plan.pipeline)
    return tuple(_units_of(part, plan_of_stage(plan, stage), shards) for stage, part in enumerate(parts))


def _units_of(facts: ModelFacts, plan: Plan, shards: int) -> tuple[Unit, ...]:
    """List the units of a stage's part; its root holds the stage's parameters outside the blocks."""
    holding = Holding(shards, plan.precision, plan.tensor, optimizer=plan.optimizer)
    return (*units_outside_blocks(facts, holding), *(unit for unit in plan.units if not unit.outside_blocks))
