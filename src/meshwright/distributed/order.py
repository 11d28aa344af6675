"""Define the order in which techniques are applied, once and as code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.core.axes import WORLD_AXES, Axis
from meshwright.core.devices import CPU, current_device
from meshwright.core.dtypes import torch_dtype
from meshwright.core.errors import ConfigError
from meshwright.core.host import without_collector
from meshwright.core.names import clean
from meshwright.core.record import recall, remember
from meshwright.distributed.optimizer.step import watch_steps
from meshwright.distributed.process.world import warn_of_newer_releases
from meshwright.distributed.weights.constructed import Weights, materialise
from meshwright.introspection.facts import ModelFacts
from meshwright.introspection.signature import core_of
from meshwright.planning.experts import ExpertPlan
from meshwright.planning.float8 import Float8Plan
from meshwright.planning.layout import EXPERTS, REPLICAS, SHARDS
from meshwright.planning.plan import Plan
from meshwright.planning.tensor.plan import TensorPlan

from . import experts, float8, quantize
from .context import context_parallel
from .context import proof as context_proof
from .data import fully_sharded, replicated
from .mesh import get_expert_mesh, groups_of
from .pipeline import split as stages
from .recompute import recompute
from .step import objective
from .step.part import ModelPart
from .tensor import parallel as tensor_parallel
from .weights.audit import refuse_unequal
from .weights.shards import apply_to_tensors, move_buffers


@dataclass
class Site:
    """The surroundings of a plan's application: what a technique may need besides model and plan."""

    device_mesh: DeviceMesh | None
    facts: ModelFacts
    seed: int = 0
    draw_on: str | None = None
    """Device type on which initial weights are drawn; None: that of the weights."""
    weights: Weights | None = None
    """Source of the weights of a model on meta, instead of its initialiser."""


@dataclass(frozen=True)
class Applied:
    """The names of the techniques on a model, in the order of their application."""

    techniques: tuple[str, ...] = ()


@dataclass(frozen=True)
class Technique:
    """One row of the order: its name, whether a plan requests it, and how it is applied."""

    name: str
    wanted: Callable[[Plan, Site], bool]
    apply: Callable[[nn.Module, Plan, Site], nn.Module]
    shares: tuple[Axis, ...] = ()
    """Axes whose ranks share one model: they must bring the same weights."""


@dataclass(frozen=True)
class Joined:
    """Marks a model whose frozen token embedding takes part in backward."""


def freeze(model: nn.Module, plan: Plan) -> nn.Module:
    """Set ``requires_grad`` as planned. It runs before sharding, which reads it."""
    frozen = set(plan.frozen)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(clean(name) not in frozen)
    return model


def join_backward(model: nn.Module, plan: Plan, facts: ModelFacts) -> None:
    """Let a frozen token embedding's output take part in backward, where what makes images' features is trained.

    A batch without images would else need no gradient in front of its first trained block, and none at all where
    images' modules alone are trained: ranks would end their units' backward in other orders, and sum gradients of
    different weights, or have no backward while others wait.
    """
    frozen = {clean(name) for name, parameter in model.named_parameters() if not parameter.requires_grad}
    frozen |= set(plan.frozen)
    trains_images = any(facts.is_of_images(p.name) and p.name not in frozen for p in facts.parameters)
    find = getattr(core_of(model), "get_input_embeddings", None)
    embedding = find() if trains_images and find is not None else None
    if not isinstance(embedding, nn.Module) or recall(model, Joined) is not None:
        return

    def join(module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, Tensor) and torch.is_grad_enabled() and not output.requires_grad:
            return output.requires_grad_().clone()  # a model may write images' features into it
        return output

    embedding.register_forward_hook(join)
    remember(model, Joined())


def _fully_shard(model: nn.Module, plan: Plan, site: Site) -> nn.Module:
    sharded = fully_sharded.apply(model, plan, _mesh(site))
    if plan.data.idle:
        join_backward(sharded, plan, site.facts)
        fully_sharded.fill(sharded, plan, _mesh(site))
    return sharded


def _distribute_experts(model: nn.Module, plan: Plan, site: Site) -> nn.Module:
    if (mesh := get_expert_mesh(_mesh(site))) is None:
        raise ConfigError(
            "expert parallelism needs a mesh that was built for it: init_distributed(Layout(..., ep=...))"
        )
    return experts.apply(model, plan, mesh)


def _weights(model: nn.Module, plan: Plan, site: Site) -> nn.Module:
    device = current_device(CPU if plan.data.cpu_offload else plan.device)
    if site.facts.on_meta:
        ties = {alias: p.name for p in site.facts.parameters for alias in p.aliases}
        materialise(model, device, site.seed, ties, site.draw_on, site.weights)
        move_buffers(model, current_device(plan.device))  # FSDP2 brings only parameters from host memory
        return model
    if plan.data.technique != "fully_shard":
        apply_to_tensors(model, lambda tensor: tensor.to(device))
    return model


def _cast(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast what is real: ``Module.to`` would take the real part of complex weights, such as rotary angles."""
    apply_to_tensors(model, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)
    return model


ORDER: tuple[Technique, ...] = (
    Technique(
        "master_dtype",
        lambda plan, site: (
            not plan.precision.is_kept and any(p.dtype != plan.precision.master for p in site.facts.parameters)
        ),
        lambda model, plan, site: _cast(model, torch_dtype(plan.precision.master)),
    ),
    Technique("freeze", lambda plan, site: bool(plan.frozen), lambda model, plan, site: freeze(model, plan)),
    Technique(
        "float8",
        lambda plan, site: (
            plan.float8 is not None and bool(plan.float8.modules) and site.facts.applied_plan(Float8Plan) is None
        ),
        lambda model, plan, site: float8.apply(model, plan),
    ),
    Technique(
        "quantize",
        lambda plan, site: plan.quantize is not None and bool(plan.quantize.modules),
        lambda model, plan, site: quantize.apply(model, plan),
    ),
    Technique(
        "tensor_parallel",
        lambda plan, site: plan.tensor is not None,
        lambda model, plan, site: tensor_parallel.apply(model, plan, _mesh(site)[Axis.TP.value]),
        shares=(Axis.TP,),
    ),
    Technique("expert_parallel", lambda plan, site: plan.experts is not None, _distribute_experts, shares=EXPERTS),
    Technique(
        "context_parallel",
        lambda plan, site: plan.context is not None,
        lambda model, plan, site: context_parallel.apply(model, plan, _mesh(site)[Axis.CP.value], site.facts),
        shares=(Axis.CP,),
    ),
    Technique(
        "fused_loss", lambda plan, site: plan.loss is not None, lambda model, plan, site: objective.apply(model, plan)
    ),
    Technique(
        "activation_checkpoint",
        lambda plan, site: bool(plan.checkpointed),
        lambda model, plan, site: recompute.apply(model, plan),
    ),
    Technique(
        "compile",
        lambda plan, site: bool(plan.compiled),
        lambda model, plan, site: recompute.compile_blocks(model, plan),
    ),
    Technique(
        "fully_shard",
        lambda plan, site: plan.data.technique == "fully_shard",
        _fully_shard,
        shares=(*REPLICAS, *SHARDS),
    ),
    Technique("weights", lambda plan, site: True, _weights),
    Technique(
        "ddp",
        lambda plan, site: plan.data.technique == "ddp",
        lambda model, plan, site: replicated.apply(model, plan, _mesh(site)),
    ),
)
"""Freezing precedes sharding, which reads requires_grad.

Techniques that cut weights precede recomputation, so that a recomputed forward runs on the parts; recomputation lies
inside compilation inside sharding, so that a block's gathered parameters serve its recomputed forward too; weights
follow sharding, so that a rank makes only its share; DDP is last, since it copies the module that it wraps.
"""

NAMES = tuple(row.name for row in ORDER)


@without_collector()
def prove(facts: ModelFacts, plan: Plan, only: tuple[str, ...] = NAMES) -> dict[str, str]:
    """Rehearse on small copies what was only measured of a plan, cuts of rows, weights and stages. No communication.

    Cuts that are on the model, by its facts, are not proven again. Returns why some kinds of batches are refused where
    rows are cut (``context.proof.prove``).
    """
    if "tensor_parallel" in only and plan.tensor is not None and facts.applied_plan(TensorPlan) is None:
        tensor_parallel.prove(facts, plan.tensor, sums_at_once=plan.data.reduction == "mean")
    cuts_rows = "context_parallel" in only and plan.context is not None
    refused = context_proof.prove(facts, plan.context) if cuts_rows and plan.context is not None else {}
    if plan.pipeline is not None:
        stages.prove(facts, plan.pipeline, plan.size(Axis.TP))
    return refused


def apply(model: nn.Module, plan: Plan, site: Site, only: tuple[str, ...] = NAMES) -> nn.Module:
    """Apply the techniques that the plan requests, or ``only`` some, in order, and record them on the model."""
    warn_of_newer_releases()
    for row in ORDER:
        if row.name in only and row.wanted(plan, site):
            done = applied(model)
            if row.name != "weights":
                refuse_misorder(row.name, done, type(model).__name__)
            before, model = model, row.apply(model, plan, site)
            for module in (before, model):  # two where the technique wraps: neither may be laid out again
                remember(module, Applied((*done, row.name)))
            watch_steps()
    return model


def apply_brought(model: nn.Module, plan: Plan, site: Site, only: tuple[str, ...]) -> nn.Module:
    """Apply some techniques to a model that each rank brings, for the public doors.

    Raises:
        IntegrityError: ranks that are to shard or replicate one model bring different weights.
        ConfigError: see ``apply``.
    """
    shares = {axis for row in ORDER if row.name in only and row.wanted(plan, site) for axis in row.shares}
    if not site.facts.on_meta:
        groups = groups_of(site.device_mesh, *(axis for axis in WORLD_AXES if axis in shares))
        refuse_unequal(model, groups, site.facts.applied_plan(ExpertPlan))
    return apply(model, plan, site, only)


def lay_out(model: nn.Module, plan: Plan, site: Site, only: tuple[str, ...] = NAMES) -> list[ModelPart]:
    """Lay out this process's parts; a pipeline is cut first, so that techniques see a stage's part as a model."""
    if not site.facts.on_meta:
        refuse_unequal(model, groups_of(site.device_mesh, *WORLD_AXES))
    if site.facts.measurements.image_modules():  # asked here: of a model that is laid out no copy can be made
        join_backward(model, plan, site.facts)
    if plan.pipeline is None:
        return [ModelPart(apply(model, plan, site, only), plan, site.facts)]
    rank = _mesh(site).get_local_rank(Axis.PP.value)
    parts = stages.split(model, plan, site.facts, rank)
    for part in parts:
        part.module = apply(part.module, part.plan, replace(site, facts=part.facts), only)
    return [*parts]


def applied(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the techniques on the model, in the order of their application."""
    return (recall(model, Applied) or Applied()).techniques


def refuse_misorder(name: str, done: tuple[str, ...], kind: str) -> None:
    later = [
        other for other in done if other in NAMES and NAMES.index(other) >= NAMES.index(name) and other != "weights"
    ]
    if name in done:
        raise ConfigError(f"{name} is on this {kind} already; apply it once")
    if later:
        order = ", ".join(n for n in NAMES if n != "weights")
        raise ConfigError(
            f"{name} must come before {later[0]}, which is on this {kind} already. The order is: {order}."
        )


def _mesh(site: Site) -> DeviceMesh:
    if site.device_mesh is None:
        raise ConfigError(
            "data parallelism needs a device mesh, and none was given: start several processes, or pass one"
        )
    return site.device_mesh
