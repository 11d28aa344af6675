"""Weigh routers' losses in a step, and move routers' biases.

Both follow from numbers of the whole step, over all data ranks and microbatches: tokens that are routed, and tokens
per expert.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.core.losses import PADDING
from meshwright.core.torch_private import uncompiled
from meshwright.distributed.recompute.kept import exchanged
from meshwright.distributed.step.part import Batch
from meshwright.models.moe import Router


def routers_of(models: Iterable[nn.Module]) -> list[Router]:
    """List the routers in the order of the models' modules, alike on all ranks that have them."""
    return [module for model in models for module in model.modules() if isinstance(module, Router)]


def count_routed(pieces: Sequence[Batch]) -> int:
    """Tokens that are not padding."""
    real = [(piece["tokens"], routed_tokens(piece)) for piece in pieces]
    return sum(tokens.numel() if mask is None else int(mask.sum()) for tokens, mask in real)


def routed_tokens(piece: Batch) -> Tensor | None:
    """Return (rows, seq) bool, False for padding, by document_ids and by a mask of the batch's shape.

    None where all are tokens.
    """
    documents, mask = piece.get("document_ids"), piece.get("attention_mask")
    real = None if documents is None else documents != PADDING
    if mask is None or mask.shape != piece["tokens"].shape:
        return real
    return mask.bool() if real is None else real & mask.bool()


class TakesShare(Protocol):
    """Who adds to a step's loss what is a mean over its routed tokens."""

    loss_share: Tensor | None


def begin_step(routers: Sequence[TakesShare], tokens: int, device: torch.device, scale: float = 1.0) -> None:
    """A forward and backward begins, of ``tokens`` routed tokens on all data ranks: auxiliary losses are means over
    them, times ``scale``.
    """
    if routers:
        share = torch.full((), scale / max(tokens, 1), dtype=torch.float64, device=device)
        for router in routers:
            router.loss_share = share


def share_microbatches(routers: Sequence[Router], groups: Sequence[dist.ProcessGroup]) -> None:
    """Losses per microbatch count the tokens of all ranks of ``groups``, which compute one together."""
    for router in routers if groups else ():
        router.everywhere = _Everywhere(groups)


class _Everywhere:
    """The sum over all groups.

    Not a function with the groups bound to it: what is compiled around its call would keep them for good.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup]):
        self._groups = list(groups)

    @uncompiled
    def __call__(self, counted: Tensor) -> Tensor:
        total = counted.sum(0, keepdim=True)
        return exchanged(lambda: sum_over(self._groups, total), into=total)


def sum_over(groups: Sequence[dist.ProcessGroup], counts: Tensor) -> Tensor:
    """Sum in place over the ranks of all groups."""
    for group in groups:
        dist.all_reduce(counts, group=group)
    return counts


def end_step(routers: Sequence[Router], groups: Sequence[dist.ProcessGroup], *, skipped: bool) -> None:
    """Move the biases by the tokens that each expert was given since the last step; not where the step is skipped.

    Collective.

    Args:
        groups: of the axes along which ranks have other tokens.
    """
    balanced = [router for router in routers if router.bias is not None]
    if balanced and not skipped:
        counts = sum_over(groups, torch.stack([_counts(router) for router in balanced]))
        for router, found in zip(balanced, counts, strict=True):
            router.balance(found)
    for router in routers:
        router.counts = None


def forget_step(routers: Sequence[Router]) -> None:
    """A forward and backward failed: what it counted is no part of a step."""
    for router in routers:
        router.counts = None


def _counts(router: Router) -> Tensor:
    if router.counts is not None:
        return router.counts
    return torch.zeros(router.config.n_experts, dtype=torch.int64, device=router.weight.device)
