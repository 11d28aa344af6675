"""Check, count and cut one rank's batch of an optimizer step into microbatches."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor

from meshwright.core.errors import ConfigError
from meshwright.core.losses import IGNORED
from meshwright.introspection.images import IMAGE_KEYS, ImageArguments, counted, rows_of
from meshwright.introspection.signature import IMAGES_PER_ROW, SPELLINGS, Signature

from .part import Batch

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


def named(batch: Brought, signature: Signature, images: ImageArguments | None = None) -> Brought:
    """Return a batch, or microbatches, with tokens under ``tokens`` and the number of images in each row."""
    name = signature.takes["tokens"]
    if not isinstance(batch, Mapping):
        return [named(piece, signature, images) for piece in batch] if isinstance(batch, (list, tuple)) else batch  # type: ignore[return-value]
    if "tokens" not in batch and name in SPELLINGS["tokens"] and name in batch:
        batch = {("tokens" if key == name else key): value for key, value in batch.items()}
    return counted(batch, images)


def _refuse_others(batch: Batch) -> None:
    """Raise ConfigError for values that are no tensors."""
    for key, value in batch.items():
        if not isinstance(value, Tensor):
            raise ConfigError(f"batch['{key}'] is a {type(value).__name__}; it must be a tensor")


def refuse_other_rows(batch: Batch) -> None:
    """Raise ConfigError for values that are no tensors, and for tensors that disagree in their rows."""
    _refuse_others(batch)
    if IMAGES_PER_ROW in batch:
        batch = {key: value for key, value in batch.items() if key not in IMAGE_KEYS}
    if len({value.shape[:1] for value in batch.values()}) > 1 or any(not value.dim() for value in batch.values()):
        shapes = ", ".join(f"{key} {tuple(value.shape)}" for key, value in batch.items())
        raise ConfigError(
            f"the batch's tensors disagree in their rows, dim 0: {shapes}. Rows are dealt out to microbatches: give"
            f" each tensor one entry for each row"
        )


def check(
    batch: Batch,
    signature: Signature,
    max_seq_len: int | None,
    vocab_size: int | None,
    *,
    label_ids: int | None = None,
    own_loss: bool = False,
) -> None:
    """Raise ConfigError for a batch that the model or the loss (``own_loss``: a user's) cannot take."""
    if "labels" not in batch:
        raise ConfigError(
            f"the batch has no 'labels'; it is a dict with the arguments of the model's forward, and labels, not"
            f" {sorted(batch)}. A loss that needs no labels is declared: loss_fn=meshwright.Loss(...)"
        )
    _refuse_others(batch)
    if "tokens" not in batch:  # beside tokens, a tensor that is not cut may be for all rows, such as a bias
        refuse_other_rows(batch)
    _check_arguments(batch, signature)
    labels = batch["labels"]
    # the tokens that labels of several dims belong to; None for inputs that are no tokens
    of = next((key for key in ("decoder_input_ids", "tokens") if key in batch), None)
    is_free = own_loss and (of is None or labels.dim() == 1)
    if labels.dtype != torch.int64 and not is_free:
        raise ConfigError(f"batch['labels'] holds {labels.dtype}; it must hold torch.int64 (batch['labels'].long())")
    if "tokens" in batch:
        _check_tokens(batch, max_seq_len, vocab_size)
    if of is not None and labels.dim() > 1 and labels.shape != batch[of].shape:
        raise ConfigError(f"batch['labels'] has shape {tuple(labels.shape)}, but {of} have {tuple(batch[of].shape)}")
    if (mask := batch.get("loss_mask")) is not None and mask.shape != labels.shape:
        raise ConfigError(f"batch['loss_mask'] has shape {tuple(mask.shape)}, but labels have {tuple(labels.shape)}")
    of_images = (IMAGES_PER_ROW,) if "pixel_values" in signature.arguments else ()
    for key in batch:
        if key not in ("labels", "loss_mask", *SPELLINGS, *of_images) and key not in signature.arguments:
            raise ConfigError(
                f"batch['{key}'] is not an argument of the model's forward{signature.arguments} and not a key that"
                f" meshwright knows"
            )
    if label_ids and of is not None and labels.dim() > 1:
        padding = f"a token without a loss, such as padding, has the label {IGNORED}"
        cause = f"{padding}; or the tokenizer has more ids than the model"
        _check_ids("labels", _view(labels_of(batch)), label_ids, cause)
    weights = weights_of(batch)
    if weights is not None and not (weights.isfinite() & (weights >= 0)).all():
        raise ConfigError(
            f"batch['loss_mask'] holds weights from {float(weights.min())} to {float(weights.max())}; each must be"
            f" finite, and 0 or more"
        )
    if weights is not None and own_loss:
        raise ConfigError(
            "batch['loss_mask'] holds weights other than 0 and 1, and a loss_fn of your own is given logits and labels"
            " alone: leave loss_fn out (the cross entropy is weighted), or weigh inside it"
        )
    _check_documents(batch, signature)


def check_declared(batch: Batch, signature: Signature, max_seq_len: int | None, vocab_size: int | None) -> None:
    """Raise ConfigError for a batch that a model cannot take whose declared loss reads outputs and batch."""
    refuse_other_rows(batch)
    _check_arguments(batch, signature)
    if "tokens" in batch:
        _check_tokens(batch, max_seq_len, vocab_size)
        _check_documents(batch, signature)


def _check_arguments(batch: Batch, signature: Signature) -> None:
    given = {signature.argument_of(key) for key in batch} - {None}
    missing = [name for name in signature.required if name not in given and name in signature.arguments]
    if missing or not given - {"labels"}:
        keys = {name: key for key, name in signature.takes.items() if name in SPELLINGS.get(key, ())}
        lacking = f"no '{keys.get(missing[0], missing[0])}'" if missing else "no input of the model"
        raise ConfigError(
            f"the batch has {lacking}; it is a dict of tensors, rows first, with the arguments of the model's forward"
            f" ({', '.join(signature.arguments[:8])}) as keys, not {sorted(batch)}"
        )


def _check_tokens(batch: Batch, max_seq_len: int | None, vocab_size: int | None) -> None:
    tokens = batch["tokens"]
    if tokens.dtype not in (torch.int64, torch.int32):
        raise ConfigError(f"batch['tokens'] holds {tokens.dtype}; it must hold torch.int64 (batch['tokens'].long())")
    if tokens.dim() != 2:
        raise ConfigError(f"batch['tokens'] has shape {tuple(tokens.shape)}; it must be (rows, seq)")
    for key in SPELLINGS:
        if key in batch and batch[key].shape != tokens.shape:
            raise ConfigError(
                f"batch['{key}'] has shape {tuple(batch[key].shape)}, but tokens have {tuple(tokens.shape)}"
            )
    if max_seq_len and tokens.shape[1] > max_seq_len:
        raise ConfigError(
            f"the batch has sequences of {tokens.shape[1]} tokens, more than the model's maximum of {max_seq_len}:"
            f" shorten them"
        )
    if vocab_size:
        cause = "padding needs an id of the vocabulary; or the tokenizer has more ids"
        _check_ids("tokens", _view(tokens), vocab_size, cause)


def _check_documents(batch: Batch, signature: Signature) -> None:
    documents = batch.get("document_ids")
    are_parted = signature.positions_part_documents and "positions" in batch
    if documents is None or signature.takes["document_ids"] is not None or are_parted:
        return
    if bool((documents != documents[:, :1]).any()):
        raise ConfigError(
            "the batch packs several documents into a row (document_ids), but the model's forward takes no"
            " document_ids, so tokens would attend across documents. Give one document per row, or a model that takes"
            " document_ids."
        )


def _check_ids(key: str, ids: Any, vocab_size: int, cause: str) -> None:
    """Refuse ids outside the vocabulary, which some layouts would look up nowhere and others crash on."""
    strange = (ids < 0) | (ids >= vocab_size)
    if key == "labels":
        strange &= ids != IGNORED
    if strange.any():
        row = next(row for row, is_strange in enumerate(strange) if is_strange.any())
        value = int(ids[row][strange[row]][0])
        raise ConfigError(
            f"batch['{key}'] holds {value} in row {row}, but the model knows the ids 0 to {vocab_size - 1}"
            f" (model.vocab_size): {cause}"
        )


def _view(tensor: Tensor) -> Any:
    """View a CPU tensor as a numpy array, to look at it without dispatched operations; return others as they are."""
    return tensor.numpy() if tensor.device.type == "cpu" else tensor


def microbatches(batch: Batch | Sequence[Batch], rows: int) -> list[Batch]:
    """Cut the step along rows, ``rows`` per microbatch (0: in one piece); a list counts as cut already."""
    if not isinstance(batch, Mapping):
        if not isinstance(batch, Sequence) or not batch or not all(isinstance(piece, Mapping) for piece in batch):
            of = f" of {[type(piece).__name__ for piece in batch][:3]}" if isinstance(batch, list) else ""
            raise ConfigError(
                f"a step's batch is a dict of tensors, or a list of at least one of them (microbatches), not"
                f" {type(batch).__name__}{of}"
            )
        return list(batch)
    if not batch:
        raise ConfigError("the batch is empty: it is a dict of tensors, rows first")
    first = batch.get("tokens", next(iter(batch.values())))
    total = len(first) if isinstance(first, Tensor) and first.dim() else 0
    if not rows or total <= rows:
        return [batch]
    refuse_other_rows(batch)
    return [rows_of(batch, start, start + rows) for start in range(0, total, rows)]


def with_value(batch: Batch, key: str, value: Tensor) -> Batch:
    """Return a microbatch with one more tensor, or another one."""
    made: Any = copy(batch)  # keeps the places of a rank's own tokens, which a plain dict has not
    made[key] = value
    return made


def fingerprint(pieces: list[Batch]) -> int:
    """Return a number that batches with other tokens (or tensors, without any) almost never share: a CRC of them."""
    value = 0
    for piece in pieces:
        keys = ["tokens", *(key for key in IMAGE_KEYS if key in piece)] if "tokens" in piece else sorted(piece)
        for tensor in [piece[key] for key in keys]:
            value = zlib.crc32(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes(), value)
    return value


def count(pieces: list[Batch]) -> int:
    """Count the tokens that have a loss."""
    return sum(int((_view(labels_of(piece)) != IGNORED).sum()) for piece in pieces)


def weight(pieces: list[Batch]) -> float:
    """Return the total weight of the microbatches' losses: their number, if no weights are given."""
    total = 0.0
    for piece in pieces:
        weights, real = weights_of(piece), labels_of(piece) != IGNORED
        total += count([piece]) if weights is None else float(weights.double()[real].sum())
    return total
