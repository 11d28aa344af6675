"""Turn a model and a mesh into a ParallelModel: facts, plan, apply, audit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from logging import getLogger
from numbers import Integral
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.core.axes import Axis
from meshwright.core.devices import check_device_type
from meshwright.core.errors import ConfigError
from meshwright.core.losses import Loss, PreferenceLoss
from meshwright.core.record import remember
from meshwright.distributed.context.proof import keep_for_batches
from meshwright.distributed.weights.constructed import Weights
from meshwright.introspection.blocks import Hints
from meshwright.introspection.cluster import Cluster
from meshwright.introspection.facts import model_facts
from meshwright.introspection.source import ModelOrigin, as_module, with_adapters
from meshwright.planning.build import plan as make_plan
from meshwright.planning.build import plan_for_mesh_sizes
from meshwright.planning.layout import Layout
from meshwright.planning.plan import Plan
from meshwright.planning.premise_rules import refuse_other_losses
from meshwright.planning.techniques import Techniques, as_techniques
from meshwright.planning.tensor.make import LEFT_TO_EVERY_RANK

from . import order
from .float8 import refuse_absent
from .loss import first_batch, preference
from .mesh import build_mesh, groups_of, known_mesh, plan_sizes
from .optimizer.grad_clip import norms_of_pipeline
from .parallel_model import LossFunction, ParallelModel
from .process import agree
from .process.world import get_world_info, ranks_per_node
from .setup import DistributedConfig, choose_backend, init_distributed, single_process_mesh

log = getLogger("meshwright")

Result = TypeVar("Result")


def parallelize(
    model: nn.Module | Callable[[], nn.Module] | Any,
    mesh: DeviceMesh | Layout | None = None,
    *,
    loss_fn: LossFunction | PreferenceLoss | Loss | Mapping[str, Loss] | None = None,
    techniques: Techniques | dict | None = None,
    plan: Plan | None = None,
    seed: int = 0,
    microbatch_rows: int = 0,
    draw_on: str | None = None,
    weights: Weights | None = None,
    audit: bool = True,
    hints: Hints | None = None,
) -> ParallelModel:
    """Lay a model onto a mesh; every layout gives the losses, gradients and weights of one process, or is refused.

    Args:
        model: a function or class that returns a module, or a model config: each rank makes only its share of what
            the constructor computes, as ``introspection/constructor`` says. Or a module: one on meta gets
            its modules' ``reset_parameters``.
        mesh: a DeviceMesh with our axis names, or a Layout (or DistributedConfig), for which process group and mesh
            are brought up where needed.
        loss_fn: (logits, labels) -> SUM of the loss over real tokens; by default the cross entropy. Or a ``Loss``,
            which declares a function of any output and batch, or the model's own loss, as a sum or a mean; or several
            of them by name. Or a ``PreferenceLoss`` over pairs of rows.
        techniques: adapters, precision, recomputation, compilation, offload …, typed or as a plain dict. Adapters
            are put beside the layers of a module with weights in place.
        plan: a plan made earlier; then ``techniques`` must be None.
        seed: seed of the initial weights, which are those that the constructor gives in one process under
            ``torch.manual_seed(seed)``. Beyond 2^30 elements they follow the same distributions, equal on every
            layout.
        microbatch_rows: rows per forward; a step's batch is cut into as many microbatches as that takes. 0: one.
        draw_on: "cpu" or the type of an accelerator: where the initial weights of our own decoder, and of a model
            beyond 2^30 elements, are drawn; by default where they will be. One seed gives other weights on each.
        weights: where the weights of a model on meta come from instead, such as ``pretrained(folder)``.
        hints: facts about a model that measurement cannot read (``meshwright.Hints``).
        audit: check the laid-out model against the plan, and replicas against each other; one pass over the parameters.

    Raises:
        ConfigError, UnsupportedError: refused before anything is applied.
        IntegrityError: the laid-out model differs from the plan.
    """
    if plan is not None and techniques is not None:
        raise ConfigError("parallelize takes a plan or techniques, not both: the plan says already what to apply")
    if not isinstance(microbatch_rows, Integral) or microbatch_rows < 0:
        raise ConfigError(
            f"microbatch_rows = {microbatch_rows!r}: the rows of a forward are a whole number; 0: all at once"
        )
    if not isinstance(seed, Integral):
        raise ConfigError(f"seed = {seed!r}: a seed is a whole number")
    if draw_on is not None:
        check_device_type(draw_on, "draw_on")
    if isinstance(model, ParallelModel):
        raise ConfigError(
            f"this {model.facts.kind} is laid out already: give parallelize the model itself, or a factory"
        )
    requested = as_techniques(techniques)
    module = as_module(with_adapters(model, requested.adapters, seed), seed, hints)
    facts = model_facts(module)
    if weights is not None and not facts.on_meta:
        raise ConfigError(
            "parallelize is given weights=, and the model has weights: build it on the meta device, or leave weights"
            " out"
        )
    requested = replace(requested, adapters=None)  # the model has them
    if isinstance(mesh, DeviceMesh):
        mesh = known_mesh(mesh, cuts_rows=True)
        if plan is None:
            sizes, device = plan_sizes(mesh), mesh.device_type
            plan = _once(mesh, lambda: plan_for_mesh_sizes(facts, sizes, device, requested, "sum"))
        _check_early(plan, loss_fn, microbatch_rows)
    else:
        config = mesh if isinstance(mesh, DistributedConfig) else DistributedConfig(**vars(mesh or Layout()))
        cluster = Cluster(get_world_info()[2], ranks_per_node(), choose_backend(config.backend)[1])
        if plan is not None and mesh is not None:
            _refuse_other_mesh(plan, config.resolve(plan.world).sizes)
        known = plan or config.resolve(cluster.world, ranks_per_node=cluster.ranks_per_node or None)
        layout, device, mesh = replace(config, **known.sizes), (plan or cluster).device, None
        if layout.world > 1:
            mesh = build_mesh(layout, device) if dist.is_initialized() else init_distributed(layout, seed)
        if plan is None:
            plan = agree.decided_once(lambda: make_plan(facts, config, cluster=cluster, techniques=requested))
        agree.together(lambda: _check_early(plan, loss_fn, microbatch_rows))
        if mesh is None and plan.data.technique == "fully_shard":
            mesh = single_process_mesh(plan.device, config.backend)
    adds_up = first_batch.check(loss_fn, facts.vocab_size, torch.device(plan.device), plan)

    def prove() -> dict[str, str]:
        if loss_fn is None or isinstance(loss_fn, PreferenceLoss):
            refuse_other_losses(facts)
        return order.prove(facts, plan)

    refused = _once(mesh, prove)  # on one rank: a model's small copies are alike
    if plan.context is not None:
        keep_for_batches(facts, plan.context, refused)
    _refuse_other_mesh(plan, plan_sizes(mesh))
    origin = ModelOrigin.of(module)
    parts = order.lay_out(module, plan, order.Site(mesh, facts, seed, draw_on, weights))
    made = ParallelModel(parts, plan, facts, mesh, loss_fn=loss_fn, microbatch_rows=microbatch_rows, adds_up=adds_up)
    remember(made, origin)
    if plan.pipeline is not None:
        norms_of_pipeline(made, plan, groups_of(mesh, Axis.PP))
    made.copy_shared()
    if audit:
        made.audit()
    return made


def _check_early(plan: Plan, loss_fn: object, microbatch_rows: int) -> None:
    refuse_absent(plan)
    preference.refuse(loss_fn, plan, microbatch_rows)
    for note in (note for note in plan.notes if LEFT_TO_EVERY_RANK in note and get_world_info()[0] == 0):
        log.warning("layout.tp = %d: %s", plan.size(Axis.TP), note)


def _once(mesh: DeviceMesh | None, decide: Callable[[], Result]) -> Result:
    """Decide on one rank for all, where the mesh has every rank of the world; others may not be here."""
    is_world = mesh is not None and mesh.mesh.numel() == dist.get_world_size()
    return agree.decided_once(decide) if is_world else decide()


def _refuse_other_mesh(plan: Plan, sizes: dict[str, int]) -> None:
    there, here = ({axis: size for axis, size in each.items() if size > 1} for each in (plan.sizes, sizes))
    if here != there:
        raise ConfigError(
            f"the plan is for the mesh {there or 'of one rank'}, but the mesh here is {here or 'of one rank'}: make a"
            f" plan for this mesh"
        )
