"""Build a Plan from model facts and requested techniques."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.core.axes import WORLD_AXES, Axis
from meshwright.core.devices import is_accelerator, local_device
from meshwright.core.errors import ConfigError, UnsupportedError
from meshwright.core.host import without_collector
from meshwright.core.names import matching, owner, pattern
from meshwright.introspection.blocks import Hints
from meshwright.introspection.cluster import Cluster
from meshwright.introspection.facts import ModelFacts, ParameterFact, facts_with
from meshwright.introspection.structure.experts import find_stacks
from meshwright.planning import explain
from meshwright.planning.collectives import step_collectives
from meshwright.planning.context.collectives import attention_collectives, row_agreement
from meshwright.planning.context.plan import ContextPlan, context_plan
from meshwright.planning.data import (
    Holding,
    at_rest,
    gathers_per_step,
    joins_blocks,
    trained_cuts,
    units_of,
    with_zero_stage,
    without_skipped,
    zero_notes,
)
from meshwright.planning.experts import (
    ExpertPlan,
    expert_collectives,
    expert_mesh_of,
    router_collectives,
    without_experts,
)
from meshwright.planning.float8 import scales_of_gathered
from meshwright.planning.layout import Layout, Shares, sharded_dim, shares_of
from meshwright.planning.optimizer import optimizer_plan
from meshwright.planning.optimizer_collectives import optimizer_collectives
from meshwright.planning.pipeline.plan import check_trained, make_pipeline_plan
from meshwright.planning.pipeline.stages import pipeline_collectives, units_of_stages
from meshwright.planning.plan import Plan
from meshwright.planning.premise_rules import may_be_idle
from meshwright.planning.quantize import rounded_weights
from meshwright.planning.recompute import checkpointed_modules
from meshwright.planning.rules import check, check_batch, check_data, resolve_precision
from meshwright.planning.techniques import RunTechniques, Techniques, as_techniques
from meshwright.planning.tensor.collectives import tensor_collectives
from meshwright.planning.tensor.make import make_tensor_plan, words_for
from meshwright.planning.tensor.plan import TensorPlan, placement_words
from meshwright.planning.values import (
    NF4,
    Batch,
    Case,
    Collective,
    DataParallel,
    LossPlan,
    ParameterPlan,
    PrecisionPlan,
)


@without_collector()
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
    """Decide everything about a layout, with no process group and no GPU: ``meshwright.plan`` without a named GPU.

    Raises:
        ConfigError, UnsupportedError: a rule is broken; the message names the rule and the remedy.
    """
    if reduction not in ("sum", "mean"):
        raise ConfigError(f"reduction = {reduction!r}: legal are sum and mean")
    requested = as_techniques(techniques)
    facts = facts_with(model, requested.adapters, hints)
    if cluster is not None and (cluster.gpu or cluster.profile):
        raise ConfigError(
            f"{cluster.gpu or cluster.profile}: leave it out, or call meshwright.plan or meshwright.foresee"
        )
    cluster = cluster or Cluster(world=layout.world, device=local_device())
    layout = layout.resolve(cluster.world, ranks_per_node=cluster.ranks_per_node or None)
    if schedule := layout.requested_schedule:
        if requested.pipeline_schedule not in (Techniques.pipeline_schedule, schedule):
            raise ConfigError(
                f"pp_schedule = {schedule}, but techniques.pipeline_schedule = {requested.pipeline_schedule}: they are"
                f" one thing; leave one out"
            )
        requested = replace(requested, pipeline_schedule=schedule)
    requested = with_zero_stage(requested, layout)
    if requested.freeze:
        frozen = matching(requested.freeze, [p.name for p in facts.parameters], "techniques.freeze")
        parameters = (replace(p, trainable=p.trainable and p.name not in frozen) for p in facts.parameters)
        facts = replace(facts, parameters=tuple(parameters))
    precision = resolve_precision(requested, facts.floating, cluster.device)
    technique = _data_technique(requested, layout, precision)
    case = Case(facts, layout, requested, precision, technique, cluster.device, reduction)
    check(case)
    made = _assemble(replace(case, facts=at_rest(facts, precision)))
    if batch is not None:
        check_batch(made, batch)
        check_data(facts, batch)
    return made


def _data_technique(requested: Techniques, layout: Layout, precision: PrecisionPlan) -> str:
    ranks = shares_of(layout).batch_ranks
    cuts = layout.dp_shard > 1 or (layout.cp > 1 and requested.zero_stage != 0)
    cuts_experts = layout.ep > 1 and dict(expert_mesh_of(layout))[Axis.EFSDP.value] > 1
    on_several_axes = layout.tp * layout.pp * layout.ep > 1 and ranks > 1
    needs_sharding = cuts or precision.is_mixed or requested.cpu_offload is True or cuts_experts or on_several_axes
    if requested.data_parallel == "fully_shard" or (requested.data_parallel == "auto" and needs_sharding):
        return "fully_shard"
    return "ddp" if ranks > 1 else "none"


def _assemble(case: Case) -> Plan:
    """Ask each technique for its part of a legal plan; the facts have the dtypes at rest."""
    facts, layout, requested, precision = case.facts, case.layout, case.techniques, case.precision
    data = _data_plan(case)
    tensor, tensor_notes = _tensor_plan(case)
    float8, quantize, about_weights = rounded_weights(facts, requested, case.device, tensor)
    for p in facts.parameters:
        if quantize is not None and p.name in quantize.weights and p.dtype != precision.master:
            raise UnsupportedError(
                f"techniques.quantize_frozen rounds '{p.name}' ({p.dtype}) to 4 bits, and most elements of {facts.kind}"
                f" are {precision.master}: weights in 4 bits are rounded in one dtype, which checkpoints note. Set"
                f" techniques.precision.master = float32, or convert the model."
            )
    pipeline = make_pipeline_plan(facts, layout, requested, precision) if layout.pp > 1 else None
    if pipeline is not None:
        check_trained(facts, pipeline)
    experts = _expert_plan(case, tensor, tensor_notes)
    reshard, optimizer = requested.reshard_after_forward, optimizer_plan(facts, requested)
    assert reshard != "auto"  # resolved above
    shares = shares_of(layout, case.technique, replicates_tokens=data.replicates_tokens)
    holding = Holding(shares.shards, precision, tensor, experts, float8, quantize, optimizer)
    starts = () if pipeline is None else [block for stage in pipeline.stages for block in stage.blocks[:1]]
    most = data.blocks_per_unit or int(not joins_blocks(shares))
    units = units_of(without_skipped(facts, layout), holding, reshard, most, starts)
    parameters = _parameters(facts.parameters, layout, shares, holding)
    loss = None
    if requested.loss_chunks > 1:
        head = facts.measurements.structure(layout.tp).structure.head
        assert head is not None
        loss = LossPlan(head, requested.loss_chunks)
    mode = requested.activation_checkpointing
    keep = requested.checkpoint_keep if mode == "selective_op" else ()
    made = Plan(
        model=facts.kind,
        device=case.device,
        mesh=tuple((axis.value, layout.size(axis)) for axis in WORLD_AXES),
        parameters=parameters,
        units=units,
        data=data,
        precision=precision,
        frozen=tuple(p.name for p in facts.parameters if not p.trainable),
        activation_checkpointing=mode,
        checkpointed=checkpointed_modules(facts, requested),
        checkpoint_keep=keep,
        checkpoint_keep_every=requested.checkpoint_keep_every if keep else 1,
        activation_memory_budget=requested.activation_memory_budget if mode == "memory_budget" else None,
        compiled=facts.blocks if requested.compile else (),
        compile_options=(("backend", requested.compile_backend),) if requested.compile else (),
        tensor=tensor,
        context=facts.applied_plan(ContextPlan) or context_plan(facts, layout, requested, precision),
        pipeline=pipeline,
        experts=experts,
        loss=loss,
        router_loss=facts.measurements.router_loss(),
        float8=float8,
        quantize=quantize,
        optimizer=optimizer,
        premises_known=layout.world > 1 and not facts.measurements.premises().unknown,
        notes=(
            *tensor_notes,
            *about_weights,
            *explain.of(case, parameters, tensor),
            *zero_notes(requested, layout, case.technique),
        ),
    )
    if pipeline is None:
        return replace(made, collectives=_collectives(facts, made))
    tried = pipeline_collectives(facts, made)
    busiest = max(range(pipeline.ranks), key=lambda rank: sum(c.elements * (c.calls or 1) for c in tried[rank]))
    note = f"collectives are those of rank {busiest} of the pipeline, which sends most"
    return replace(
        made, collectives=tried[busiest], stage_units=units_of_stages(facts, made), notes=(*made.notes, note)
    )


def _collectives(facts: ModelFacts, plan: Plan) -> tuple[Collective, ...]:
    """List the collectives of a step without a pipeline."""
    shares, tensor, experts, context = plan.shares, plan.tensor, plan.experts, plan.context
    dense, trained = without_experts(facts, experts), sum(p.trainable for p in facts.parameters)
    ways = plan.precision, plan.sends_again
    found: list[Collective] = []
    if tensor is not None:
        found += tensor_collectives(dense, tensor, plan.precision, plan.loss, ways[1], shares.shards, plan.float8)
    found += router_collectives(facts, shares, *ways, plan.router_loss)
    found += scales_of_gathered(plan.float8, tensor, shares.shards)
    if experts is not None:
        found += expert_collectives(facts, experts, *ways, among=shares.size(Axis.TP))
    if context is not None:
        keeps = plan.activation_checkpointing == "selective_op" and "attention" in plan.checkpoint_keep
        found.append(row_agreement(context))
        found += attention_collectives(facts, context, *ways, shares.size(Axis.TP), keeps_attention=keeps)
    of_step = step_collectives(plan, found, trained_cuts(dense, tensor), trained)
    return (*of_step, *optimizer_collectives(plan, facts.parameters))


def _expert_plan(case: Case, tensor: TensorPlan | None, tensor_notes: tuple[str, ...]) -> ExpertPlan | None:
    facts, layout, precision = case.facts, case.layout, case.precision
    experts = facts.applied_plan(ExpertPlan)
    if experts is None and layout.ep > 1:
        experts = ExpertPlan(expert_mesh_of(layout), facts.measurements.stacks(layout.ep))
    if experts is not None and tensor is not None and not tensor.sequence_parallel:
        raise UnsupportedError(
            f"layout.ep = {layout.ep} with layout.tp = {layout.tp} needs sequences that are cut between blocks, and"
            f" those of {facts.kind} stay whole: {tensor_notes[0]}. Set layout.ep = 1."
        )
    for p in facts.parameters:
        if experts is not None and experts.has(p.name) and precision.computed_in(p.dtype) != precision.compute:
            raise _odd(p, precision.compute, f"layout.ep = {layout.ep} sends tokens to it")
    return experts


def _data_plan(case: Case) -> DataParallel:
    facts, layout, requested, is_sharded = case.facts, case.layout, case.techniques, case.technique == "fully_shard"
    idle: tuple[str, ...] = ()
    if case.batch_ranks > 1:  # some ranks may leave them without a gradient; in a pipeline, those of images alone
        found = may_be_idle(facts) if layout.pp == 1 else set()
        idle = tuple(p.name for p in case.trained if p.name in found or facts.is_of_images(p.name))
    return DataParallel(
        case.technique,  # type: ignore[arg-type]
        case.reduction,  # type: ignore[arg-type]
        requested.sync_grad_accum,  # type: ignore[arg-type]  ("auto" is resolved)
        requested.cpu_offload is True,
        pin_memory=is_accelerator(case.device),
        gathers_per_step=is_sharded and gathers_per_step(requested, layout),
        idle=idle,
        replicates_tokens=is_sharded and layout.cp > 1 and requested.zero_stage == 0,
        blocks_per_unit=requested.blocks_per_unit,
    )


def _odd(p: ParameterFact, compute: str, why: str) -> UnsupportedError:
    wide = "float64" if "float64" in (p.dtype, compute) else "float32"
    return UnsupportedError(
        f"parameter '{p.name}' is {p.dtype}, and activations that travel between ranks are {compute}: {why}. Set"
        f" techniques.precision.master = {wide} (all weights and their optimizer state are converted to it;"
        f" precision.compute may stay {compute}), or convert the model."
    )


def _tensor_plan(case: Case) -> tuple[TensorPlan | None, tuple[str, ...]]:
    facts, layout, requested, precision = case.facts, case.layout, case.techniques, case.precision
    if layout.tp == 1:
        return None, ()
    if facts.applied_plan(TensorPlan) is not None:
        return facts.applied_plan(TensorPlan), ()
    measured = facts.measurements.structure(layout.tp)
    words = words_for(facts, requested.tensor_plan)
    if layout.ep > 1:
        words = replace(words, elsewhere=tuple(find_stacks(facts.module)))
    made, tensor_notes = make_tensor_plan(
        measured, sequence_parallel=requested.sequence_parallel, regather=requested.regather, words=words
    )
    if requested.async_tensor_parallel and not made.sequence_parallel:
        raise UnsupportedError(
            f"techniques.async_tensor_parallel = true overlaps what travels between cut sequences, and those of"
            f" {facts.kind} stay whole: {'; '.join(tensor_notes)}. Set techniques.async_tensor_parallel = false."
        )
    beside = {
        f"{block}.{path}"
        for kind in made.kinds
        for block in kind.blocks
        for planned in kind.regions
        for adapted in planned.region.adapted
        for path in adapted.linears
    }
    for p in facts.parameters:
        if (
            precision.computed_in(p.dtype) != precision.compute
            and made.cut_of(p.name, p.shape) is not None
            and owner(p.name) not in beside
        ):
            raise _odd(p, precision.compute, f"layout.tp = {layout.tp} cuts it")
    if layout.cp > 1 and facts.applied_plan(ContextPlan) is None and facts.measurements.mixing().mixers:
        # modules that compute whole rows are given other tensors than norms return, and their layers give others
        made = replace(made, kinds=tuple(replace(kind, norms=(), summed=()) for kind in made.kinds))
    return replace(made, async_tensor_parallel=requested.async_tensor_parallel), tensor_notes


def _parameters(
    parameters: tuple[ParameterFact, ...],
    layout: Layout,
    shares: Shares,
    holding: Holding,
) -> tuple[ParameterPlan, ...]:
    tensor, experts, axes = holding.tensor, holding.experts, shares.shard_axes
    rows: dict[tuple, ParameterPlan] = {}
    places_of: dict[tuple, tuple[tuple[str, str], ...]] = {}
    for p in parameters:
        cut = tensor.cut_of(p.name, p.shape) if tensor else None
        dim = sharded_dim(p.shape, holding.shards) if cut is None else 0
        places = dict.fromkeys(axes, f"Shard({dim})") | {Axis.TP: placement_words(cut, layout.tp)}
        placements = tuple(
            (axis.value, places.get(axis, "Replicate()"))
            for axis in WORLD_AXES
            if layout.size(axis) > 1 and axis is not Axis.PP
        )
        if experts is not None and experts.has(p.name):
            placements = experts.placements(p.shape)
        summed = tensor is not None and cut is None and tensor.is_summed(p.name)
        is_alike = places_of.setdefault((pattern(p.name), p.shape), placements) == placements  # else: a separate row
        dtype = NF4 if holding.in_4_bits(p) else p.dtype
        key = (pattern(p.name) if is_alike else p.name, p.shape, dtype, p.trainable, placements, summed)
        before = rows.get(key)
        count = 1 if before is None else before.count + 1
        rows[key] = ParameterPlan(key[0], count, p.shape, dtype, p.trainable, placements, summed)
    return tuple(rows.values())


def plan_for_mesh_sizes(
    facts: ModelFacts, sizes: dict[str, int], device: str, techniques: Techniques, reduction: str
) -> Plan:
    """Plan for an existing mesh of these axis sizes, ep included if it has an expert mesh; others count as 1.

    Raises:
        ConfigError: a mesh axis has an unknown name.
    """
    if unknown := set(sizes) - set(Layout().sizes):
        raise ConfigError(
            f"the mesh has the axes {sorted(unknown)}; legal names are {', '.join(a.value for a in WORLD_AXES)}"
        )
    layout = Layout(**{"dp_shard": 1} | sizes)
    return plan(facts, layout, cluster=Cluster(layout.world, 0, device), techniques=techniques, reduction=reduction)


def with_units(facts: ModelFacts, plan: Plan, chosen: tuple[str, ...], *, reshard: bool | int) -> Plan:
    """Return a plan without cuts of weights, in which these modules are gathered as units instead of the blocks."""
    facts, shards = replace(at_rest(facts, plan.precision), blocks=chosen), plan.shares.shards
    holding = Holding(shards, plan.precision, None, None, plan.float8, plan.quantize, plan.optimizer)
    plan = replace(plan, units=units_of(facts, holding, reshard))
    return replace(plan, collectives=_collectives(facts, plan))
