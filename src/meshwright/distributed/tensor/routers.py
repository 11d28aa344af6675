"""Routers where sequences are cut: each rank routes its own tokens, and what is about a whole sequence is summed over the ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.models.moe import Router

from .group import own_share
from .runtime import Runtime, wrap


def routers_of_parts(model: nn.Module, runtime: Runtime) -> None:
    """Wrap every router of the model. What fills up the last rank's part of a sequence is no token: it is not routed."""
    for module in model.modules():
        if isinstance(module, Router):
            module.across = runtime.group.sum
            wrap(module, lambda forward: _of_part(forward, runtime))


def _of_part(forward: Callable[..., Any], runtime: Runtime) -> Callable[..., Any]:
    def run(x: Tensor, routed: Tensor | None = None) -> Any:
        sequence = runtime.sequence
        if routed is None and sequence.filled:
            routed = torch.ones((len(x), sequence.length(x.shape[1])), dtype=torch.bool, device=x.device)
        return forward(x, None if routed is None else own_share(routed, sequence.group.rank, sequence.group.size))

    return run
