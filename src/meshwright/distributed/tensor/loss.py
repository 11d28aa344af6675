"""Compute the loss of a vocabulary-parallel head, and of a head whose logits are never whole.

The vocabulary-parallel cross entropy is Megatron-LM's (arXiv 1909.08053): each rank has the logits of its part of the
vocabulary, and sends maxima and sums of exponentials instead of logits. The fused head computes logits, loss and
gradients chunk by chunk in the forward, as Cut Cross-Entropy (arXiv 2411.09009) and Liger (arXiv 2410.10989) do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.core.losses import IGNORED
from meshwright.distributed.exchange import RankGroup


@dataclass(frozen=True)
class VocabularyShard:
    """One rank's part of a vocabulary of ``whole`` token ids: ``size`` of them from ``first`` on.

    ``group``: the ranks that share the vocabulary; None: one process has all of it.
    """

    first: int
    size: int
    whole: int
    group: RankGroup | None = None

    @classmethod
    def of(cls, whole: int, group: RankGroup | None) -> VocabularyShard:
        """Return this rank's chunk of a vocabulary of ``whole`` token ids, cut as ``torch.chunk`` does."""
        if group is None:
            return cls(0, whole, whole)
        share = -(-whole // group.size)
        first = min(group.rank * share, whole)
        return cls(first, min(share, whole - first), whole, group)


def vocabulary_parallel_cross_entropy_sum(
    logits: Tensor, labels: Tensor, shard: VocabularyShard, *, weights: Tensor | None = None
) -> Tensor:
    """Sum the cross entropies of all tokens with a label, in nats and at least fp32; 0-dim, equal on every rank.

    Two small all-reduces are sent: each token's largest logit; its sum of exponentials, with the label's logit.

    Args:
        logits: (..., shard.size) of this rank's ids. Their gradient is this rank's part of the whole one.
        labels: (...) int64, ``IGNORED`` where there is no loss. The loss of an id outside the vocabulary is NaN.
        weights: (...) floats by which the tokens' losses are multiplied.
    """
    return _CrossEntropy.apply(logits, labels, shard, weights, False)


def vocabulary_parallel_row_log_probs(logits: Tensor, labels: Tensor, shard: VocabularyShard) -> Tensor:
    """Sum log-probabilities of labels (rows, seq) by row from a shard of logits, as ``row_log_probs`` does of all."""
    return -_CrossEntropy.apply(logits, labels, shard, None, True).view(labels.shape).sum(1)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, shard: VocabularyShard, weights: Tensor | None, by_token: bool
    ) -> Tensor:
        rows, flat = logits.flatten(0, -2), labels.flatten()
        is_real = flat != IGNORED
        local = flat - shard.first
        is_here = is_real & (local >= 0) & (local < shard.size)
        place = torch.where(is_here, local, 0).unsqueeze(1)

        top = rows.amax(1) if shard.size else rows.new_full((len(rows),), -torch.inf)
        top = top.to(torch.promote_types(logits.dtype, torch.float32))
        top = top if shard.group is None else shard.group.largest(top)
        shifted = rows - top.unsqueeze(1)  # in the dtype of the largest: one wide copy of the logits, until the end
        target = shifted.gather(1, place).squeeze(1) * is_here if shard.size else torch.zeros_like(top)
        exponentials = shifted.exp_()
        sums = torch.stack([exponentials.sum(1), target])
        sums = sums if shard.group is None else shard.group.sum(sums)

        losses = sums[0].log() - sums[1]
        # no rank has such an id: a loss of nothing would be silent
        losses = torch.where(is_real & ((flat < 0) | (flat >= shard.whole)), torch.nan, losses)
        ctx.shard, ctx.shape, ctx.dtype = shard, logits.shape, logits.dtype
        softmax = exponentials.div_(sums[0].unsqueeze(1))
        counts = is_real.to(losses.dtype) if weights is None else is_real * weights.flatten().to(losses.dtype)
        ctx.save_for_backward(softmax, place, is_here, counts)
        each = torch.where(is_real, losses, 0.0) * counts
        return each if by_token else each.sum()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor):
        (grad_output,) = grad_outputs
        softmax, place, is_here, counts = ctx.saved_tensors
        each = (counts * grad_output).unsqueeze(1)
        gradient = softmax * each
        if ctx.shard.size:
            gradient.scatter_add_(1, place, -(each * is_here.unsqueeze(1)))
        return gradient.to(ctx.dtype).view(ctx.shape), None, None, None, None


LossOfLogits = Callable[[Tensor, slice], Tensor]
"""Type of a loss: (logits (n, own vocabulary), which n of all tokens) → 0-dim sum over real tokens.

It includes what the model does between its head and its logits.
"""


def head_loss_sum(
    hidden: Tensor, weight: Tensor, loss: LossOfLogits, *, bias: Tensor | None = None, chunks: int = 8
) -> Tensor:
    """Sum ``loss`` of ``hidden @ weight.T + bias`` over chunks of tokens.

    At most 1/chunks of the logits exist at a time. Gradients are computed with the loss, chunk by chunk, and stored
    until the backward asks for them.

    Args:
        hidden: (..., dim).
        weight: (vocabulary, dim), or a rank's part of it; its gradient is added up in at least fp32.

    Returns:
        0-dim, in at least fp32. The gradient of ``hidden`` covers only the given part of the vocabulary: a caller with
        a part sums it over the ranks.
    """
    if not torch.is_grad_enabled():  # which a Function is not told
        hidden, weight, bias = hidden.detach(), weight.detach(), None if bias is None else bias.detach()
    return _HeadLoss.apply(hidden, weight, bias, loss, chunks)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, loss: LossOfLogits, chunks: int
    ) -> Tensor:
        needs = ctx.needs_input_grad[:3]
        flat = hidden.detach().flatten(0, -2)
        wide = torch.promote_types(weight.dtype, torch.float32)
        total = torch.zeros((), dtype=wide, device=hidden.device)
        grad_hidden = torch.empty_like(flat) if needs[0] else None
        grad_weight = torch.zeros(weight.shape, dtype=wide, device=weight.device) if needs[1] else None
        grad_bias = torch.zeros(bias.shape, dtype=wide, device=bias.device) if bias is not None and needs[2] else None
        fixed_weight, fixed_bias = weight.detach(), None if bias is None else bias.detach()
        size = max(1, -(-len(flat) // chunks))
        for start in range(0, len(flat), size):
            piece = flat[start : start + size]
            logits = F.linear(piece, fixed_weight, fixed_bias).requires_grad_(any(needs))
            with torch.enable_grad():
                part = loss(logits, slice(start, min(start + size, len(flat))))
            total += part.detach()
            if not any(needs):
                continue
            (slope,) = torch.autograd.grad(part, logits)
            if grad_hidden is not None:
                torch.mm(slope, fixed_weight, out=grad_hidden[start : start + size])
            if grad_weight is not None:
                grad_weight += slope.T @ piece
            if grad_bias is not None:
                grad_bias += slope.sum(0, dtype=wide)
        kept = ((grad_hidden, hidden), (grad_weight, weight), (grad_bias, bias))
        ctx.gradients = [g if g is None or like is None else g.to(like.dtype) for g, like in kept]
        ctx.shape = hidden.shape
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor):
        (grad_output,) = grad_outputs
        if ctx.gradients is None:
            raise RuntimeError("the gradients of a fused head and loss are used up by their first backward")
        grad_hidden, grad_weight, grad_bias = (
            g if g is None else g.mul_(grad_output.to(g.dtype)) for g in ctx.gradients
        )
        ctx.gradients = None
        grad_hidden = None if grad_hidden is None else grad_hidden.view(ctx.shape)
        return grad_hidden, grad_weight, grad_bias, None, None
