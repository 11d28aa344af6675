"""Make random batches of rows with images, unequally many in each row, for a model that takes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from meshwright.core.errors import ConfigError
from meshwright.introspection.facts import ModelFacts
from meshwright.introspection.images import ImageArguments, ImageSize, length_for, pictured, sizes_of
from meshwright.introspection.source import builder_of
from meshwright.verification.problem import Batch, RandomBatches

COUNTS = (2, 0, 1, 0)
"""Images of the rows of a half of the batch, in turn; the other half has none, so that ranks have none."""
TEXT = 6
"""The least number of tokens of a row beside its images."""

NONE = ImageArguments(0, ())


@dataclass(frozen=True)
class PicturedBatches(RandomBatches):
    """Random batches in which some rows have images.

    In even steps the rows of the second half have none, in odd ones those of the first.
    """

    images: ImageArguments = NONE
    sizes: tuple[ImageSize, ...] = ()

    def __call__(self, step: int) -> Batch:
        batch = dict(super().__call__(step))
        half = -(-self.rows // 2)
        counts = [COUNTS[row % half % len(COUNTS)] * ((row < half) == (step % 2 == 0)) for row in range(self.rows)]
        generator = torch.Generator().manual_seed(2000 * self.seed + step)
        batch |= pictured(batch["tokens"], counts, self.images, self.sizes, generator)
        batch["labels"] = batch["labels"].masked_fill(batch["tokens"] == self.images.token, -100)
        return batch


def with_images(batches: RandomBatches, module: nn.Module, facts: ModelFacts) -> RandomBatches:
    """Return batches with images for a model that takes them; others as they are.

    Args:
        module: the model; on meta, it is built once more with weights where only its code tells an image's tokens.

    Raises:
        ConfigError: no images can be made for the model, or a row of its longest has no room for two.
    """
    images = facts.images
    if images is None:
        return batches
    sizes = sizes_of(module, images) or _sizes_of_built(module, images)
    if not sizes:
        raise ConfigError(f"{facts.kind} takes images in a way that is not known here: give a batch_factory with some")
    needed = length_for(COUNTS, sizes) + TEXT
    if facts.max_seq_len is not None and needed > facts.max_seq_len:
        raise ConfigError(
            f"two images of {facts.kind} take {needed} tokens with {TEXT} of text, more than its longest row of"
            f" {facts.max_seq_len}: give a batch_factory, or a config with smaller images (vision_config.image_size)"
        )
    known: dict[str, Any] = {key: getattr(batches, key) for key in ("vocab_size", "rows", "seed")}
    return PicturedBatches(**known, seq_len=max(batches.seq_len, needed), keys=(), images=images, sizes=sizes)


def _sizes_of_built(module: nn.Module, images: ImageArguments) -> tuple[ImageSize, ...]:
    build = builder_of(module)
    return () if build is None else sizes_of(build(), images)
