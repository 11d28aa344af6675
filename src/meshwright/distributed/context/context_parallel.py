"""Apply context parallelism: each rank computes a part of every row's tokens, and attention reaches the others'."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.core.record import recall
from meshwright.distributed.exchange.ranks import ProcessGroupRanks
from meshwright.distributed.recompute.random_streams import restore_streams, streams
from meshwright.distributed.weights.shards import seed_of
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
    separate_streams(model, ranks.rank)
    return model


def separate_streams(model: nn.Module, rank: int) -> None:
    """Give each rank a random stream of its own while a forward in training mode runs: it has other tokens.

    Outside of forwards all ranks of the axis draw alike, since they bring the same rows. A rank's own stream is a
    function of a number that all draw and of its rank, so there is no state besides torch's to be saved or restored.
    """
    shared: list[dict[str, Tensor]] = []

    def enter(*_: Any) -> None:
        if model.training and not shared:
            number = int(torch.randint(2**62, (1,)))
            shared.append(streams())
            torch.manual_seed(seed_of("context rank", number, rank))

    def leave(*_: Any) -> None:
        if shared:
            restore_streams(shared.pop())

    model.register_forward_pre_hook(enter)
    model.register_forward_hook(leave, always_call=True)


def runtime_of(model: nn.Module) -> ContextRuntime | None:
    """Return what context parallelism keeps on a model; None without it."""
    return recall(model, ContextRuntime)
