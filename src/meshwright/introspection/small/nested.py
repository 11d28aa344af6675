"""Shrink configs of several models in one: a language model's, and a vision tower's beside it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .configs import HIDDEN, LAYERS, VOCABULARY, WIDTH, Small, small_configs

VISION = "vision_config"
TOWER_LAYERS = (*LAYERS, "depth")
TOWER_HEADS = ("num_attention_heads", "num_heads")
TOWER_WIDTH = (*WIDTH, "embed_dim")
HEADS_KEPT, HEAD_SIZE = 2, 8
CHOSEN_LAYERS = ("vision_feature_layer", "vision_feature_layers")
"""Keys beside the tower's config that count its layers."""
OF_TOWERS_LAYERS = "_indexes"
"""Ending of keys of the tower's config that list some of its layers by number."""
MERGED = ("scale_factor", "spatial_merge_size", "downsample_factor")
"""Keys of a config for the patches in a row of which one token is made."""
IDS = ("_token_id", "_token_index")
"""Endings of keys that hold ids of tokens."""


@dataclass(frozen=True)
class SmallNested(Small):
    """A config with a smaller language model, and other changes to a fresh copy of it."""

    text: Small | None = None
    key: str = ""

    @property
    def config(self) -> Any:
        assert self.text is not None
        made, small = copy.deepcopy(self.source), self.text.config
        setattr(made, self.key, small)
        _shrink_ids(made, int(getattr(small, "vocab_size", VOCABULARY)))
        _shrink_tower(made, int(getattr(small, "hidden_size", 0)))
        return made


def key_of_text(config: Any) -> str:
    """Return the key of the language model's config within a config of images and text; "" where there is none."""
    if getattr(config, VISION, None) is None or not callable(of_text := getattr(config, "get_text_config", None)):
        return ""
    text = of_text()
    return next((key for key, value in vars(config).items() if value is text and text is not config), "")


def smaller(config: Any, blocks: int, ranks: int, *, few_experts: bool = False) -> Iterator[Small]:
    """Yield smaller configs as ``small_configs`` does, also of a model with a vision tower."""
    key = key_of_text(config)
    if not key:
        yield from small_configs(config, blocks, ranks, few_experts=few_experts)
        return
    for text in small_configs(getattr(config, key), blocks, ranks, few_experts=few_experts):
        yield SmallNested(config, {}, text.heads, text, key)


def _shrink_ids(config: Any, vocabulary: int) -> None:
    """Give tokens with a meaning of their own ids that the small vocabulary has, each another."""
    large = [key for key, value in vars(config).items() if key.endswith(IDS) and type(value) is int]
    for number, key in enumerate(key for key in large if getattr(config, key) >= vocabulary):
        setattr(config, key, vocabulary - 1 - number)


def _shrink_tower(config: Any, width: int) -> None:
    """Shrink the vision tower of a config in place, and the images that it takes.

    Args:
        width: features of the small language model.
    """
    tower = getattr(config, VISION)
    layers = max([2, *(_furthest(getattr(config, key, None)) for key in CHOSEN_LAYERS)])
    fewer = next((key for key in TOWER_LAYERS if _is_size(tower, key)), "")
    if fewer and layers < getattr(tower, fewer):
        setattr(tower, fewer, layers)
        for key, found in vars(tower).items():
            if key.endswith(OF_TOWERS_LAYERS) and isinstance(found, list):
                setattr(tower, key, sorted({min(index, layers - 1) for index in found}))
    heads = next((key for key in TOWER_HEADS if _is_size(tower, key)), "")
    for key in TOWER_WIDTH if heads else ():
        if _is_size(tower, key):
            setattr(tower, key, HEADS_KEPT * HEAD_SIZE)
            setattr(tower, heads, HEADS_KEPT)
            if _is_size(tower, "head_dim"):
                tower.head_dim = HEAD_SIZE
    for key in HIDDEN:
        if _is_size(tower, key):
            setattr(tower, key, 2 * HEADS_KEPT * HEAD_SIZE)
    if _is_size(tower, "out_hidden_size") and width:
        tower.out_hidden_size = width
    _shrink_images(config, tower)


def _shrink_images(config: Any, tower: Any) -> None:
    """Make images few patches large, as many as pooling and shuffling need."""
    if not _is_size(tower, "image_size") or not _is_size(tower, "patch_size"):
        return
    side = 2 * max([1, *(getattr(config, key) for key in MERGED if _is_size(config, key))])
    if _is_size(config, "mm_tokens_per_image"):
        config.mm_tokens_per_image, side = 4, 4
    large, small = tower.image_size, side * tower.patch_size
    if small >= large:
        return
    tower.image_size = small
    for key, sizes in vars(config).items():
        if isinstance(sizes, (list, tuple)) and all(_is_in_images(size, large) for size in sizes):
            setattr(config, key, [[each // large * small for each in size] for size in sizes])


def _is_in_images(size: Any, side: int) -> bool:
    """Return whether a size (height, width) is that of several whole images side by side, which parts are cut to."""
    return isinstance(size, (list, tuple)) and len(size) == 2 and all(type(n) is int and n % side == 0 for n in size)


def _furthest(layers: Any) -> int:
    """Return how many layers a tower needs that outputs of these layers are taken from; 0 where none is named."""
    named = layers if isinstance(layers, (list, tuple)) else [layers]
    return max((-index if index < 0 else index for index in named if isinstance(index, int)), default=0)


def _is_size(config: Any, key: str) -> bool:
    is_property = isinstance(getattr(type(config), key, None), property)
    return not is_property and isinstance(value := getattr(config, key, None), int) and value > 0
