"""Count how tokens spread over experts, where experts are given them."""

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
        path: of their module.
        tokens: that each expert was given.
        dropped: choices that came to nothing: padding, and what was over an expert's capacity.
        router_z: mean over the routed tokens of log²(Σ exp(logits)) of the layer's router; None where that is none of
            ours.
    """

    path: str
    tokens: tuple[int, ...]
    dropped: int
    router_z: float | None = None

    @property
    def max_over_mean(self) -> float:
        """1 where experts are given equally many, and their number where one is given all."""
        total = sum(self.tokens)
        return max(self.tokens) * len(self.tokens) / total if total else 1.0

    @property
    def entropy(self) -> float:
        """Of the shares of tokens, as a part of that of equal shares: 1 where they are, 0 where one expert is given
        all.
        """
        shares = torch.tensor(self.tokens, dtype=torch.float64)
        shares = shares / shares.sum().clamp(min=1)
        return float(torch.special.entr(shares).sum()) / math.log(len(self.tokens))


class ExpertLoad:
    """Counts, in training forwards, for every stack of experts of some modules."""

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
        """Return what was counted since the last time, on all ranks. Collective.

        Args:
            groups: of the axes along which ranks have other tokens.
            pipeline: of those along which they have other layers.
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
            found = list({load.path: load for said in agree.everybody_says(found) for load in said}.values())
        return found

    def _take_sizes(self, groups: list[dist.ProcessGroup]) -> dict[str, float]:
        """Return the size of our own routers' logits, by the path of their experts."""
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
