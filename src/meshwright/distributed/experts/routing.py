"""Weight the router losses of a step, and update the router biases.

Both depend on counts over all data ranks and microbatches of the step: routed tokens, and tokens per expert.
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
    """List the routers in the order of the models' modules, which is the same on all ranks that hold them."""
    return [module for model in models for module in model.modules() if isinstance(module, Router)]


def count_routed(pieces: Sequence[Batch]) -> int:
    """Count the tokens that are not padding."""
    real = [(piece["tokens"], routed_tokens(piece)) for piece in pieces]
    return sum(tokens.numel() if mask is None else int(mask.sum()) for tokens, mask in real)


def routed_tokens(piece: Batch) -> Tensor | None:
    """Return (rows, seq) bool, False for padding by document_ids or an attention mask of the tokens' shape.

    Return None if the batch has neither.
    """
    documents, mask = piece.get("document_ids"), piece.get("attention_mask")
    real = None if documents is None else documents != PADDING
    if mask is None or mask.shape != piece["tokens"].shape:
        return real
    return mask.bool() if real is None else real & mask.bool()


class TakesShare(Protocol):
    """A module that adds to the step's loss a mean over its routed tokens."""

    loss_share: Tensor | None


def begin_step(routers: Sequence[TakesShare], tokens: int, device: torch.device, scale: float = 1.0) -> None:
    """Set the weight of one token's auxiliary loss, before the first forward of a step.

    The auxiliary losses become means over ``tokens``, the routed tokens on all data ranks, times ``scale``.
    """
    if routers:
        share = torch.full((), scale / max(tokens, 1), dtype=torch.float64, device=device)
        for router in routers:
            router.loss_share = share


def share_microbatches(routers: Sequence[Router], groups: Sequence[dist.ProcessGroup]) -> None:
    """Let losses per microbatch count the tokens of all ranks of ``groups``, which share a microbatch."""
    for router in routers if groups else ():
        router.everywhere = _Everywhere(groups)


class _Everywhere:
    """Sums counts over all groups.

    This is not a function with the groups bound to it: code compiled around its call would hold the groups forever.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup]):
        self._groups = list(groups)

    @uncompiled
    def __call__(self, counted: Tensor) -> Tensor:
        total = counted.sum(0, keepdim=True)
        return exchanged(sum_over, self._groups, total, into=total)


def sum_over(groups: Sequence[dist.ProcessGroup], counts: Tensor) -> Tensor:
    """Sum in place over the ranks of all groups."""
    for group in groups:
        dist.all_reduce(counts, group=group)
    return counts


def end_step(routers: Sequence[Router], groups: Sequence[dist.ProcessGroup], *, skipped: bool) -> None:
    """Update the biases by the tokens that each expert received since the last step, unless the step is skipped.

    Collective.

    Args:
        groups: groups of the axes along which ranks hold other tokens.
    """
    balanced = [router for router in routers if router.bias is not None]
    if balanced and not skipped:
        counts = sum_over(groups, torch.stack([_counts(router) for router in balanced]))
        for router, found in zip(balanced, counts, strict=True):
            router.balance(found)
    for router in routers:
        router.counts = None


def forget_step(routers: Sequence[Router]) -> None:
    """Discard the counts of a failed forward or backward: they belong to no step."""
    for router in routers:
        router.counts = None


def _counts(router: Router) -> Tensor:
    if router.counts is not None:
        return router.counts
    return torch.zeros(router.config.n_experts, dtype=torch.int64, device=router.weight.device)
