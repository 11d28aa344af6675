"""Apply context parallelism: each rank computes a part of every row's tokens, and attention reaches the others'."""

from __future__ import annotations

from functools import partial

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.core.record import recall, remember
from meshwright.distributed.exchange.ranks import ProcessGroupRanks
from meshwright.introspection.facts import ModelFacts
from meshwright.planning.plan import Plan

from .rehearsal import PADDED, WITHOUT_POSITIONS, refuse, refuse_length
from .runtime import Checks, ContextRuntime, wrap_modules


def apply(model: nn.Module, plan: Plan, mesh: DeviceMesh, facts: ModelFacts) -> nn.Module:
    """Intercept the calls of attention that the plan names, for rows cut over a mesh axis."""
    assert plan.context is not None
    ranks, context = ProcessGroupRanks(mesh.get_group()), plan.context
    checks = Checks(
        padding=partial(refuse, facts, context, *PADDED),
        positions=partial(refuse, facts, context, WITHOUT_POSITIONS),
        length=partial(refuse_length, facts, context),
    )
    wrap_modules(model, context, ranks, checks)
    remember(model, context)
    return model


def runtime_of(model: nn.Module) -> ContextRuntime | None:
    """Return what context parallelism keeps on a model; None without it."""
    return recall(model, ContextRuntime)
