"""Count the images of a batch's rows, and cut a batch into rows with their images."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor

from meshwright.core.errors import ConfigError, UnsupportedError
from meshwright.introspection.signature import IMAGES_PER_ROW

from .arguments import GRID, IMAGE_KEYS, PIXEL_MASK, PIXELS, SIZES, ImageArguments

Batch = Mapping[str, Tensor]
ASK = f"Say how many images each row has: batch['{IMAGES_PER_ROW}'], (rows,) int64"


def rows_of(batch: Batch, start: int, stop: int) -> dict[str, Tensor]:
    """Return the rows from ``start`` to ``stop`` with their images; without any image, no key of images.

    Args:
        batch: tensors of rows. With ``images_per_row``, ``pixel_values`` and the like have an entry for each image, or
            for each patch of ``image_grid_thw``, in the order of the rows; or (rows, images, …), filled up with zeros.
    """
    counts = batch.get(IMAGES_PER_ROW)
    if counts is None:
        return {key: value[start:stop] for key, value in batch.items()}
    first, last = int(counts[:start].sum()), int(counts[:stop].sum())
    found: dict[str, Tensor] = {}
    for key, value in batch.items():
        if key not in IMAGE_KEYS:
            found[key] = value[start:stop]
        elif first < last and key == PIXELS and GRID in batch:
            ends = torch.cat((torch.zeros(1, dtype=torch.int64), batch[GRID].cpu().prod(-1).cumsum(0)))
            found[key] = value[int(ends[first]) : int(ends[last])]
        elif first < last:
            found[key] = value[start:stop] if lies_in_rows(batch, key) else value[first:last]
    return found


def lies_in_rows(batch: Batch, key: str) -> bool:
    """Return whether a tensor of images is (rows, images, …), filled up with images of zeros."""
    pixels = batch.get(PIXELS)
    return key == PIXEL_MASK or (key == PIXELS and pixels is not None and pixels.dim() == 5 and SIZES not in batch)


def counted(batch: Batch, images: ImageArguments | None) -> Batch:
    """Return a batch that says how many images each row has, if it has images or could have.

    Args:
        images: how the model takes images; None: it takes none.

    Raises:
        ConfigError: the images are not those of the rows' image tokens, or nothing tells which row has which image.
        UnsupportedError: the batch has videos.
    """
    if images is None or "tokens" not in batch or not isinstance(batch["tokens"], Tensor):
        return batch
    given = [key for key in (*IMAGE_KEYS, IMAGES_PER_ROW) if key in batch]
    if any(not isinstance(batch[key], Tensor) for key in given) or batch["tokens"].dim() != 2:
        return batch  # refused with all other keys
    if videos := next((key for key in batch if "video" in key), ""):
        raise UnsupportedError(f"batch['{videos}']: videos are not dealt to rows, only images: leave it out")
    tokens = (batch["tokens"] == images.token).sum(1)
    pixels = batch.get(PIXELS)
    if pixels is None or not len(pixels):
        _refuse_without_pixels(batch, tokens, images)
        counts = torch.zeros(len(tokens), dtype=torch.int64)
    elif lies_in_rows(batch, PIXELS):
        counts = _of_filled(batch, pixels)
    else:
        counts = _given(batch, _number(batch, pixels)) if IMAGES_PER_ROW in batch else _inferred(batch, tokens, images)
    _check_tokens(batch, tokens, counts, images)
    if not given:
        return batch
    whole = {**batch, IMAGES_PER_ROW: counts}
    return rows_of(whole, 0, len(tokens))


def _number(batch: Batch, pixels: Tensor) -> int:
    """Return the number of images; raise ConfigError if tensors of images disagree in it."""
    numbers = {key: len(batch[key]) for key in (GRID, SIZES) if key in batch}
    patches = int(batch[GRID].prod(-1).sum()) if GRID in batch else None
    if patches is not None and patches != len(pixels):
        raise ConfigError(
            f"batch['{PIXELS}'] has {len(pixels)} patches, and batch['{GRID}'] speaks of {patches}: one entry"
            f" of {PIXELS} for each patch, t·h·w of each image, in the order of the rows"
        )
    if patches is None:
        numbers[PIXELS] = len(pixels)
    if len(set(numbers.values())) > 1:
        words = ", ".join(f"{key} {number}" for key, number in numbers.items())
        raise ConfigError(f"the batch's tensors of images disagree in their number, dim 0: {words}")
    return next(iter(numbers.values()))


def _given(batch: Batch, number: int) -> Tensor:
    counts, rows = batch[IMAGES_PER_ROW], len(batch["tokens"])
    if counts.dtype != torch.int64 or counts.shape != (rows,) or bool((counts < 0).any()):
        raise ConfigError(
            f"batch['{IMAGES_PER_ROW}'] has shape {tuple(counts.shape)} and holds {counts.dtype}; it must be ({rows},)"
            f" torch.int64, the number of images of each row, 0 or more"
        )
    if int(counts.sum()) != number:
        raise ConfigError(
            f"batch['{IMAGES_PER_ROW}'] counts {int(counts.sum())} images, and the batch's tensors of images have"
            f" {number}"
        )
    return counts.cpu()


def _of_filled(batch: Batch, pixels: Tensor) -> Tensor:
    """Count the images of (rows, images, …) that are not all zeros, as the model does."""
    if len(pixels) != len(batch["tokens"]):
        raise ConfigError(
            f"batch['{PIXELS}'] has shape {tuple(pixels.shape)}, (rows, images, channels, height, width), and tokens"
            f" have {len(batch['tokens'])} rows"
        )
    counts = (pixels != 0).flatten(2).any(-1).sum(1).cpu()
    if IMAGES_PER_ROW in batch:
        given = _given(batch, int(batch[IMAGES_PER_ROW].sum()))
        if (off := (given != counts).nonzero().flatten()).numel():
            row = int(off[0])
            raise ConfigError(
                f"row {row}: batch['{IMAGES_PER_ROW}'] says {int(given[row])} images, and {int(counts[row])} of"
                f" batch['{PIXELS}'][{row}] are not all zeros, which is how the model tells images from filling"
            )
    return counts


def _inferred(batch: Batch, tokens: Tensor, images: ImageArguments) -> Tensor:
    """Count the rows' images by their tokens, where that can be done in one way only."""
    pixels, number = batch[PIXELS], _number(batch, batch[PIXELS])
    each = _tokens_of_each(batch, images)
    if each is not None:
        ends = torch.cat((torch.zeros(1, dtype=torch.int64), each.cumsum(0)))
        places = torch.searchsorted(ends, tokens.cpu().cumsum(0))
        wrong = (places > number) | (ends[places.clamp(max=number)] != tokens.cpu().cumsum(0))
        if bool(wrong.any()) or int(places[-1]) != number:
            row = int(wrong.nonzero().flatten()[0]) if bool(wrong.any()) else len(tokens) - 1
            raise ConfigError(_other_tokens(row, int(tokens[row]), images, f"the {number} images take {each.tolist()}"))
        return places.diff(prepend=torch.zeros(1, dtype=torch.int64))
    has_images = tokens.cpu() > 0
    if int(has_images.sum()) == number:
        return has_images.long()
    total = int(tokens.sum())
    size, rest = divmod(total, number)
    are_alike = SIZES not in batch or bool((batch[SIZES] == batch[SIZES][:1]).all())
    if rest or not size or not are_alike or bool((tokens % size).any()):
        raise ConfigError(
            f"the batch has {number} images ({PIXELS} {tuple(pixels.shape)}) and rows of {tokens.tolist()} image tokens"
            f" (id {images.token}), which does not tell which row has which image. {ASK}"
        )
    return (tokens // size).cpu()


def _tokens_of_each(batch: Batch, images: ImageArguments) -> Tensor | None:
    """Return the number of tokens of each image; None where it is not known."""
    if GRID in batch:
        return batch[GRID].cpu().prod(-1) // images.merged
    pixels = batch[PIXELS]
    if images.each and tuple(pixels.shape[1:]) == images.size and SIZES not in batch:
        return torch.full((len(pixels),), images.each)
    return None


def _check_tokens(batch: Batch, tokens: Tensor, counts: Tensor, images: ImageArguments) -> None:
    """Raise ConfigError for the first row whose image tokens are not those of its images."""
    if not bool(counts.any()) or (PIXELS in batch and SIZES in batch):
        return  # images of several sizes: the model itself tells
    each = None if lies_in_rows(batch, PIXELS) else _tokens_of_each(batch, images)
    if each is not None:
        ends = torch.cat((torch.zeros(1, dtype=torch.int64), each.cumsum(0)))[counts.cumsum(0)]
        wanted = ends.diff(prepend=torch.zeros(1, dtype=torch.int64))
    else:
        pairs = zip(tokens.tolist(), counts.tolist(), strict=True)
        ratios = Counter(found / number for found, number in pairs if number and found)
        if not ratios:
            ratios[1.0] = 1
        wanted = counts * ratios.most_common(1)[0][0]
    for row, (found, needed, number) in enumerate(zip(tokens.tolist(), wanted.tolist(), counts.tolist(), strict=True)):
        if found != needed:
            raise ConfigError(
                _other_tokens(row, found, images, f"its {number} images take {int(needed)}" if number else "no image")
            )


def _refuse_without_pixels(batch: Batch, tokens: Tensor, images: ImageArguments) -> None:
    if bool(tokens.any()):
        row = int(tokens.nonzero().flatten()[0])
        raise ConfigError(_other_tokens(row, int(tokens[row]), images, f"the batch has no batch['{PIXELS}']"))
    if IMAGES_PER_ROW in batch:
        _given(batch, 0)


def _other_tokens(row: int, found: int, images: ImageArguments, rest: str) -> str:
    return (
        f"row {row} of the batch has {found} image tokens (id {images.token}), and {rest}: images and the tokens that"
        f" stand for them come in the order of the rows"
    )
