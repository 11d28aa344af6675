"""Lay a model out for a loop that calls it and its losses' backward: gradients are averaged over data ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from meshwright.core.axes import Axis
from meshwright.core.errors import ConfigError, UnsupportedError
from meshwright.distributed import order
from meshwright.distributed.doors.lay_out import lay_out_module
from meshwright.distributed.mesh import axis_sizes, plan_sizes
from meshwright.distributed.parallel_model import ParallelModel
from meshwright.distributed.step.part import ModelPart
from meshwright.introspection.facts import model_facts
from meshwright.planning.build import plan_for_mesh_sizes
from meshwright.planning.techniques import Techniques


def lay_out_averaged(
    module: nn.Module, mesh: Any, device: str, techniques: Techniques, *, door: str, seed: int = 0
) -> ParallelModel:
    """Lay a module out by the whole order, in place, with torch's averaging of gradients.

    The loop calls ``result.module``. A rank's loss is the mean over its own rows; each gradient is complete when
    backward ends: the mean over data ranks of the gradients of their losses, as DDP and FSDP have it.

    Args:
        mesh: None in one process.
        door: name of the public call, which begins each line of the log.

    Returns:
        The model, for names and checkpoints; its ``forward_backward`` is not for this loop.

    Raises:
        UnsupportedError: stages, or parts of rows, which a loop of whole batches does not know.
        ConfigError: a loss that must be scaled, adapters, or what the rules refuse.
    """
    for axis, instead in ((Axis.PP, "parallelize(...)"), (Axis.CP, "context_parallel_rows in a loop of torch")):
        if axis_sizes(mesh).get(axis.value, 1) > 1:
            raise UnsupportedError(
                f"{door}: layout.{axis.value} = {axis_sizes(mesh)[axis.value]} gives each rank a part of the model's"
                f" forward, and this loop calls it whole: use {instead}, or set layout.{axis.value} = 1"
            )
    if techniques.adapters is not None:
        raise ConfigError(f"{door}: techniques.adapters is for parallelize: put adapters beside the layers by peft")
    facts = model_facts(module)
    precision = techniques.precision
    if precision.compute == "auto":  # as the tool does: in the model's dtype, also on an accelerator
        own = facts.parameters[0].dtype if precision.master == "auto" else precision.master
        techniques = replace(techniques, precision=replace(precision, compute=own))
    plan = plan_for_mesh_sizes(facts, plan_sizes(mesh), device, techniques, "mean")
    if plan.precision.loss_scale:
        raise ConfigError(
            f"{door}: techniques.precision.compute = float16 needs a loss that is scaled, and this loop scales none:"
            f" set bfloat16, or use parallelize(...)"
        )
    made = lay_out_module(module, facts, plan, mesh, order.NAMES, door=door, seed=seed)
    return ParallelModel([ModelPart(made, plan, facts)], plan, facts, mesh)
