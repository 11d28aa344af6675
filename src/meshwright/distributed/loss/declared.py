"""Compute the losses that a user declares, as shares of the step's means over all ranks and microbatches."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.core.devices import to_device
from meshwright.core.errors import ConfigError, UnsupportedError
from meshwright.core.losses import IGNORED, Loss
from meshwright.core.torch_private import tree_leaves
from meshwright.distributed.step.part import Batch
from meshwright.introspection.signature import core_of

ONLY = "loss"
"""The name of a loss that is declared alone."""


class DeclaredLosses:
    """The declared losses of a model, and the counts of the step that they are divided by.

    Attributes:
        losses: by name.
        counts: each loss's count in the whole step on all ranks; known before the first forward.
        latest: each loss's value of the last microbatch, as its function returned it.
        totals: each loss's share of the step's mean, summed over this rank's microbatches.
        is_bare: whether the model returned nothing but its own loss, so that a loss without a label has no gradient.
    """

    def __init__(self, losses: Mapping[str, Loss], model: nn.Module, spelling: str | None = None):
        self.losses, self.spelling = dict(losses), spelling
        self.counts: dict[str, float] = dict.fromkeys(self.losses, 1.0)
        self.latest: dict[str, Tensor] = {}
        self.totals: dict[str, Tensor] = {}
        self.is_bare = False
        # transformers' losses of causal models shift labels themselves: the first of a row has no loss
        self._shifts = getattr(core_of(model), "loss_type", None) == "ForCausalLM"

    @classmethod
    def of(cls, loss_fn: Any, model: nn.Module, spelling: str | None) -> DeclaredLosses | None:
        """Return the declared losses; None for a function of logits and labels, and for none."""
        if isinstance(loss_fn, Loss):
            return cls({ONLY: loss_fn}, model, spelling)
        if not isinstance(loss_fn, Mapping):
            return None
        wrong = next((name for name, loss in loss_fn.items() if not isinstance(loss, Loss)), None)
        if wrong is not None or not loss_fn:
            what = f"'{wrong}' is a {type(loss_fn[wrong]).__name__}" if loss_fn else "it is empty"
            raise ConfigError(f"loss_fn is a mapping of names to meshwright.Loss, and {what}")
        return cls(loss_fn, model, spelling)

    def counts_labels(self, name: str, batch: Batch) -> bool:
        """Return whether a loss's count is that of the labels that are not ignored."""
        count, labels = self.losses[name].count, batch.get("labels")
        return count == "labels" or (count == "auto" and labels is not None and not labels.is_floating_point())

    def count(self, name: str, batch: Batch) -> float:
        """Return the count of one loss in a microbatch, a finite number from 0 on, or raise ConfigError."""
        loss, labels = self.losses[name], batch.get("labels")
        count = loss.count
        if callable(count):
            value = float(count(self.spelt(batch)))
        elif self.counts_labels(name, batch):
            if labels is None:
                raise ConfigError(
                    f"the count of {self._named(name)} is 'labels', and the batch has only {sorted(batch)}"
                )
            real = labels[:, 1:] if loss.fn is None and self._shifts and labels.dim() > 1 else labels
            value = float((real != IGNORED).sum())
        elif count in ("auto", "rows"):
            value = float(len(next(iter(batch.values()))))
        elif count in batch:
            value = float(batch[count].double().sum())
        else:
            raise ConfigError(
                f"the count of {self._named(name)} is '{count}', which is no key of the batch ({sorted(batch)}), nor"
                f" 'auto', 'labels' or 'rows'"
            )
        if not (math.isfinite(value) and value >= 0):
            raise ConfigError(
                f"the count of {self._named(name)} is {value} in a microbatch; it must be finite, and 0 or more"
            )
        return value

    def spelt(self, batch: Batch) -> Batch:
        """Return a batch in which tokens have the model's own name too."""
        if self.spelling is None or "tokens" not in batch or self.spelling in batch:
            return batch
        return {**batch, self.spelling: batch["tokens"]}

    def refuse_without_graph(self, pieces: Sequence[Batch]) -> None:
        """Raise ConfigError for means over nothing, if the model returns nothing but its loss."""
        means = [name for name, loss in self.losses.items() if loss.reduction == "mean"]
        if self.is_bare and any(not self.count(name, piece) for piece in pieces for name in means):
            raise ConfigError(BARE)

    def begin(self, counts: Sequence[float]) -> None:
        """Take the counts of a step, in the order of the losses."""
        self.counts = {name: count or 1.0 for name, count in zip(self.losses, counts, strict=True)}
        self.totals = {}

    def shares(self, like: Tensor) -> dict[str, Tensor]:
        """Return this rank's share of each loss of the step, zeros without any; {} for a loss that is alone."""
        names = self.losses if len(self.losses) > 1 else ()
        return {name: self.totals[name] if name in self.totals else torch.zeros_like(like) for name in names}

    def __call__(self, output: Any, batch: Batch) -> Tensor:
        """Return a microbatch's share of the sum of the step's means, in at least float32."""
        shares, self.is_bare = [], not _gradable(output)
        for name, loss in self.losses.items():
            share = self._sum(name, output, batch) * (loss.weight / self.counts[name])
            known = self.totals.get(name)
            self.totals[name] = share.detach().double() if known is None else known + share.detach()
            shares.append(share)
        return shares[0] if len(shares) == 1 else torch.stack(shares).sum()

    def _sum(self, name: str, output: Any, batch: Batch) -> Tensor:
        loss = self.losses[name]
        count = self.count(name, batch) if loss.reduction == "mean" else 1.0
        if not count:
            self.latest[name] = torch.zeros(())
            return nothing_of(output) if torch.is_grad_enabled() else torch.zeros((), dtype=torch.float64)
        spelt = self.spelt(batch)
        if loss.fn is not None:
            value = loss.fn(output, spelt)
        else:  # the output itself, its loss, or the first of a tuple
            value = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
            if isinstance(output, Tensor):
                value = output
            elif isinstance(output, (tuple, list)) and value is None and output:
                value = output[0]
            if not isinstance(value, Tensor) or value.numel() != 1:
                raise ConfigError(
                    f"Loss() without a function takes the loss that the model returns (a 0-dim tensor, under the name"
                    f" loss, or first in a tuple), and the forward returned {_words(output)}: give the batch the labels"
                    f" that the forward computes its loss with, or give Loss a function (output, batch)"
                )
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise ConfigError(
                f"{self._named(name)} returned {_words(value)}; it must return one number, a 0-dim tensor, whose count"
                f" is stated by Loss(count=...): it is needed before the first forward of a step"
            )
        value = value.reshape(())
        self.latest[name] = value.detach()
        return value.to(torch.promote_types(value.dtype, torch.float32)) * count

    def _named(self, name: str) -> str:
        return f"loss_fn['{name}']" if list(self.losses) != [ONLY] else "loss_fn"


BARE = (
    "a microbatch has no label with a loss, and the model returns nothing but its own mean loss, which is 0 / 0 there:"
    " return the logits too, or bring microbatches with a label each"
)


class Blank(dict):
    """A microbatch without a loss, which only fills up the schedule of a pipeline."""


class DeclaredObjective:
    """A function for a microbatch's share of the step's loss, from any output of the model."""

    def __init__(self, losses: DeclaredLosses, starts_backward: Callable[[Tensor], None]):
        self.losses, self._starts_backward = losses, starts_backward

    def targets(self, piece: Batch, device: torch.device) -> tuple[Any, ...]:
        """Return the batch on the device of the computation, and whether it has a loss."""
        return {key: to_device(value, device) for key, value in piece.items()}, not isinstance(piece, Blank)

    def __call__(self, forward: Callable[[], Any], batch: Batch, has_loss: bool = True) -> Tensor:
        output = forward()
        loss = self.losses(output, batch) if has_loss else nothing_of(output)
        self._starts_backward(loss)
        return loss


def nothing_of(output: Any) -> Tensor:
    """Return 0 from the graph of an output: other ranks wait in a backward."""
    if not (leaves := _gradable(output)):
        raise UnsupportedError(BARE)
    return torch.stack([leaf.sum() * 0.0 for leaf in leaves]).sum()


def _gradable(output: Any) -> list[Tensor]:
    """List the tensors with values of rows that a backward can start from; a loss of its own may be 0 / 0."""
    return [leaf for leaf in tensors_of(output) if leaf.is_floating_point() and leaf.dim() > 0]


def tensors_of(output: Any) -> Iterator[Tensor]:
    """Yield the tensors in an output: a tensor, nested containers of them, or an object's attributes."""
    if not isinstance(output, (Tensor, Mapping, tuple, list)) and hasattr(output, "__dict__"):
        output = vars(output)
    for leaf in tree_leaves(dict(output) if isinstance(output, Mapping) else output):
        if isinstance(leaf, Tensor):
            yield leaf
        elif dataclasses.is_dataclass(leaf):
            yield from tensors_of(leaf)


def _words(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} of {', '.join(map(str, value)) or 'nothing'}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {', '.join(_words(one) for one in value) or 'nothing'}"
    return f"a {type(value).__name__}"
