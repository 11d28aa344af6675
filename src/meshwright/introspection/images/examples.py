"""Make images, and rows of tokens with places for them, that a small model takes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.introspection.signature import IMAGES_PER_ROW
from meshwright.introspection.wrapped import core_of

from .arguments import GRID, PIXEL_MASK, PIXELS, SIZES, ImageArguments, size_of_images, tokens_of

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
    """Return sizes of images that a model takes, unequal ones where it takes such; () where none can be told.

    Args:
        model: a model with weights where only its code tells the number of an image's tokens; it may be on meta else.
    """
    vision = getattr(getattr(core_of(model), "config", None), "vision_config", None)
    if GRID in images.names:
        return _of_patches(vision, images)
    size = size_of_images(vision)
    if not size:
        return ()
    if images.each and images.size == size:
        return (ImageSize(size, images.each),)
    for ways in _ways(size, images):
        with contextlib.suppress(Exception):  # a model's code may need other arguments
            sizes = tuple(replace(way, tokens=tokens_of(model, _alone(way, model, images))) for way in ways)
            if all(each.tokens for each in sizes):
                return sizes
    return ()


def _ways(size: tuple[int, ...], images: ImageArguments) -> Iterator[tuple[ImageSize, ...]]:
    """Yield the ways to try in which images may be given, the plainest first.

    Images beside their heights and widths are given whole, filled up to one shape, or in parts of one shape.
    """
    yield (ImageSize(size),)
    if SIZES not in images.names:
        return
    *_, height, width = size
    for shape in (size, *((parts, *size) for parts in range(1, MOST_PARTS + 1))):
        whole, half = (ImageSize(shape, beside=((SIZES, sides),)) for sides in ((height, width), (height, width // 2)))
        yield whole, half
        yield (whole,)


def _alone(way: ImageSize, model: nn.Module, images: ImageArguments) -> dict[str, Any]:
    """Return the arguments of one image."""
    like = next(model.parameters())
    shape = (1, 1, *way.pixels) if PIXEL_MASK in images.names else (1, *way.pixels)
    beside = {name: [list(numbers)] for name, numbers in way.beside}
    return {PIXELS: torch.ones(shape, dtype=like.dtype, device=like.device), **beside}


def _of_patches(vision: Any, images: ImageArguments) -> tuple[ImageSize, ...]:
    """Return two sizes of images in patches, the second half as wide."""
    patch, depth = getattr(vision, "patch_size", None), getattr(vision, "temporal_patch_size", 1)
    channels = next((v for key in ("in_channels", "in_chans") if isinstance(v := getattr(vision, key, None), int)), 3)
    if not isinstance(patch, int) or not isinstance(depth, int):
        return ()
    side = round(images.merged**0.5)
    grids = ((1, 2 * side, 2 * side), (1, 2 * side, side))
    features = channels * depth * patch * patch
    return tuple(
        ImageSize((t * h * w, features), t * h * w // images.merged, ((GRID, (t, h, w)),)) for t, h, w in grids
    )


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
