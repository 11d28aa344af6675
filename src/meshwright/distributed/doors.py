"""Lay a model out for a loop of the user's own: the call in which all doors end, their plans, a function each.

A technique's plan and the meshes on which it has nothing to do are written here once (``OVER_AXES``), for its function
and for its registered transform (``builtin_transforms``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from meshwright.core.axes import Axis
from meshwright.core.devices import local_device
from meshwright.core.errors import ConfigError, UnsupportedError
from meshwright.distributed import order
from meshwright.distributed.context.context_parallel import warn_of_whole_rows
from meshwright.distributed.context.proof import keep_for_batches
from meshwright.distributed.mesh import (
    axis_size,
    axis_sizes,
    context_ranks,
    get_expert_mesh,
    get_pp_size,
    has_dp_mesh,
    known_mesh,
    sizes_of_stage,
)
from meshwright.distributed.order import prove
from meshwright.distributed.pipeline.stage_module import decoder_config, facts_of_whole, plan_of_stage_module, stage_of
from meshwright.distributed.process import agree
from meshwright.distributed.recompute.recompute import ActivationCheckpointing, checkpointing_mode
from meshwright.distributed.setup import single_process_mesh
from meshwright.introspection.facts import ModelFacts, model_facts
from meshwright.introspection.source import as_module
from meshwright.models.layers import Router
from meshwright.planning.build import plan_for_mesh_sizes
from meshwright.planning.context.plan import Auto, ContextPlan, Kind
from meshwright.planning.plan import Plan
from meshwright.planning.techniques import Precision, Techniques
from meshwright.planning.tensor.plan import TensorPlan

# --- lay a module out by a plan

log = logging.getLogger("meshwright")

CONTEXT = "context_parallel"


def lay_out_module(
    model: nn.Module,
    facts: ModelFacts,
    plan: Plan,
    device_mesh: DeviceMesh | None,
    rows: tuple[str, ...],
    *,
    door: str,
    seed: int = 0,
    takes_any_weights: bool = False,
) -> nn.Module:
    """Prove the cuts of a plan, log its notes, and apply some rows of the order; return the module.

    Args:
        facts: facts about ``model`` in its present state.
        rows: names of the techniques to apply now, among those that the plan requests.
        door: name of the public call, which begins each line of the log.
        takes_any_weights: whether ranks may bring different weights, which the door equalises itself.
    """
    stage = stage_of(facts)
    if context_ranks(device_mesh) > 1:
        if stage is not None:
            raise UnsupportedError(
                f"stage {stage.stage_id} of {stage.num_stages} on a mesh with cp > 1: stages behind the first would"
                f" not know which tokens of a row they have. Use parallelize(), or make the mesh with cp = 1."
            )
        if facts.applied_plan(ContextPlan) is None:  # measured now: a model that is laid out cannot be copied any more
            facts.measurements.mixing()
            facts.measurements.sample()
    # a stage's cuts are proven where they are planned, on the whole decoder
    refused = prove(facts, plan, rows) if stage is None else {}
    for note in plan.notes:
        log.info("%s: %s", door, note)
    if CONTEXT in rows and plan.context is not None:
        keep_for_batches(facts, plan.context, refused)
        warn_of_whole_rows(model)
    site = order.Site(device_mesh, facts, seed)
    return (order.apply if takes_any_weights else order.apply_brought)(model, plan, site, rows)


def rows_that_cut(model: nn.Module, device_mesh: DeviceMesh | None) -> tuple[str, ...]:
    """Name the technique that a door applies first where the mesh cuts rows and nothing on the model does."""
    done = order.applied(model)
    if context_ranks(device_mesh) == 1 or CONTEXT in done:
        return ()
    after = order.NAMES[order.NAMES.index(CONTEXT) :]
    if late := next((name for name in done if name in after and name != "weights"), None):
        raise ConfigError(
            f"the mesh has cp = {context_ranks(device_mesh)}, and {late} is on this {type(model).__name__} already,"
            f" behind which rows cannot be cut any more: call apply_context_parallel(model, device_mesh) before"
        )
    return (CONTEXT,)


# --- plan techniques, with torch's averaging of gradients


def mean_plan(
    facts: ModelFacts, device_mesh: DeviceMesh | None, requested: Techniques, sizes: dict[str, int] | None = None
) -> Plan:
    """Plan for one stage's module on a mesh; ``sizes``: of axes, where they are not those of the mesh."""
    device = device_mesh.device_type if device_mesh is not None else "cpu"
    sizes = sizes_of_stage(device_mesh) if sizes is None else sizes
    requested = replace(requested, blocks_per_unit=1)  # as users of torch's doors know it
    return plan_for_mesh_sizes(facts, sizes, device, requested, "mean")


def tensor_plan(facts: ModelFacts, device_mesh: DeviceMesh | None, requested: Techniques) -> Plan:
    """Plan cuts over the tensor axis of a mesh alone; cut nothing if there is no such axis.

    A stage module is cut as the whole decoder is, whose plan is proven first.
    """
    if (whole := facts_of_whole(facts)) is not None:
        plan = tensor_plan(whole, device_mesh, requested)
        prove(whole, plan)
        return plan_of_stage_module(plan, facts)
    ranks = axis_size(device_mesh, Axis.TP)
    # experts are left to the axis that shares them out
    shares_experts = ranks > 1 and get_expert_mesh(device_mesh) is not None
    return mean_plan(facts, device_mesh, requested, None if shares_experts else {Axis.TP.value: ranks})


def rows_plan(facts: ModelFacts, device_mesh: DeviceMesh | None, requested: Techniques) -> Plan:
    """Plan how rows are cut over the context axis alone, beside a tensor axis that cuts the model already."""
    axes = (Axis.CP, Axis.TP) if facts.applied_plan(TensorPlan) is not None else (Axis.CP,)
    sizes = {axis.value: axis_size(device_mesh, axis) for axis in axes}
    if sizes[Axis.CP.value] == 1:
        requested = replace(requested, context_parallel_method="auto")
    # parameters stay as they are, whoever shards or replicates them later
    return mean_plan(facts, device_mesh, replace(requested, zero_stage=0), sizes)


class AxisTechnique(NamedTuple):
    """A technique over one axis: its plan, the axis, and words for a mesh on which it has nothing to do."""

    plan: Callable[[ModelFacts, DeviceMesh | None, Techniques], Plan]
    axis: Axis
    idle: str


OVER_AXES = {
    "tensor_parallel": AxisTechnique(tensor_plan, Axis.TP, "has no tp axis larger than 1, so there is nothing to cut"),
    "expert_parallel": AxisTechnique(mean_plan, Axis.EP, "was not built for ep > 1, so nothing is shared out"),
    CONTEXT: AxisTechnique(rows_plan, Axis.CP, "has no cp axis larger than 1, so rows stay whole"),
}
"""Techniques by their rows of the order, as their functions and their transforms apply them."""


def has_work(technique: str, model: nn.Module, device_mesh: DeviceMesh | None, *, door: str) -> bool:
    """Return whether the mesh has a technique's axis, which is logged if not; ConfigError if a later one was first."""
    _, axis, idle = OVER_AXES[technique]
    if axis_size(device_mesh, axis) == 1:
        log.info("%s: the mesh %s %s", door, axis_sizes(device_mesh), idle)
        return False
    order.refuse_misorder(technique, order.applied(model), type(model).__name__)
    return True


def float8_plan(facts: ModelFacts, requested: Techniques, all_gather: bool) -> Plan:
    """Plan float8 for this process alone; raise ConfigError if another technique came first."""
    order.refuse_misorder("float8", order.applied(facts.module), facts.kind)
    plan = plan_for_mesh_sizes(facts, {}, local_device(), requested, "mean")
    assert plan.float8 is not None
    return replace(plan, float8=replace(plan.float8, all_gather=all_gather))


def averaging_plan(
    facts: ModelFacts, device_mesh: DeviceMesh, policy: MixedPrecisionPolicy, requested: Techniques, cuts: bool = False
) -> Plan:
    """Plan sharding over the data axes of a mesh, with torch's averaging and torch's policy.

    Args:
        cuts: whether to cut over the tensor axis too; else the plan keeps the model's layout on that axis.
    """

    def named(dtype: torch.dtype | None) -> str | None:
        return None if dtype is None else str(dtype).removeprefix("torch.")

    # dtypes that the policy leaves open get torch's defaults
    compute = named(policy.param_dtype) or (facts.parameters[0].dtype if len(facts.floating) < 2 else "auto")
    precision = Precision("auto", compute, named(policy.reduce_dtype) or compute, named(policy.output_dtype))
    requested = replace(requested, data_parallel="fully_shard", precision=precision)
    sizes = sizes_of_stage(device_mesh)
    if not cuts and facts.applied_plan(TensorPlan) is None and get_expert_mesh(device_mesh) is None:
        sizes.pop(Axis.TP.value, None)
    plan = mean_plan(facts, device_mesh, requested, sizes)
    # a user's own loop has to do what ParallelModel does in a step
    configs = [m.config for m in facts.module.modules() if isinstance(m, Router)]
    keys = ("bias_rate", "sequence_loss", "batch_loss", "z_loss")
    if wanted := [key for key in keys if any(getattr(config, key) for config in configs)]:
        log.warning(
            "model.moe.%s: these functions lay a model out and take no steps. Nothing moves the routers' biases, their"
            " losses wait in Router.auxiliary for your loop to add them, and batch_loss counts the tokens of this rank"
            " alone. parallelize() does it all.",
            ", ".join(wanted),
        )
    if plan.precision.compute == "float16":
        log.warning(
            "float16: these functions lay a model out and take no steps. Scale the loss in your loop"
            " (torch.amp.GradScaler), or small gradients vanish; parallelize() does it."
        )
    return replace(plan, precision=replace(plan.precision, cast_forward_inputs=policy.cast_forward_inputs))


# --- apply one technique by one public function


def default_mp_policy(param_dtype: torch.dtype = torch.bfloat16) -> MixedPrecisionPolicy:
    """Return a policy that computes in ``param_dtype``, reduces gradients in fp32, and casts each unit's inputs."""
    return MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32, cast_forward_inputs=True)


def apply_fsdp2(
    model: nn.Module,
    device_mesh: DeviceMesh,
    mp_policy: MixedPrecisionPolicy | None = None,
    reshard_after_forward: bool | int = True,
) -> nn.Module:
    """Shard ``model`` in place with FSDP2, each repeated block as a unit, then the root, and return it.

    Gradients are averaged over all data ranks, as in torch. With both data axes larger than 1, sharding is hybrid:
    over dp_shard, replicated over dp_replicate. Where the mesh has ``cp`` larger than 1, parameters are sharded over
    dp_shard × cp, gradients averaged over both, and rows are cut (``apply_context_parallel``). Without any of these
    axes there is nothing to do, which is logged, but an explicit policy still acts, over a mesh of size 1.

    Args:
        mp_policy: dtypes; None means ``default_mp_policy()``.
        reshard_after_forward: free a block's parameters after forward; a number: reshard them over that many ranks.

    Raises:
        ConfigError: the model is sharded already, a later technique came first, the number does not divide dp_shard,
            or the mesh has an unknown axis.
        IntegrityError: data ranks bring different weights. Build the model on meta, or under one seed on every rank.
        UnsupportedError: the mesh has axes without a technique yet. (With a pp axis ``model`` is one stage's module.)
    """
    device_mesh = known_mesh(device_mesh)
    cuts_rows = rows_that_cut(model, device_mesh)
    if not has_dp_mesh(device_mesh) and context_ranks(device_mesh) == 1 and mp_policy is None:
        log.info(
            "apply_fsdp2: the mesh %s has no data axis larger than 1, so there is nothing to shard",
            axis_sizes(device_mesh),
        )
        return model
    facts, requested = model_facts(model), Techniques(reshard_after_forward=reshard_after_forward)
    plan = averaging_plan(facts, device_mesh, mp_policy or default_mp_policy(), requested)
    return lay_out_module(model, facts, plan, device_mesh, (*cuts_rows, "fully_shard"), door="apply_fsdp2")


def apply_tensor_parallel(model: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
    """Cut ``model`` in place over the mesh's ``tp`` axis (arXiv 1909.08053), with sequence parallelism; return it.

    The cuts are measured and then rehearsed on a small copy (``introspection.structure``), so any transformer will
    do. Weights, biases, embedding and head become DTensors on the tensor axis; norms, and activations between blocks,
    work on each rank's part of the sequence (arXiv 2205.05198). The model still takes whole batches, equal on all
    ranks of the axis, and returns whole logits. Gradients are complete when backward ends: partial gradients are
    summed by then. Apply it before ``apply_ac`` and ``apply_fsdp2``.

    Raises:
        ConfigError: tp does not divide the heads (the text lists legal sizes), or a later technique is on the model.
        UnsupportedError: nothing can be cut, or the plan's results differ from those of one process.
    """
    return _apply_over_axis("tensor_parallel", model, device_mesh, Techniques())


def _apply_over_axis(technique: str, model: nn.Module, device_mesh: DeviceMesh, requested: Techniques) -> nn.Module:
    device_mesh, door = known_mesh(device_mesh), f"apply_{technique}"
    if not has_work(technique, model, device_mesh, door=door):
        return model
    facts = model_facts(model)
    plan = OVER_AXES[technique].plan(facts, device_mesh, requested)
    return lay_out_module(model, facts, plan, device_mesh, (technique,), door=door)


def apply_expert_parallel(model: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
    """Shard the experts of ``model`` over the expert axis, in place (arXiv 2006.16668), and return it.

    Each rank has its part of every layer's experts, and tokens travel to theirs and back. Experts are recognised in
    any model as stacks: tensors with one row for each. A small copy first shows that they compute independently.
    Ranks of the axis have other rows (or, beside ``tp``, other parts of the sequence). After ``apply_fsdp2`` the
    experts' gradients are averaged as dense ones are. Apply it after ``apply_tensor_parallel`` and before
    ``apply_ac`` and ``apply_fsdp2``.

    Args:
        device_mesh: from ``init_distributed`` with ``ep``; without, or with ep = 1, nothing is done, which is logged.

    Raises:
        ConfigError: a model without experts, sizes that do not divide (the text lists legal ones), or a later
            technique came first.
        UnsupportedError: the experts do not compute independently.
    """
    return _apply_over_axis("expert_parallel", model, device_mesh, Techniques())


def apply_context_parallel(model: nn.Module, device_mesh: DeviceMesh, method: Kind | Auto = "auto") -> nn.Module:
    """Let attention of ``model`` reach tokens that lie on other ranks of the mesh's ``cp`` axis, in place; return it.

    Rows are cut by the loop, with ``context_parallel_rows`` around each forward; without it every rank computes whole
    rows. The calls of attention are measured and then rehearsed on a small copy. Gradients are those of a rank's own
    tokens until ``apply_fsdp2`` (which calls this by itself where nothing came in between) or DDP sums them over the
    axis. Apply it after ``apply_tensor_parallel`` and ``apply_expert_parallel``, and before ``apply_ac``.

    Args:
        method: auto, all_gather, ring, ulysses, ulysses_ring or halo.

    Raises:
        ConfigError: an unknown method, or a later technique came first.
        UnsupportedError: tokens see each other in a way that is not known, the method does not fit an attention, or
            the mesh has a pipeline.
    """
    return _apply_over_axis(CONTEXT, model, device_mesh, Techniques(context_parallel_method=method))


def apply_ac(model: nn.Module, mode: ActivationCheckpointing | str) -> nn.Module:
    """Recompute activations in backward, in place, and return the model.

    Modes: ``none``, ``full`` (every block), ``selective`` (attention only), ``every_n`` (each second block),
    ``selective_op`` (every block, but for results of some operators), ``offload`` (none: activations wait in host
    memory). Each mode has the defaults of its keys. Parameter names stay as they are.

    Raises:
        ConfigError: an unknown mode, a mode that matches no module of this model or needs more than its name
            (``modules``, ``memory_budget``), or sharding came first.
    """
    requested = Techniques(activation_checkpointing=checkpointing_mode(mode).value)
    facts = model_facts(model)
    plan = mean_plan(facts, None, requested)
    return lay_out_module(model, facts, plan, None, ("activation_checkpoint",), door="apply_ac")


def apply_float8(
    model: nn.Module,
    enable_fsdp_float8_all_gather: bool = True,
    *,
    recipe: str = "tensorwise",
    filter: tuple[str, ...] = (),
) -> nn.Module:
    """Let the linear layers inside the blocks of ``model`` multiply in float8 by torchao, in place, and return it.

    See arXiv 2209.05433. Parameters stay the very same, in their own dtype, and so do names and hooks. The head,
    embeddings, norms, routers and stacks of experts stay in high precision, and so does a layer whose dims do not
    divide by 16, which is logged. Without a GPU float8 is emulated. Apply it before all other techniques.

    Args:
        enable_fsdp_float8_all_gather: ``apply_fsdp2`` gathers their weights in float8, with bitwise the result of
            rounding gathered weights; a recipe with scales for each row cannot, which is logged.
        recipe: "tensorwise", "rowwise" or "rowwise_with_gw_hp".
        filter: regular expressions on paths of linear layers that are not converted.

    Raises:
        MissingExtraError: torchao is not installed.
        ConfigError: an unknown recipe, no layer that can be converted, or another technique came first.
        UnsupportedError: the GPU does not support float8.
    """
    gathers = enable_fsdp_float8_all_gather and recipe == "tensorwise"
    if enable_fsdp_float8_all_gather and not gathers:
        log.warning(
            "apply_float8: FSDP will gather weights in high precision: the recipe %s has no single scale for a weight",
            recipe,
        )
    facts = model_facts(model)
    requested = Techniques(float8=recipe, float8_filter=filter)  # type: ignore[arg-type]
    return lay_out_module(model, facts, float8_plan(facts, requested, gathers), None, ("float8",), door="apply_float8")


def build_parallel_model(
    model_config: Any,
    device: torch.device | str,
    device_mesh: DeviceMesh | None = None,
    *,
    ac_mode: ActivationCheckpointing | str = "none",
    mp_policy: MixedPrecisionPolicy | None = None,
    param_dtype: torch.dtype = torch.bfloat16,
    compile_model: bool = False,
    fp8: bool = False,
    seed: int = 0,
) -> nn.Module:
    """Build a model on meta, lay it onto the mesh in the fixed order, and give it weights.

    Args:
        model_config: a model config (KempnerForge's ModelConfig too), or a function that returns a module.
        device: device of the computation, of the mesh's kind.
        device_mesh: mesh with meshwright's axis names; None: one process.
        mp_policy: dtypes; None: ``default_mp_policy(param_dtype)``.
        param_dtype: dtype of the computation where ``mp_policy`` is None; parameters rest in fp32.
        fp8: linear layers multiply in float8, by the recipe "tensorwise"; weights travel in ``param_dtype``.
        seed: seed of the initial weights, which are equal on every layout.

    Returns:
        The module, sharded over the data axes, with gradients averaged over them (without any: over a mesh of size 1,
        so that the policy acts).

    Raises:
        ConfigError, UnsupportedError: refused before anything is built.
    """
    if get_pp_size(device_mesh) > 1:
        raise UnsupportedError(
            f"the mesh has a pp axis of {get_pp_size(device_mesh)} ranks, and build_parallel_model returns one module:"
            f" use parallelize, which runs the whole pipeline, or build_stage_module for a loop of your own"
        )
    kind = torch.device(device).type
    device_mesh = known_mesh(device_mesh) if device_mesh is not None else None
    if device_mesh is not None and device_mesh.device_type != kind:
        raise ConfigError(f"device = {device} but the mesh is on {device_mesh.device_type}: give both the same kind")
    if device_mesh is None and not agree.alone():
        raise ConfigError(
            "device_mesh = None means one process, but the process group has more: give the mesh that"
            " init_distributed returned"
        )
    device_mesh = device_mesh if device_mesh is not None else single_process_mesh(kind)
    module = as_module(decoder_config(model_config))
    facts = model_facts(module)
    mode, recipe = checkpointing_mode(ac_mode).value, "tensorwise" if fp8 else "none"
    requested = Techniques(activation_checkpointing=mode, compile=compile_model, float8=recipe)
    plan = averaging_plan(facts, device_mesh, mp_policy or default_mp_policy(param_dtype), requested, cuts=True)
    options = {"door": "build_parallel_model", "seed": seed, "takes_any_weights": True}
    return lay_out_module(module, facts, plan, device_mesh, order.NAMES, **options)
