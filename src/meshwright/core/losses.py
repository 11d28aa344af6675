"""Compute a plain loss, without mesh or averaging."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

IGNORED = -100
"""The label of a token that has no loss."""

PADDING = -1
"""The document id of a token that belongs to no document."""


def cross_entropy_sum(logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
    """Sum the cross entropies, in nats, of all tokens whose label is not ``IGNORED``, computed in at least fp32.

    Args:
        logits: (rows, seq, vocab).
        labels: (rows, seq) int64, already shifted.
        weights: (rows, seq) floats by which the tokens' losses are multiplied.
    """
    import torch
    import torch.nn.functional as F

    wide = torch.promote_types(logits.dtype, torch.float32)
    flat, targets = logits.flatten(0, -2).to(wide), labels.flatten()
    if weights is None:
        return F.cross_entropy(flat, targets, ignore_index=IGNORED, reduction="sum")
    return (F.cross_entropy(flat, targets, ignore_index=IGNORED, reduction="none") * weights.flatten().to(wide)).sum()
