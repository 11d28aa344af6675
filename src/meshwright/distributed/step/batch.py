"""Check, count and cut one rank's batch of an optimizer step into microbatches."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from meshwright.core.devices import to_device
from meshwright.core.errors import ConfigError
from meshwright.core.losses import IGNORED
from meshwright.introspection.signature import SPELLINGS, Signature

Batch = Mapping[str, Tensor]
Brought = Batch | Sequence[Batch] | Exception
"""Input of a rank to a step: its batch, its microbatches, or the error why it has none."""


def labels_of(batch: Batch) -> Tensor:
    """Return (rows, seq) int64 labels, ignored where ``loss_mask`` is 0."""
    mask = batch.get("loss_mask")
    return batch["labels"] if mask is None else batch["labels"].masked_fill(~mask.bool(), IGNORED)


def weights_of(batch: Batch) -> Tensor | None:
    """Return (rows, seq) floating-point weights of the tokens' losses; None if all are 0 or 1."""
    mask = batch.get("loss_mask")
    return mask if mask is not None and mask.is_floating_point() and bool(((mask != 0) & (mask != 1)).any()) else None


def targets_of(batch: Batch, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Return labels and weights on the device of the computation."""
    weights = weights_of(batch)
    return to_device(labels_of(batch), device), None if weights is None else to_device(weights, device)


def check(
    batch: Batch, signature: Signature, max_seq_len: int | None, vocab_size: int | None, *, own_loss: bool = False
) -> None:
    """Raise ConfigError for a batch that the model or the loss (``own_loss``: a user's) cannot take."""
    missing = {"tokens", "labels"} - set(batch)
    if missing:
        raise ConfigError(
            f"the batch has no '{sorted(missing)[0]}'; it is a dict with tokens and labels, both (rows, seq), not"
            f" {sorted(batch)}"
        )
    for key, value in batch.items():
        if not isinstance(value, Tensor):
            raise ConfigError(f"batch['{key}'] is a {type(value).__name__}; it must be a tensor")
    for key, legal in (("tokens", (torch.int64, torch.int32)), ("labels", (torch.int64,))):
        if batch[key].dtype not in legal:
            raise ConfigError(
                f"batch['{key}'] holds {batch[key].dtype}; it must hold {legal[0]} (batch['{key}'].long())"
            )
    shape = batch["tokens"].shape
    if len(shape) != 2:
        raise ConfigError(f"batch['tokens'] has shape {tuple(shape)}; it must be (rows, seq)")
    for key, value in batch.items():
        if key in ("labels", "loss_mask", *SPELLINGS) and value.shape != shape:
            raise ConfigError(f"batch['{key}'] has shape {tuple(value.shape)}, but tokens have {tuple(shape)}")
        if key not in ("labels", "loss_mask", *SPELLINGS) and key not in signature.arguments:
            raise ConfigError(
                f"batch['{key}'] is not an argument of the model's forward{signature.arguments} and not a key that"
                f" meshwright knows"
            )
    if max_seq_len and shape[1] > max_seq_len:
        raise ConfigError(
            f"the batch has sequences of {shape[1]} tokens, more than the model's maximum of {max_seq_len}: shorten"
            f" them"
        )
    if vocab_size:
        _check_ids("tokens", _view(batch["tokens"]).ravel(), vocab_size, "")
        _check_ids("labels", real_labels(batch), vocab_size, f"; a token without a loss has the label {IGNORED}")
    if (weights := weights_of(batch)) is not None and not (weights.isfinite() & (weights >= 0)).all():
        raise ConfigError(
            f"batch['loss_mask'] holds weights from {float(weights.min())} to {float(weights.max())}; each must be"
            f" finite, and 0 or more"
        )
    if weights is not None and own_loss:
        raise ConfigError(
            "batch['loss_mask'] holds weights other than 0 and 1, and a loss_fn of your own is given logits and labels"
            " alone: leave loss_fn out (the cross entropy is weighted), or weigh inside it"
        )
    documents = batch.get("document_ids")
    are_parted = signature.positions_part_documents and "positions" in batch
    if (
        documents is not None
        and signature.takes["document_ids"] is None
        and not are_parted
        and bool((documents != documents[:, :1]).any())
    ):
        raise ConfigError(
            "the batch packs several documents into a row (document_ids), but the model's forward takes no"
            " document_ids, so tokens"
            " would attend across documents. Give one document per row, or a model that takes document_ids."
        )


def _check_ids(key: str, ids: Any, vocab_size: int, hint: str) -> None:
    if len(ids) and (ids.min() < 0 or ids.max() >= vocab_size):
        raise ConfigError(
            f"batch['{key}'] holds ids from {int(ids.min())} to {int(ids.max())}, but the model knows 0 to"
            f" {vocab_size - 1} (model.vocab_size){hint}"
        )


def _view(tensor: Tensor) -> Any:
    """View a CPU tensor as a numpy array, to look at it without dispatched operations; return others as they are."""
    return tensor.numpy() if tensor.device.type == "cpu" else tensor


def real_labels(batch: Batch) -> Any:
    """Return the labels that have a loss, flat (numpy on the CPU, else a tensor)."""
    labels = _view(labels_of(batch))
    return labels[labels != IGNORED]


def microbatches(batch: Batch | Sequence[Batch], rows: int) -> list[Batch]:
    """Cut the step along rows, ``rows`` per microbatch (0: in one piece); a list counts as cut already."""
    if not isinstance(batch, Mapping):
        if not isinstance(batch, Sequence) or not batch or not all(isinstance(piece, Mapping) for piece in batch):
            raise ConfigError(
                f"a step's batch is a dict of tensors, or a list of at least one of them (microbatches), not"
                f" {_words(batch)}"
            )
        return list(batch)
    total = batch["tokens"].shape[0] if isinstance(batch.get("tokens"), Tensor) else 0
    if not rows or total <= rows:
        return [batch]
    return [{key: value[start : start + rows] for key, value in batch.items()} for start in range(0, total, rows)]


def _words(batch: object) -> str:
    return (
        f"{type(batch).__name__} of {[type(piece).__name__ for piece in batch][:3]}"
        if isinstance(batch, list)
        else type(batch).__name__
    )


def fingerprint(pieces: list[Batch]) -> int:
    """Return a number that batches with other tokens almost never share: a CRC of the token ids."""
    value = 0
    for piece in pieces:
        value = zlib.crc32(piece["tokens"].cpu().contiguous().numpy().tobytes(), value)
    return value


def count(pieces: list[Batch]) -> int:
    """Count the tokens that have a loss."""
    return sum(len(real_labels(piece)) for piece in pieces)


def weight(pieces: list[Batch]) -> float:
    """Return the total weight of the microbatches' losses: their number, if no weights are given."""
    return sum(_weight(piece) for piece in pieces)


def _weight(piece: Batch) -> float:
    weights = weights_of(piece)
    return count([piece]) if weights is None else float(weights.double()[labels_of(piece) != IGNORED].sum())
