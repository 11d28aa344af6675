"""Compute the loss of pairs of rows, check their batches, and refuse the layouts on which there is no such loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.core.axes import Axis
from meshwright.core.devices import to_device
from meshwright.core.errors import ConfigError, UnsupportedError
from meshwright.core.losses import PreferenceLoss, have_labels, row_log_probs
from meshwright.distributed.step.batch import Batch, labels_of
from meshwright.distributed.tensor.loss import vocabulary_parallel_row_log_probs
from meshwright.introspection.signature import REFERENCE
from meshwright.planning.plan import Plan

from .logits import LogitsOfRank


class PreferenceObjective:
    """A function for the summed loss of a microbatch's pairs, from logits or from this rank's part of them.

    Args:
        model: the model as it was laid out (without a wrapper).
    """

    def __init__(self, model: nn.Module, plan: Plan, loss: PreferenceLoss):
        self.loss, self._logits = loss, LogitsOfRank(model, plan, in_parts=True)

    def targets(self, piece: Batch, device: torch.device) -> tuple[Any, ...]:
        """Return labels, and the rows' log-probabilities under the reference, on the device of the computation."""
        return to_device(labels_of(piece), device), to_device(piece[REFERENCE], device)

    def __call__(self, forward: Callable[[], Any], labels: Tensor, reference: Tensor) -> Tensor:
        logits, shard = self._logits(forward), self._logits.shard
        if shard is None:
            return self.loss(row_log_probs(logits, labels), reference, labels)
        return self.loss(vocabulary_parallel_row_log_probs(logits, labels, shard), reference, labels)


def refuse(loss_fn: object, plan: Plan) -> None:
    """Refuse pairs beside other losses, and plans on which nobody has the sum over an answer before its gradients.

    Raises:
        ConfigError: a ``PreferenceLoss`` stands among losses by name.
        UnsupportedError: the plan cuts rows, or its head computes the loss of some tokens at a time.
    """
    if isinstance(loss_fn, Mapping):
        name = next((name for name, loss in loss_fn.items() if isinstance(loss, PreferenceLoss)), None)
        if name is not None:
            raise ConfigError(
                f"loss_fn['{name}'] is a PreferenceLoss, which counts pairs of rows, and other losses by name count"
                f" tokens or rows: give it alone, loss_fn=PreferenceLoss(...)"
            )
    if not isinstance(loss_fn, PreferenceLoss):
        return
    if plan.size(Axis.CP) > 1:
        raise UnsupportedError(
            f"PreferenceLoss adds up the log-probabilities of whole rows, and layout.cp = {plan.size(Axis.CP)} cuts"
            f" rows over ranks: set layout.cp = 1 (layout.tp or layout.dp_shard save memory too)"
        )
    if plan.loss is not None:
        raise UnsupportedError(
            f"techniques.loss_chunks = {plan.loss.chunks} computes a loss with its gradients in chunks of tokens, and"
            f" PreferenceLoss needs whole answers before any gradient: set techniques.loss_chunks = 1"
        )


def without_reference(batch: Batch) -> Batch:
    """Return a microbatch without its rows' log-probabilities under the reference, once pairs and these are checked.

    Raises:
        ConfigError: there are no rows of tokens, half a pair, or no finite log-probability for each row.
    """
    tokens, found = batch.get("tokens"), batch.get(REFERENCE)
    if not isinstance(tokens, Tensor) or not tokens.dim():
        raise ConfigError(f"PreferenceLoss compares rows of 'tokens' (rows, seq), and the batch has {sorted(batch)}")
    labels, rows = batch.get("labels"), len(tokens)
    if isinstance(labels, Tensor) and (labels.dim() != 2 or len(labels) != rows):
        raise ConfigError(
            f"batch['labels'] has shape {tuple(labels.shape)}, and PreferenceLoss adds up log-probabilities of labels"
            f" (rows, seq) of {rows} rows"
        )
    if rows % 2:
        raise ConfigError(
            f"PreferenceLoss compares each two rows, and a microbatch has {rows}: bring whole pairs, and set"
            f" microbatch_rows (batch.microbatch) to an even number"
        )
    if not isinstance(found, Tensor):
        raise ConfigError(
            f"the batch has no '{REFERENCE}' ({rows},), which PreferenceLoss compares with: what row_log_probs(batch)"
            f" gave for them before the first step"
        )
    if found.shape != (rows,) or not found.is_floating_point() or not bool(found.isfinite().all()):
        raise ConfigError(
            f"batch['{REFERENCE}'] has shape {tuple(found.shape)} and holds {found.dtype}; it must hold a finite"
            f" log-probability for each of {rows} rows"
        )
    return {key: value for key, value in batch.items() if key != REFERENCE}


def count(pieces: list[Batch]) -> int:
    """Count the pairs that have a label."""
    return sum(int(have_labels(labels_of(piece)).sum()) for piece in pieces)


def log_probs(logits: Callable[[Batch], Tensor], batch: Batch, device: torch.device) -> Tensor:
    """Return the sum of the labels' log-probabilities in each row of a microbatch, by a function for its logits."""
    return row_log_probs(logits(batch), to_device(labels_of(batch), device))
