"""Count the tokens that each expert receives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.core.names import clean, owner
from meshwright.distributed.process import agree
from meshwright.introspection.structure.experts import Stack, asked_for, find_stacks
from meshwright.models.moe import Router, is_recomputing


@dataclass(frozen=True)
class LayerLoad:
    """The load of one layer's experts, over all ranks.

    Attributes:
        path: path of the experts' module.
        tokens: number of tokens that each expert received.
        dropped: number of choices that reached no expert: padding, and tokens beyond an expert's capacity.
        router_z: mean over the routed tokens of log²(Σ exp(logits)) of the layer's router; None unless the router is
            a ``models.moe.Router``.
    """

    path: str
    tokens: tuple[int, ...]
    dropped: int
    router_z: float | None = None

    @property
    def max_over_mean(self) -> float:
        """Largest over mean number of tokens: 1 for a balanced load, the number of experts if one receives all."""
        total = sum(self.tokens)
        return max(self.tokens) * len(self.tokens) / total if total else 1.0

    @property
    def entropy(self) -> float:
        """Entropy of the experts' shares of tokens, over its maximum: 1 if all are equal, 0 if one receives all."""
        shares = torch.tensor(self.tokens, dtype=torch.float64)
        shares = shares / shares.sum().clamp(min=1)
        return float(torch.special.entr(shares).sum()) / math.log(len(self.tokens))


class ExpertLoad:
    """Counts the tokens of every stack of experts of some modules, in training forwards."""

    def __init__(self, models: Sequence[nn.Module]):
        self._counts: dict[str, Tensor] = {}
        self._routers: dict[str, Router] = {}
        for model in models:
            beside = {owner(clean(raw)): module for raw, module in model.named_modules() if isinstance(module, Router)}
            self._routers |= {path: beside[owner(path)] for path in find_stacks(model) if owner(path) in beside}
            for path, stack in find_stacks(model).items():
                module = model.get_submodule(path)
                module.register_forward_pre_hook(self._hook(stack), with_kwargs=True, prepend=True)

    def _hook(self, stack: Stack) -> Any:
        @torch.compiler.disable
        def count(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            if not module.training or is_recomputing():
                return
            numbers = asked_for(stack, args, kwargs)
            if numbers is None:
                return
            index = numbers.flatten()
            before = self._counts.get(stack.path)
            if before is None:
                before = self._counts[stack.path] = torch.zeros(
                    stack.experts + 1, dtype=torch.int64, device=index.device
                )
            before.scatter_add_(0, index, torch.ones_like(index))

        return count

    def take(self, groups: Sequence[dist.ProcessGroup], pipeline: Sequence[dist.ProcessGroup]) -> list[LayerLoad]:
        """Return the counts since the last call, over all ranks. Collective.

        Args:
            groups: groups of the axes along which ranks hold other tokens.
            pipeline: groups of the axes along which ranks hold other layers.
        """
        found: list[LayerLoad] = []
        if self._counts:
            total = agree.total(torch.cat([*self._counts.values()]), list(groups))
            sizes = self._take_sizes(list(groups))
            for path, counts in zip(self._counts, total.split([len(c) for c in self._counts.values()]), strict=True):
                *tokens, dropped = counts.tolist()
                found.append(LayerLoad(path, tuple(tokens), dropped, sizes.get(path)))
                self._counts[path].zero_()
        if pipeline:
            found = list({load.path: load for loads in agree.everybody_says(found) for load in loads}.values())
        return found

    def _take_sizes(self, groups: list[dist.ProcessGroup]) -> dict[str, float]:
        """Return the mean ``router_z`` of each ``models.moe.Router``, by the path of its experts."""
        if not self._routers:
            return {}
        none = torch.zeros(2, dtype=torch.float64)
        sizes = agree.total(
            torch.stack([none if router.z is None else router.z.cpu() for router in self._routers.values()]), groups
        )
        for router in self._routers.values():
            router.z = None
        return {
            path: (size / tokens.clamp(min=1)).item() for path, (size, tokens) in zip(self._routers, sizes, strict=True)
        }
