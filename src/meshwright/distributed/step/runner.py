"""Choose the runner that a plan needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch.distributed.device_mesh import DeviceMesh

from meshwright.distributed.experts.router_loss import SharedRouterLoss
from meshwright.distributed.loss.declared import DeclaredLosses
from meshwright.distributed.loss.preference import CountedPairs
from meshwright.distributed.pipeline.run import Pipeline
from meshwright.distributed.pipeline.split import StagePart
from meshwright.planning.plan import Plan

from .objective import LossFunction
from .part import Batch, Inputs, ModelPart, Runner
from .whole_model import WholeModel


def runner_of(
    parts: Sequence[ModelPart],
    plan: Plan,
    mesh: DeviceMesh | None,
    loss_fn: LossFunction | CountedPairs | DeclaredLosses | None,
    inputs: Inputs,
    device: torch.device,
    router_loss: SharedRouterLoss | None,
    enter: Callable[[Batch], None],
) -> Runner:
    """Return the runner of a plan.

    Args:
        enter: called before a microbatch's backward, in which forwards may be recomputed.
    """
    if plan.pipeline is None:
        return WholeModel(parts[0], loss_fn, inputs, device, router_loss)
    assert mesh is not None
    return Pipeline(cast("Sequence[StagePart]", parts), plan, mesh, loss_fn, inputs, device, enter)
