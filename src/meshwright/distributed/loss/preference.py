"""Compute the loss of pairs of rows, check their batches, and refuse the layouts on which there is no such loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.core.devices import to_device
from meshwright.core.errors import ConfigError
from meshwright.core.losses import IGNORED, PreferenceLoss, have_labels, row_log_probs
from meshwright.core.record import recall
from meshwright.distributed.context.context_parallel import runtime_of as context_of
from meshwright.distributed.exchange import RankGroup, linear_map
from meshwright.distributed.loss.peft_private import adapted_layers, switched_off
from meshwright.distributed.step.batch import Batch, labels_of, with_value
from meshwright.distributed.tensor.layers import runtime_of
from meshwright.distributed.tensor.loss import VocabularyShard, vocabulary_parallel_row_log_probs
from meshwright.introspection.adapted_model import AdaptersRead, is_adapter
from meshwright.introspection.facts import ModelFacts
from meshwright.introspection.signature import REFERENCE, logits_of
from meshwright.planning.plan import Plan
from meshwright.planning.rules import check_pairs

MARGINS, ACCURACIES = "rewards/margins", "rewards/accuracies"
FIGURES = ("rewards/chosen", "rewards/rejected", MARGINS, ACCURACIES)
"""Names of a step's means over pairs, as trl has them."""


class CountedPairs:
    """The loss of pairs, and figures of the pairs of a step.

    A row's reward is beta times its log-probability under the model less that under the reference.

    Attributes:
        totals: sums over this rank's pairs of the step that have a label, in the order of ``FIGURES``; empty before
            the first.
    """

    def __init__(self, loss: PreferenceLoss):
        self.loss = loss
        self.totals: list[Tensor] = []

    def __call__(self, log_probs: Tensor, reference: Tensor, labels: Tensor, ranks: int = 1) -> Tensor:
        """Sum the losses of a microbatch's pairs, as ``PreferenceLoss`` does, and add up their figures.

        Args:
            ranks: number of ranks that compute the same pairs, each of which counts for its part.
        """
        rewards = self.loss.beta * (log_probs.detach() - reference.to(log_probs.dtype)).double().view(-1, 2)
        counts = have_labels(labels)
        chosen, rejected = (rewards * counts[:, None]).unbind(1)
        found = (chosen, rejected, chosen - rejected, (chosen > rejected).double())
        sums = [value.sum() / ranks for value in found]
        self.totals = [a + b for a, b in zip(self.totals, sums, strict=True)] if self.totals else sums
        return self.loss(log_probs, reference, labels) / ranks

    def taken(self, like: Tensor) -> dict[str, Tensor]:
        """Return the sums by their names, zeros on a rank without pairs, and begin anew."""
        found, self.totals = self.totals or [torch.zeros_like(like) for _ in FIGURES], []
        return {name: total.to(like) for name, total in zip(FIGURES, found, strict=True)}


class PairsOfModel:
    """The loss of pairs of a model, and its reference: the model without its adapters, as before the first step.

    Attributes:
        counted: the loss, and the figures of a step's pairs.
        refusal: why that is not the model of before, or not to be had; "" where it is.
    """

    def __init__(self, loss: PreferenceLoss, models: Sequence[nn.Module], facts: ModelFacts, plan: Plan):
        self.counted, self._layers, frozen = CountedPairs(loss), adapted_layers(models), set(plan.frozen)
        others = [p.name for p in facts.parameters if p.name not in frozen and not is_adapter(p.name)]
        if all(p.name in frozen for p in facts.parameters) or not any(is_adapter(p.name) for p in facts.parameters):
            self.refusal = "the model has no adapters"
        elif read := next((found for model in models if (found := recall(model, AdaptersRead))), None):
            self.refusal = f"its adapters were trained before ({read.folder})"
        elif others:
            self.refusal = f"{others[0]} is trained beside the adapters"
        elif any("lora_magnitude_vector" in p.name for p in facts.parameters):
            self.refusal = "DoRA's magnitudes are rounded, so that without adapters the model differs by rounding"
        elif plan.compiled:
            self.refusal = "techniques.compile fixes whether adapters are added"
        else:
            self.refusal = ""

    def refer(self, pieces: Sequence[Batch], log_probs: Callable[[Batch], Tensor]) -> list[Batch]:
        """Give microbatches what the model without its adapters gives to their rows (collective)."""
        with switched_off(self._layers):
            return [with_value(piece, REFERENCE, log_probs(piece)) for piece in pieces]


class PreferenceObjective:
    """A function for the summed loss of a microbatch's pairs, from logits or from this rank's part of them."""

    def __init__(self, model: nn.Module, plan: Plan, loss: CountedPairs):
        self.loss, self._logits = loss, LogitsOfRank(model, plan, in_parts=True)
        self._group = group_of_rows(model)

    def targets(self, piece: Batch, device: torch.device) -> tuple[Any, ...]:
        """Return labels, and the rows' log-probabilities under the reference, on the device of the computation."""
        return to_device(labels_of(piece), device), to_device(piece[REFERENCE], device)

    def __call__(self, forward: Callable[[], Any], labels: Tensor, reference: Tensor) -> Tensor:
        log_probs, labels = over_whole_rows(self._own_log_probs(forward, labels), labels, self._group)
        return self.loss(log_probs, reference, labels, 1 if self._group is None else self._group.size)

    def row_log_probs(self, forward: Callable[[], Any], labels: Tensor) -> Tensor:
        """Return the sum of the labels' log-probabilities in each row; over a cut vocabulary no logits are gathered."""
        return over_whole_rows(self._own_log_probs(forward, labels), labels, self._group)[0]

    def _own_log_probs(self, forward: Callable[[], Any], labels: Tensor) -> Tensor:
        """Return the same over this rank's tokens of each row."""
        logits, shard = self._logits(forward), self._logits.shard
        if shard is None:
            return row_log_probs(logits, labels)
        return vocabulary_parallel_row_log_probs(logits, labels, shard)


def group_of_rows(model: nn.Module) -> RankGroup | None:
    """Return the ranks that have other tokens of the same rows; None where rows are whole."""
    context = context_of(model)
    return None if context is None else context.group


def over_whole_rows(log_probs: Tensor, labels: Tensor, group: RankGroup | None) -> tuple[Tensor, Tensor]:
    """Return sums over whole rows of what ranks have of them, and for each row a label that counts if any does.

    Collective over the group. Every rank of it then computes the same loss, and is given the gradient of all of them.
    The shapes are (rows,) and (rows, 1), where rows are cut.
    """
    if group is None:
        return log_probs, labels
    counted = (labels != IGNORED).any(1).to(log_probs.dtype)
    # ranks go on alike: each one's gradient is its part of a mean over them
    both = torch.stack([log_probs, counted])
    whole, found = linear_map(both, lambda x: group.sum(x.clone()), lambda gradient: gradient * group.size).unbind()
    return whole, torch.where(found.detach() > 0, 0, IGNORED)[:, None]


def refuse(loss_fn: object, plan: Plan, microbatch_rows: int) -> None:
    """Refuse pairs beside other losses, and plans that do not compute their loss (``planning.rules.check_pairs``).

    Raises:
        ConfigError: a ``PreferenceLoss`` stands among losses by name.
    """
    if isinstance(loss_fn, Mapping):
        name = next((name for name, loss in loss_fn.items() if isinstance(loss, PreferenceLoss)), None)
        if name is not None:
            raise ConfigError(
                f"loss_fn['{name}'] is a PreferenceLoss, which counts pairs of rows, and other losses by name count"
                f" tokens or rows: give it alone, loss_fn=PreferenceLoss(...)"
            )
    if isinstance(loss_fn, PreferenceLoss):
        check_pairs(plan, microbatch_rows)


def without_reference(batch: Batch, *, may_lack: bool = False) -> Batch:
    """Return a microbatch without its rows' log-probabilities under the reference, once pairs and these are checked.

    The reference may be left out where adapters are switched off for it (``may_lack``).
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
    if found is None and may_lack:
        return batch
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


def lack_reference(pieces: Sequence[Batch]) -> bool:
    """Return whether the reference is left to the model without its adapters; raise ConfigError if for some only."""
    lacking = [REFERENCE not in piece for piece in pieces]
    if any(lacking) and not all(lacking):
        raise ConfigError(
            f"{sum(lacking)} of {len(lacking)} microbatches have no '{REFERENCE}': bring it with all of them, or with"
            f" none, and the adapters are switched off for it"
        )
    return any(lacking)


def refuse_some(lacking: int, ranks: int) -> None:
    """Raise ConfigError if some of the ranks bring a reference and others none."""
    if 0 < lacking < ranks:
        raise ConfigError(
            f"{lacking} of {ranks} data ranks bring no batch['{REFERENCE}']: all bring it, or none, and the adapters"
            f" are switched off for it"
        )


def count(pieces: list[Batch]) -> int:
    """Count the pairs that have a label."""
    return sum(int(have_labels(labels_of(piece)).sum()) for piece in pieces)


def log_probs_of(
    objective: object, model: nn.Module, forward: Callable[[], Any], batch: Batch, device: torch.device
) -> Tensor:
    """Return the sum of the labels' log-probabilities in each row of a microbatch, by a forward of the model."""
    labels = to_device(labels_of(batch), device)
    if isinstance(objective, PreferenceObjective):
        return objective.row_log_probs(forward, labels)
    return over_whole_rows(row_log_probs(logits_of(forward()), labels), labels, group_of_rows(model))[0]


class LogitsOfRank:
    """A function for the logits that a loss is computed from.

    Args:
        model: the model as it was laid out (without a wrapper).
        in_parts: the loss can be computed from parts of the logits.

    Attributes:
        shard: this rank's part of the vocabulary that the last logits are of; None: logits are whole.
    """

    def __init__(self, model: nn.Module, plan: Plan, *, in_parts: bool):
        self._runtime, self.shard = runtime_of(model), None
        tensor = plan.tensor
        if not in_parts or tensor is None or self._runtime is None:
            return
        if tensor.head and not tensor.tail.obstacle_if_cut:
            rows = model.get_submodule(tensor.head).get_parameter("weight").shape[0]
            self.shard = VocabularyShard.of(rows, self._runtime.group)

    def __call__(self, forward: Callable[[], Any]) -> Tensor:
        """Return (rows, seq, vocabulary), or (rows, seq, shard.size) of this rank's ids."""
        if self.shard is None or self._runtime is None:
            return logits_of(forward())
        self._runtime.logits = "own"
        try:
            logits = logits_of(forward())
        finally:
            self._runtime.logits = "whole"
        self.shard = self._runtime.shard
        return logits
