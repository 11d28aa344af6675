"""From facts and wishes to a Plan."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from meshwright.core.axes import WORLD_AXES, Axis
from meshwright.core.config import from_dict
from meshwright.core.dtypes import dtype_bytes
from meshwright.core.errors import ConfigError
from meshwright.core.names import is_within, matching, pattern
from meshwright.core.units import bytes_text
from meshwright.introspection.cluster import Cluster, local_device
from meshwright.introspection.facts import ModelFacts, ParameterFact, measure_structure, model_facts

from .batch import Batch
from .collectives import step_collectives
from .layout import Layout
from .plan import DataParallel, LossPlan, ParameterPlan, Plan, PrecisionPlan, Unit
from .rules import Case, check, check_batch, check_data, resolve_precision
from .techniques import Techniques
from .tensor_collectives import tensor_collectives
from .tensor_plan import TensorPlan, make_tensor_plan, placement_words
from .tensor_words import words_for


def plan(
    model: Any,
    layout: Layout,
    *,
    batch: Batch | None = None,
    cluster: Cluster | None = None,
    techniques: Techniques | dict | None = None,
    reduction: str = "sum",
) -> Plan:
    """Decide everything about a layout, with no process group and no GPU.

    Args:
        model: a model config, a module (on meta or not), or a function that returns one.
        layout: mesh sizes; open ones (-1) need a ``cluster`` to be filled from.
        batch: the shape of a step's data, checked against model and mesh; the plan itself holds for any batch.
        cluster: ranks, ranks per node and device; by default the layout's own size on this machine's device.
        techniques: the typed wishes, or a plain dict of them.
        reduction: "sum", or "mean" for the functions that keep torch's averaging of gradients.

    Raises:
        ConfigError, UnsupportedError: a rule is broken; the text says which, and how to mend it.
    """
    from meshwright.introspection.source import as_module

    if reduction not in ("sum", "mean"):
        raise ConfigError(f"reduction = {reduction!r}: legal are sum and mean")
    facts = model if isinstance(model, ModelFacts) else model_facts(as_module(model))
    wishes = as_techniques(techniques)
    cluster = cluster or Cluster(world=layout.world, device=local_device())
    layout = layout.resolve(cluster.world, ranks_per_node=cluster.ranks_per_node or None)
    precision = resolve_precision(wishes, facts.parameters[0].dtype, cluster.device)
    technique = _data_technique(wishes, layout, precision)
    check(Case(facts, layout, wishes, precision, technique, cluster.device))
    made = _assemble(facts, layout, wishes, precision, technique, cluster.device, reduction)
    if batch is not None:
        check_batch(made, batch)
        check_data(facts, batch)
    return made


def as_techniques(techniques: Techniques | dict | None) -> Techniques:
    """The typed wishes. Raises ConfigError for unknown keys and wrong types of a plain dict."""
    if techniques is None:
        return Techniques()
    return techniques if isinstance(techniques, Techniques) else from_dict(Techniques, techniques, where="techniques")


def _data_technique(wishes: Techniques, layout: Layout, precision: PrecisionPlan) -> str:
    ranks = layout.dp_replicate * layout.dp_shard
    if wishes.data_parallel == "fully_shard" or (layout.dp_shard > 1 and wishes.data_parallel == "auto"):
        return "fully_shard"
    if wishes.data_parallel == "auto" and (precision.is_mixed or wishes.cpu_offload or (layout.tp > 1 and ranks > 1)):
        return "fully_shard"
    return "ddp" if ranks > 1 else "none"


def _assemble(
    facts: ModelFacts, layout: Layout, wishes: Techniques, precision: PrecisionPlan, technique: str, device: str, reduction: str
) -> Plan:
    mesh = {axis.value: layout.wish(axis) for axis in WORLD_AXES}
    names = [p.name for p in facts.parameters]
    chosen = matching(wishes.freeze, names, "techniques.freeze") if wishes.freeze else set()
    facts = replace(facts, parameters=tuple(replace(p, trainable=p.trainable and p.name not in chosen) for p in facts.parameters))
    data = DataParallel(technique, reduction, wishes.sync_grad_accum, wishes.cpu_offload, pin_memory=device == "cuda")  # type: ignore[arg-type]
    tensor, said = _tensor_plan(facts, layout, wishes)
    units = _units(facts, layout.dp_shard if technique == "fully_shard" else 1, wishes.reshard_after_forward, tensor)
    loss = _loss_plan(facts, layout, wishes)
    parameters = _parameters(facts.parameters, precision, layout, technique, tensor)
    mode = wishes.activation_checkpointing
    checkpointed = {"none": (), "full": facts.blocks, "selective": facts.attentions}[mode]
    shards = layout.dp_shard if technique == "fully_shard" else 1
    recomputed = _inside_blocks(facts, checkpointed)
    activations = tensor_collectives(facts, tensor, precision, loss, recomputed, shards) if tensor is not None else ()
    return Plan(
        model=facts.kind,
        device=device,
        mesh=tuple(mesh.items()),
        parameters=parameters,
        units=units,
        data=data,
        precision=precision,
        frozen=tuple(p.name for p in facts.parameters if not p.trainable),
        activation_checkpointing=mode,
        checkpointed=checkpointed,
        compiled=facts.blocks if wishes.compile else (),
        compile_options=(("backend", wishes.compile_backend),) if wishes.compile else (),
        collectives=step_collectives(mesh, units, data, precision, activations),
        tensor=tensor,
        loss=loss,
        notes=(*said, *_notes(facts, layout, technique, parameters)),
    )


def _inside_blocks(facts: ModelFacts, modules: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Block -> the paths of those of ``modules`` that it is or has, within it."""
    found: dict[str, tuple[str, ...]] = {}
    for path in modules:
        block = next(block for block in facts.blocks if is_within(path, block))
        found[block] = (*found.get(block, ()), path[len(block) + 1 :])
    return found


def _tensor_plan(facts: ModelFacts, layout: Layout, wishes: Techniques) -> tuple[TensorPlan | None, tuple[str, ...]]:
    if layout.tp == 1:
        return None, ()
    if facts.tensor_plan is not None:
        return facts.tensor_plan, ()
    measured = measure_structure(facts, layout.tp)
    words = words_for(facts, wishes.tensor_plan)
    return make_tensor_plan(measured, sequence_parallel=wishes.sequence_parallel, regather=wishes.regather, words=words)


def _loss_plan(facts: ModelFacts, layout: Layout, wishes: Techniques) -> LossPlan | None:
    if wishes.loss_chunks == 1:
        return None
    structure = measure_structure(facts, layout.tp).structure
    assert structure.head is not None
    return LossPlan(structure.head, structure.tail, wishes.loss_chunks)


def _units(facts: ModelFacts, shards: int, reshard: bool | int, tensor: TensorPlan | None) -> tuple[Unit, ...]:
    """Communication units in forward order, the root ("") first: it is gathered first and stays."""
    early = _trains_before_blocks(facts)
    units = [_unit(facts, "", shards, False, False, tensor)]
    flows = early
    for block in facts.blocks:
        flows = flows or any(p.trainable for p in facts.of_unit(block))
        keeps = block == facts.blocks[-1] or reshard is False  # the last block is needed at once in backward
        units.append(_unit(facts, block, shards, False if keeps else reshard, flows and not keeps, tensor))
    return tuple(unit for unit in units if unit.elements)


def _unit(facts: ModelFacts, name: str, shards: int, reshard: bool | int, gathers: bool, tensor: TensorPlan | None) -> Unit:
    parameters = facts.of_unit(name)
    total = sum(_padded(p, shards, tensor) for p in parameters)
    return Unit(name, total, sum(_padded(p, shards, tensor) for p in parameters if p.trainable), reshard, gathers)


def _padded(p: ParameterFact, shards: int, tensor: TensorPlan | None) -> int:
    """Elements of the parameter (of the first tensor-parallel rank's part of it) when dim 0 is filled up to a multiple of ``shards``, as
    FSDP2 sends it."""
    shape = p.shape if tensor is None else tensor.local_shape(p.name, p.shape)
    rows = shape[0] if shape else 1
    return -(-rows // shards) * shards * math.prod(shape[1:])


def _trains_before_blocks(facts: ModelFacts) -> bool:
    """Whether gradients flow into the first block: a trainable parameter is registered before it."""
    names = [p.name for p in facts.parameters]
    first = next((names.index(p.name) for block in facts.blocks[:1] for p in facts.of_unit(block)), len(names))
    return any(p.trainable for p in facts.parameters[:first])


def _parameters(
    parameters: tuple[ParameterFact, ...], precision: PrecisionPlan, layout: Layout, technique: str, tensor: TensorPlan | None
) -> tuple[ParameterPlan, ...]:
    sharded = {Axis.DP_SHARD: "Shard(0)"} if technique == "fully_shard" else {}
    rows: dict[tuple, ParameterPlan] = {}
    for p in parameters:
        cut = tensor.cut_of(p.name, p.shape) if tensor else None
        places = {**sharded, Axis.TP: placement_words(cut, layout.tp)}
        placements = tuple((axis.value, places.get(axis, "Replicate()")) for axis in WORLD_AXES if layout.wish(axis) > 1)
        summed = tensor is not None and cut is None and tensor.is_summed(p.name)
        key = (pattern(p.name), p.shape, p.trainable, placements, summed)
        before = rows.get(key)
        count = 1 if before is None else before.count + 1
        rows[key] = ParameterPlan(key[0], count, p.shape, precision.master, p.trainable, placements, summed)
    return tuple(rows.values())


def _notes(facts: ModelFacts, layout: Layout, technique: str, parameters: tuple[ParameterPlan, ...]):
    yield from _whole_on_tensor_ranks(parameters)
    for p in facts.parameters:
        if p.aliases:
            yield f"{p.name} is tied to {', '.join(p.aliases)}: one parameter, counted once"
    if technique == "fully_shard" and layout.dp_shard == 1:
        yield "dp_shard = 1: nothing is sharded; fully_shard acts for its precision or offload only"
    if technique == "fully_shard" and not facts.blocks:
        yield f"no repeated block was found in {facts.kind}: all parameters are gathered at once"


def _whole_on_tensor_ranks(parameters: tuple[ParameterPlan, ...]):
    """Matrices that the tensor axis does not cut."""
    for p in parameters:
        if dict(p.placements).get(Axis.TP.value) == "Replicate()" and len(p.shape) > 1:
            size = p.count * math.prod(p.shape) * dtype_bytes(p.dtype)
            yield f"{p.pattern} stays whole on every rank of the tensor axis: {bytes_text(size)} ({p.count} of them)"


def plan_for_mesh_sizes(facts: ModelFacts, sizes: dict[str, int], device: str, techniques: Techniques, reduction: str) -> Plan:
    """A plan for a mesh that exists already (``sizes``: axis name to size; other axes count as 1).

    Raises:
        ConfigError: a mesh axis has a name that is not ours.
    """
    unknown = set(sizes) - {axis.value for axis in WORLD_AXES}
    if unknown:
        raise ConfigError(f"the mesh has the axes {sorted(unknown)}; legal names are {', '.join(a.value for a in WORLD_AXES)}")
    layout = Layout(**{axis.value: sizes.get(axis.value, 1) for axis in WORLD_AXES})
    return plan(facts, layout, cluster=Cluster(layout.world, 0, device), techniques=techniques, reduction=reduction)
