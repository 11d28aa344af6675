"""Find the arguments by which a model's forward takes images, and the token that stands for a part of one."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.core.errors import UnsupportedError
from meshwright.introspection.constructor.meta import on_meta
from meshwright.introspection.signature import Signature
from meshwright.introspection.wrapped import core_of

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
        made = cls(
            token,
            names,
            tuple(key for key in KINDS_OF_TOKENS if key in arguments),
            side * side if isinstance(side, int) else 1,
        )
        if GRID in names or PIXEL_MASK in names:
            return made
        size = size_of_images(vision)
        return cls(token, names, made.kinds, made.merged, _tokens_of_image(core_of(model), config, size), size)


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

    Args:
        images: the arguments of an image, each with a first dim of 1; heights and widths may be lists of numbers.

    Raises:
        Exception: whatever the last of these functions raises that are not content with the arguments.
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


def _tokens_of_image(model: nn.Module, config: Any, size: tuple[int, ...]) -> int:
    """Return the number of tokens of an image, by a copy of the model without memory; 0 where that fails."""
    if not size:
        return 0
    try:
        with on_meta(), torch.no_grad():
            return tokens_of(type(model)(copy.deepcopy(config)).eval(), {PIXELS: torch.zeros((1, *size))})
    except Exception:  # noqa: BLE001  (a model's code may read values, or need other arguments)
        return 0
