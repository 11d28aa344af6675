"""Apply context parallelism: each rank computes a part of every row's tokens, and attention reaches the others'."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.core.dtypes import torch_dtype
from meshwright.core.record import recall, remember
from meshwright.core.torch_private import uncompiled
from meshwright.distributed.exchange.ranks import ProcessGroupRanks, RankGroup
from meshwright.distributed.recompute.random_streams import drawn_number, restore_streams, streams
from meshwright.distributed.weights.shards import seed_of
from meshwright.introspection.facts import ModelFacts
from meshwright.models.moe import Router
from meshwright.planning.plan import Plan

from .positions import refuse_other_rows
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
        rows=partial(refuse_other_rows, context.mixing),
    )
    wrap_modules(model, context, ranks, checks, _without_values(facts, plan) if context.has_pairs else None)
    separate_streams(model, ranks.rank)
    _count_whole_rows(model, ranks)
    remember(model, context)
    return model


def _without_values(facts: ModelFacts, plan: Plan) -> nn.Module:
    """Return a copy of the model on meta that computes in the planned dtype."""
    made = facts.measurements.without_values()
    return made.to(torch_dtype(plan.precision.compute)) if plan.precision.casts else made


def _count_whole_rows(model: nn.Module, ranks: RankGroup) -> None:
    """Let routers' losses per sequence count the tokens of all ranks, beside those of other parts on a tensor axis."""
    for module in model.modules():
        if isinstance(module, Router) and module.config.sequence_loss:
            module.across = _OverRows(ranks, module.across)


class _OverRows:
    """Sums counts over ranks with other tokens of the same rows.

    This is not a function with the ranks bound to it: code compiled around its call would hold their group forever.
    """

    def __init__(self, ranks: RankGroup, before: Callable[[Tensor], Tensor] | None):
        self._ranks, self._before = ranks, before

    @uncompiled
    def __call__(self, counted: Tensor) -> Tensor:
        return self._ranks.sum(counted if self._before is None else self._before(counted))


def separate_streams(model: nn.Module, rank: int) -> None:
    """Give each rank a random stream of its own while a forward in training mode runs: it has other tokens.

    Outside of forwards all ranks of the axis draw alike, since they bring the same rows. A rank's own stream is a
    function of a number that all draw and of its rank, so there is no state besides torch's to be saved or restored.
    """
    shared: list[dict[str, Tensor]] = []

    def enter(*_: Any) -> None:
        if model.training and not shared:
            number = drawn_number()
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
