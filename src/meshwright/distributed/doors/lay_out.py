"""Lay a module out by a plan: all doors of other systems enter the engine here."""

from __future__ import annotations

import logging

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.distributed import order
from meshwright.distributed.tensor.rehearsal import prove
from meshwright.introspection.facts import ModelFacts
from meshwright.planning.plan import Plan
from meshwright.planning.tensor.plan import TensorPlan

from .stage_module import PipelineStageModule

log = logging.getLogger("meshwright")


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
    for note in plan.notes:
        log.info("%s: %s", door, note)
    site = order.Site(device_mesh, facts, seed)
    return (order.apply if takes_any_weights else order.apply_brought)(model, plan, site, rows)


def _is_proven(facts: ModelFacts, plan: Plan) -> bool:
    """Return whether the plan cuts nothing new; a stage's plan is proven where it is made, on the whole model."""
    is_stage = isinstance(facts.module, PipelineStageModule) and facts.module.num_stages > 1
    return plan.tensor is None or facts.applied_plan(TensorPlan) is not None or is_stage
