"""Lay a module out by a plan: all doors of other systems enter the engine here."""

from __future__ import annotations

import logging

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.core.errors import ConfigError, UnsupportedError
from meshwright.distributed import order
from meshwright.distributed.context.own_rows import warn_of_whole_rows
from meshwright.distributed.context.rehearsal import keep_for_batches
from meshwright.distributed.context.rehearsal import prove as prove_context
from meshwright.distributed.mesh import context_ranks
from meshwright.distributed.tensor.rehearsal import prove
from meshwright.introspection.facts import ModelFacts
from meshwright.planning.context.plan import ContextPlan
from meshwright.planning.plan import Plan
from meshwright.planning.tensor.plan import TensorPlan

from .stage_module import PipelineStageModule

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
        takes_any_weights: whether ranks may bring different weights, which the door equalises itself; else they are
            refused.

    Raises:
        ConfigError: a technique is on the model already, or one that must come later is.
        IntegrityError: ranks that shard or replicate a model bring different weights.
        UnsupportedError: the layout's results differ from those of one process.
    """
    if "tensor_parallel" in rows and not _is_proven(facts, plan):
        assert plan.tensor is not None
        prove(facts, plan.tensor, sums_at_once=True)
    if context_ranks(device_mesh) > 1:
        _measure_rows(facts)
    if CONTEXT in rows and plan.context is not None:
        keep_for_batches(facts, plan.context, prove_context(facts, plan.context))
    for note in plan.notes:
        log.info("%s: %s", door, note)
    if CONTEXT in rows and plan.context is not None:
        warn_of_whole_rows(model)
    site = order.Site(device_mesh, facts, seed)
    return (order.apply if takes_any_weights else order.apply_brought)(model, plan, site, rows)


def _measure_rows(facts: ModelFacts) -> None:
    """Measure how tokens of a row see each other, before a model is changed that cannot be copied afterwards."""
    if isinstance(stage := facts.module, PipelineStageModule) and stage.num_stages > 1:
        raise UnsupportedError(
            f"stage {stage.stage_id} of {stage.num_stages} on a mesh with cp > 1: stages behind the first would not"
            f" know which tokens of a row they have. Use parallelize(), or make the mesh with cp = 1."
        )
    if facts.applied_plan(ContextPlan) is None:
        facts.measurements.mixing()
        facts.measurements.sample()  # a model that is laid out cannot be copied any more


def rows_that_cut(model: nn.Module, device_mesh: DeviceMesh | None) -> tuple[str, ...]:
    """Name the technique that a door applies first where the mesh cuts rows and nothing on the model does.

    Raises:
        ConfigError: a technique is on the model behind which rows cannot be cut any more.
    """
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


def _is_proven(facts: ModelFacts, plan: Plan) -> bool:
    """Return whether the plan cuts nothing new; a stage's plan is proven where it is made, on the whole model."""
    is_stage = isinstance(facts.module, PipelineStageModule) and facts.module.num_stages > 1
    return plan.tensor is None or facts.applied_plan(TensorPlan) is not None or is_stage
