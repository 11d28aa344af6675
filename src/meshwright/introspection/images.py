"""Find how a model takes images beside tokens, and cut batches of them by rows."""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.core.errors import ConfigError, UnsupportedError
from meshwright.introspection.constructor import on_meta

from .signature import IMAGES_PER_ROW, Signature, core_of

# --- find the arguments by which a model's forward takes images, and the token that stands for a part of one

PIXELS, GRID, SIZES, PIXEL_MASK = "pixel_values", "image_grid_thw", "image_sizes", "pixel_attention_mask"
IMAGE_KEYS = (PIXELS, GRID, SIZES, PIXEL_MASK)
"""Keys of a batch with one entry for each image or patch, or a place for each image of a row."""
OF_TOWER = (PIXELS, PIXEL_MASK)
"""Arguments that nothing but a vision tower reads: a pipeline's later stages are not given them."""
KINDS_OF_TOKENS = ("token_type_ids", "mm_token_type_ids")
"""Arguments of (rows, seq) that are 1 at image tokens and 0 elsewhere."""
TOKEN_KEYS = ("image_token_id", "image_token_index")


@dataclass(frozen=True)
class ImageArguments:
    """The way in which a model takes images.

    Attributes:
        token: id of the tokens that stand for images.
        names: those of ``IMAGE_KEYS`` that the forward takes.
        kinds: those of ``KINDS_OF_TOKENS`` that the forward takes.
        merged: patches of an ``image_grid_thw`` that one token stands for.
        each: number of tokens of an image of ``size`` pixels, where all of that size have it; 0: not known.
        size: shape of an image, (channels, height, width), for ``each``.
    """

    token: int
    names: tuple[str, ...]
    kinds: tuple[str, ...] = ()
    merged: int = 1
    each: int = 0
    size: tuple[int, ...] = ()

    @classmethod
    def of(cls, model: nn.Module) -> ImageArguments | None:
        """Return how a model takes images; None if its forward or its config names none."""
        config = getattr(core_of(model), "config", None)
        arguments = Signature.of(model).arguments
        token = next((v for key in TOKEN_KEYS if isinstance(v := getattr(config, key, None), int)), None)
        if token is None or PIXELS not in arguments:
            return None
        names = tuple(key for key in IMAGE_KEYS if key in arguments)
        vision = getattr(config, "vision_config", None)
        side = getattr(vision, "spatial_merge_size", None)
        kinds, merged = (
            tuple(key for key in KINDS_OF_TOKENS if key in arguments),
            side * side if isinstance(side, int) else 1,
        )
        if GRID in names or PIXEL_MASK in names:
            return cls(token, names, kinds, merged)
        size, each = size_of_images(vision), 0
        with contextlib.suppress(Exception):  # a model's code may read values, or need other arguments
            if size:  # by a copy of the model without memory
                with on_meta(), torch.no_grad():
                    copied = type(core_of(model))(copy.deepcopy(config)).eval()
                    each = tokens_of(copied, {PIXELS: torch.zeros((1, *size))})
        return cls(token, names, kinds, merged, each, size)


def size_of_images(vision: Any) -> tuple[int, ...]:
    """Return (channels, height, width) of the images that a vision tower's config states; () if it states none."""
    side = getattr(vision, "image_size", None)
    channels = next(
        (v for key in ("num_channels", "in_channels", "in_chans") if isinstance(v := getattr(vision, key, None), int)),
        3,
    )
    sides = (side, side) if isinstance(side, int) else tuple(side) if isinstance(side, (list, tuple)) else ()
    return (channels, *sides) if len(sides) == 2 else ()


def tokens_of(model: nn.Module, images: dict[str, Any]) -> int:
    """Return the number of tokens of one image, by ``get_image_features`` of the model or of one inside it.

    Raises what the last of these functions raises that are not content with the image's arguments.
    """
    error: Exception = UnsupportedError(f"{type(model).__name__} has no get_image_features")
    for module in core_of(model).modules():
        if not callable(features := getattr(module, "get_image_features", None)):
            continue
        try:
            found = features(**images)
        except Exception as failed:  # noqa: BLE001  (a model's code may read values, or need other arguments)
            error = failed
            continue
        pooled: Any = getattr(found, "pooler_output", found)
        each = [pooled] if isinstance(pooled, Tensor) else pooled
        return sum(part.numel() // part.shape[-1] for part in each)
    raise error


# --- make images, and rows of tokens with places for them, that a small model takes

BEFORE = 1
"""Tokens of text before a row's first image, and between two."""
MOST_PARTS = 10
"""Parts of an image, with the whole of it in small, up to which ways of giving it are tried."""


@dataclass(frozen=True)
class ImageSize:
    """The shape of one image as a model takes it.

    Attributes:
        pixels: shape of its entries in ``pixel_values``, without the dim of images; with the dim of patches.
        tokens: number of tokens that stand for it.
        beside: the numbers of its entry in other arguments: its patches (t, h, w), or its height and width.
    """

    pixels: tuple[int, ...]
    tokens: int = 0
    beside: tuple[tuple[str, tuple[int, ...]], ...] = ()


def sizes_of(model: nn.Module, images: ImageArguments) -> tuple[ImageSize, ...]:
    """Return sizes of images that a model takes, unequal ones where it takes such; () where none can be told."""
    vision = getattr(getattr(core_of(model), "config", None), "vision_config", None)
    if GRID in images.names:  # two sizes in patches, the second half as wide
        patch, depth = getattr(vision, "patch_size", None), getattr(vision, "temporal_patch_size", 1)
        inputs = (getattr(vision, key, None) for key in ("in_channels", "in_chans"))
        channels = next((v for v in inputs if isinstance(v, int)), 3)
        if not isinstance(patch, int) or not isinstance(depth, int):
            return ()
        side, features = round(images.merged**0.5), channels * depth * patch * patch
        grids = ((1, 2 * side, 2 * side), (1, 2 * side, side))
        return tuple(
            ImageSize((t * h * w, features), t * h * w // images.merged, ((GRID, (t, h, w)),)) for t, h, w in grids
        )
    size = size_of_images(vision)
    if not size:
        return ()
    if images.each and images.size == size:
        return (ImageSize(size, images.each),)
    # the plainest way of giving images first; beside their heights and widths they are whole, filled up to one shape,
    # or in parts of one shape
    ways: list[tuple[ImageSize, ...]] = [(ImageSize(size),)]
    *_, height, width = size
    shapes = (size, *((parts, *size) for parts in range(1, MOST_PARTS + 1))) if SIZES in images.names else ()
    for shape in shapes:
        whole, half = (ImageSize(shape, beside=((SIZES, sides),)) for sides in ((height, width), (height, width // 2)))
        ways += [(whole, half), (whole,)]
    like = next(model.parameters())

    def counted_alone(way: ImageSize) -> ImageSize:
        shape = (1, 1, *way.pixels) if PIXEL_MASK in images.names else (1, *way.pixels)
        alone = {PIXELS: torch.ones(shape, dtype=like.dtype, device=like.device)}
        return replace(way, tokens=tokens_of(model, alone | {name: [list(numbers)] for name, numbers in way.beside}))

    for way in ways:
        with contextlib.suppress(Exception):  # a model's code may need other arguments
            sizes = tuple(map(counted_alone, way))
            if all(each.tokens for each in sizes):
                return sizes
    return ()


def pictured(
    tokens: Tensor,
    counts: Sequence[int],
    images: ImageArguments,
    sizes: Sequence[ImageSize],
    generator: torch.Generator,
    dtype: torch.dtype = torch.float64,
) -> dict[str, Tensor]:
    """Return a batch of rows with images: the tokens with places for them, their number in each row, and pixels.

    Args:
        tokens: (rows, seq) ids of text, long enough for all images of a row.
        counts: the number of images of each row.
        sizes: sizes of images, taken in turn.
    """
    tokens = tokens.clone()
    tokens[tokens == images.token] = 0 if images.token else 1
    pixels: list[list[Tensor]] = []
    beside: dict[str, list[tuple[int, ...]]] = {}
    for row, count in enumerate(counts):
        place = BEFORE
        pixels.append([])
        for number in range(count):
            size = sizes[(row + number) % len(sizes)]
            tokens[row, place : place + size.tokens] = images.token
            place += size.tokens + BEFORE
            pixels[-1].append(torch.randn(size.pixels, generator=generator, dtype=torch.float64).to(dtype))
            for name, numbers in size.beside:
                beside.setdefault(name, []).append(numbers)
    batch = {"tokens": tokens, IMAGES_PER_ROW: torch.tensor(list(counts))}
    batch |= {name: (tokens == images.token).long() for name in images.kinds}
    every = [image for row in pixels for image in row]
    if not every:
        return batch
    batch |= {name: torch.tensor(numbers) for name, numbers in beside.items()}
    if GRID in images.names:
        return batch | {PIXELS: torch.cat(every)}
    if PIXEL_MASK not in images.names:
        return batch | {PIXELS: torch.stack(every)}
    shape = (len(tokens), max(counts), *every[0].shape)
    filled, mask = torch.zeros(shape, dtype=dtype), torch.zeros((*shape[:2], *shape[3:]), dtype=torch.bool)
    for row, own in enumerate(pixels):
        for place, image in enumerate(own):
            filled[row, place], mask[row, place] = image, True
            if place % 2:  # half of it is filling
                mask[row, place, shape[-2] // 2 :] = False
    return batch | {PIXELS: filled, PIXEL_MASK: mask}


def length_for(counts: Sequence[int], sizes: Sequence[ImageSize]) -> int:
    """Return the number of tokens that the images of the fullest row take, with the text before each."""
    most = max((size.tokens for size in sizes), default=0)
    return max(counts, default=0) * (most + BEFORE) + BEFORE


# --- count the images of a batch's rows, and cut a batch into rows with their images

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
        if bool(tokens.any()):
            row = int(tokens.nonzero().flatten()[0])
            raise ConfigError(_other_tokens(row, int(tokens[row]), images, f"the batch has no batch['{PIXELS}']"))
        if IMAGES_PER_ROW in batch:
            _given(batch, 0)
        counts = torch.zeros(len(tokens), dtype=torch.int64)
    elif lies_in_rows(batch, PIXELS):
        # those of (rows, images, …) that are not all zeros, as the model counts
        if len(pixels) != len(batch["tokens"]):
            raise ConfigError(
                f"batch['{PIXELS}'] has shape {tuple(pixels.shape)}, (rows, images, channels, height, width), and"
                f" tokens have {len(batch['tokens'])} rows"
            )
        counts = (pixels != 0).flatten(2).any(-1).sum(1).cpu()
        if IMAGES_PER_ROW in batch:
            told = _given(batch, int(batch[IMAGES_PER_ROW].sum()))
            if (off := (told != counts).nonzero().flatten()).numel():
                row = int(off[0])
                raise ConfigError(
                    f"row {row}: batch['{IMAGES_PER_ROW}'] says {int(told[row])} images, and {int(counts[row])} of"
                    f" batch['{PIXELS}'][{row}] are not all zeros, which is how the model tells images from filling"
                )
    else:
        counts = _given(batch, _number(batch, pixels)) if IMAGES_PER_ROW in batch else _inferred(batch, tokens, images)
    # images of several sizes: the model itself tells
    if bool(counts.any()) and not (PIXELS in batch and SIZES in batch):
        each = None if lies_in_rows(batch, PIXELS) else _tokens_of_each(batch, images)
        numbers, found = counts.tolist(), tokens.tolist()
        if each is not None:
            ends = torch.cat((torch.zeros(1, dtype=torch.int64), each.cumsum(0)))[counts.cumsum(0)]
            wanted = ends.diff(prepend=torch.zeros(1, dtype=torch.int64))
        else:
            ratios = Counter(here / number for here, number in zip(found, numbers, strict=True) if number and here)
            wanted = counts * (ratios.most_common(1)[0][0] if ratios else 1.0)
        for row, (here, needed, number) in enumerate(zip(found, wanted.tolist(), numbers, strict=True)):
            if here != needed:
                why = f"its {number} images take {int(needed)}" if number else "no image"
                raise ConfigError(_other_tokens(row, here, images, why))
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


def _other_tokens(row: int, found: int, images: ImageArguments, rest: str) -> str:
    return (
        f"row {row} of the batch has {found} image tokens (id {images.token}), and {rest}: images and the tokens that"
        f" stand for them come in the order of the rows"
    )
