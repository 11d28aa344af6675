"""Define losses without mesh or averaging: cross entropy, pairs of answers, declarations of one's own."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

from .errors import ConfigError

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


def row_log_probs(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum the log-probabilities of each row's labels, computed in at least fp32: (rows,).

    Args:
        logits: (rows, seq, vocab).
        labels: (rows, seq) int64, already shifted; ``IGNORED`` ones do not count.
    """
    import torch
    import torch.nn.functional as F

    flat = logits.flatten(0, -2).to(torch.promote_types(logits.dtype, torch.float32))
    losses = F.cross_entropy(flat, labels.flatten(), ignore_index=IGNORED, reduction="none")
    return -losses.view(labels.shape).sum(1)


REDUCTIONS = ("sum", "mean")


@dataclass(frozen=True)
class Loss:
    """Declares a loss of one's own: a sum, or a mean and the number that it divides by.

    ``forward_backward`` divides the sum by the count of the whole step, on all ranks and in all microbatches. The
    declaration is checked on the first batch, by splitting it.

    Args:
        fn: (output, batch) -> 0-dim tensor. The output is that of the model's forward, as it is; the batch holds the
            tensors of one microbatch on the device of the computation. None: the loss that the forward itself returns.
        reduction: "sum", where the losses of rows add up; "mean", where ``fn`` divides by its microbatch's count.
        count: "labels": labels that are not -100; "rows": rows; another key of the batch: the sum of that tensor, such
            as weights; or a function (batch) -> number. "auto": "labels" where they are whole numbers, else "rows".
        weight: factor of this loss beside others.

    Raises:
        ConfigError: a value that is not legal.
    """

    fn: Callable[[Any, Mapping[str, Tensor]], Tensor] | None = None
    _: KW_ONLY
    reduction: str
    count: str | Callable[[Mapping[str, Tensor]], float | Tensor] = "auto"
    weight: float = 1.0

    def __post_init__(self) -> None:
        if self.fn is not None and not callable(self.fn):
            raise ConfigError(
                f"Loss(fn={self.fn!r}): fn is a function (output, batch) -> tensor, or None for the model's own loss"
            )
        if self.reduction not in REDUCTIONS:
            raise ConfigError(
                f"Loss(reduction={self.reduction!r}): the function returns a {' or a '.join(map(repr, REDUCTIONS))}"
            )
        if not (callable(self.count) or isinstance(self.count, str)):
            raise ConfigError(
                f"Loss(count={self.count!r}): count is 'auto', 'labels', 'rows', a key of the batch, or a function"
                f" (batch) -> number"
            )
        if not math.isfinite(self.weight):
            raise ConfigError(f"Loss(weight={self.weight}): a weight is a finite number")


@dataclass(frozen=True)
class PreferenceLoss:
    """The loss of direct preference optimisation (DPO, arXiv 2305.18290), as ``loss_fn`` of ``parallelize``.

    Rows 2i and 2i + 1 of a microbatch are the better and the worse answer to a prompt, whose labels are -100. A batch
    has ``reference_log_probs``, (rows,): what ``ParallelModel.row_log_probs`` gave for these rows before the first
    step. The loss of a step is the mean over all its pairs; a pair without a label does not count.

    Attributes:
        beta: how strongly the model is held to the reference, above 0.
        label_smoothing: the share of pairs that are taken to be the wrong way round (conservative DPO), below 0.5.

    Raises:
        ConfigError: a value is out of range.
    """

    beta: float = 0.1
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.beta < math.inf or not 0 <= self.label_smoothing < 0.5:
            raise ConfigError(
                f"PreferenceLoss(beta={self.beta}, label_smoothing={self.label_smoothing}): beta must be above 0, and"
                f" label_smoothing 0 or more and below 0.5"
            )

    def __call__(self, log_probs: Tensor, reference: Tensor, labels: Tensor) -> Tensor:
        """Sum the losses of all pairs that have a label, by ``row_log_probs`` (rows,) of model and reference; 0-dim."""
        import torch.nn.functional as F

        gain = (log_probs - reference.to(log_probs.dtype)).view(-1, 2)
        margin = self.beta * (gain[:, 0] - gain[:, 1])
        losses = -F.logsigmoid(margin)
        if self.label_smoothing:
            losses = (1 - self.label_smoothing) * losses - self.label_smoothing * F.logsigmoid(-margin)
        return (losses * have_labels(labels)).sum()


def have_labels(labels: Tensor) -> Tensor:
    """Return (pairs,) bool: whether any label of two successive rows counts."""
    return (labels != IGNORED).view(len(labels) // 2, -1).any(1)
