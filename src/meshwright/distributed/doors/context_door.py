"""Apply context parallelism for a training loop of the user's own, by a function and by a registered transform."""

from __future__ import annotations

import logging
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.core.axes import Axis
from meshwright.distributed import order
from meshwright.distributed.mesh import axis_sizes, context_ranks, known_mesh
from meshwright.introspection.facts import ModelFacts, model_facts
from meshwright.planning.build import plan_for_mesh_sizes
from meshwright.planning.context.methods import Auto, Kind
from meshwright.planning.plan import Plan
from meshwright.planning.techniques import Techniques
from meshwright.planning.tensor.plan import TensorPlan

from .builtin_transforms import PlannedTransform, mesh_of_world
from .lay_out import CONTEXT, lay_out_module
from .transform_options import ContextParallelTransformConfig
from .transform_registry import register_model_transform

log = logging.getLogger("meshwright")


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
    device_mesh = known_mesh(device_mesh)
    if context_ranks(device_mesh) == 1:
        log.info(
            "apply_context_parallel: the mesh %s has no cp axis larger than 1, so rows stay whole",
            axis_sizes(device_mesh),
        )
        return model
    order.refuse_misorder(CONTEXT, order.applied(model), type(model).__name__)
    facts = model_facts(model)
    plan = rows_plan(facts, device_mesh, method)
    return lay_out_module(model, facts, plan, device_mesh, (CONTEXT,), door="apply_context_parallel")


@register_model_transform(CONTEXT, ContextParallelTransformConfig)
class ContextParallelTransform(PlannedTransform):
    """Attention that reaches the tokens of other ranks; a loop cuts rows by ``context_parallel_rows``."""

    rows = (CONTEXT,)

    def plan(self, facts: ModelFacts, device_mesh: DeviceMesh | None) -> Plan:
        if context_ranks(device_mesh) == 1:
            log.info("context_parallel: the mesh %s has no cp axis larger than 1", axis_sizes(device_mesh))
        return rows_plan(facts, device_mesh, self.config.method)

    def device_mesh(self) -> DeviceMesh | None:
        given = super().device_mesh()
        return mesh_of_world(self.context["layout"]) if given is None and self.context.get("layout") else given


def rows_plan(facts: ModelFacts, device_mesh: DeviceMesh | None, method: Any) -> Plan:
    """Plan how rows are cut over the context axis alone, beside a tensor axis that cuts the model already."""
    axes = (Axis.CP, Axis.TP) if facts.applied_plan(TensorPlan) is not None else (Axis.CP,)
    sizes = {axis.value: axis_sizes(device_mesh).get(axis.value, 1) for axis in axes}
    device = device_mesh.device_type if device_mesh is not None else "cpu"
    # parameters stay as they are, whoever shards or replicates them later
    method = method if sizes[Axis.CP.value] > 1 else "auto"
    requested = Techniques(context_parallel_method=method, zero_stage=0)
    return plan_for_mesh_sizes(facts, sizes, device, requested, "mean")
