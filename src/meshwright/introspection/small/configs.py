"""Shrink configs to models of the same structure, small enough to be measured in a moment.

The keys are the usual ones of transformers' configs and of ``DecoderConfig``. Whether a small model has the structure
of the large is not taken on trust: its blocks must have the same modules and parameters.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from meshwright.core.names import EXPERT_HIDDEN, EXPERTS, HEADS, HIDDEN, KEY_HEADS, LAYERS, TOP_K, WIDTH

# --- shrink configs to models of the same structure, small enough to be measured in a moment

FEW_EXPERTS = 16
LATENT = ("q_lora_rank", "kv_lora_rank")
ROTATED = "qk_rope_head_dim"
LINEAR_HEADS = ("linear_num_heads", "linear_num_key_heads", "linear_num_value_heads")
LINEAR_SIZES = ("linear_head_dim", "linear_key_head_dim", "linear_value_head_dim")
HEAD_PARTS = ("qk_nope_head_dim", ROTATED, "v_head_dim")
"""Latent attention's features of a head: query and key without rotation, with rotation, and value."""
CHUNKS = ("chunk_size", "mamba_chunk_size")
"""Tokens that linear recurrences process at once: shorter sequences are padded to that length."""
FEW_TOKENS = 8
VOCABULARY = 307
HEAD_SIZES = (8, 64)
"""Features of a head to try before the model's own."""


@dataclass(frozen=True)
class Small:
    """A config with changes; the large model has ``heads`` times the heads of the small one."""

    source: Any
    changes: dict[str, Any]
    heads: int = 1

    @property
    def config(self) -> Any:
        """A fresh config; raises whatever the config's class raises for values that do not go together."""
        return _replaced(self.source, self.changes)


def small_configs(config: Any, blocks: int, ranks: int, *, few_experts: bool = False) -> Iterator[Small]:
    """Yield smaller configs, smallest first, then the config itself with at most ``blocks`` blocks.

    Args:
        ranks: size of the tensor axis; it divides the reduced number of heads wherever it divides the config's.
        few_experts: reduce large numbers of experts in a layer.
    """
    layers = _fewer_layers(config, blocks) | {
        name: FEW_TOKENS for name in CHUNKS if (_get(config, (name,)) or 0) > FEW_TOKENS
    }
    fewer = _fewer_experts(config) if few_experts else {}
    for experts in (fewer, {}) if fewer else ({},):
        yield from _narrow_configs(config, layers | experts, ranks)
    yield Small(config, layers)


def _narrow_configs(config: Any, layers: dict[str, Any], ranks: int) -> Iterator[Small]:
    heads, width = _get(config, HEADS), _get(config, WIDTH)
    if heads is not None and width is not None:
        key_heads = _get(config, KEY_HEADS) or heads
        key_heads = heads if heads % key_heads else key_heads  # a key that its model does not know
        for kept in dict.fromkeys(filter(None, (_kept(key_heads, ranks), key_heads))):
            shared = heads // key_heads * kept
            sizes = dict.fromkeys((*HEAD_SIZES, _head_size(config, heads, width)))
            for size in sizes if width > shared * HEAD_SIZES[0] else ():
                if width >= shared * size:
                    yield Small(config, layers | _narrow(config, shared, kept, size, ranks), key_heads // kept)


def _kept(key_heads: int, ranks: int) -> int | None:
    """Return the fewest key heads that ``ranks`` share as they share all, or else the fewest that show groups."""
    if ranks % key_heads == 0:
        return key_heads
    kept = math.lcm(2, ranks)
    return kept if key_heads % kept == 0 else next((n for n in range(2, key_heads + 1) if key_heads % n == 0), None)


def _narrow(config: Any, heads: int, key_heads: int, size: int, ranks: int) -> dict[str, Any]:
    width = heads * size
    changes: dict[str, Any] = {}
    hidden = 4 * math.lcm(2, ranks)
    for names, value in (
        (WIDTH, width),
        (HEADS, heads),
        (KEY_HEADS, key_heads),
        (HIDDEN + EXPERT_HIDDEN, hidden),
        (LATENT, 2 * size),
    ):
        changes |= {name: value for name in names if isinstance(_own(config, name), int)}
    if isinstance(found := _own(config, "rotary_dim"), int) and found > size:
        changes["rotary_dim"] = size // 2
    if isinstance(_own(config, "head_dim"), int):
        changes["head_dim"] = size
    changes |= _narrow_parts(config, size) | _narrow_others(config, heads, size)
    if (_get(config, ("vocab_size",)) or 0) > VOCABULARY:
        changes["vocab_size"] = VOCABULARY
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if isinstance(found := _own(config, name), int) and found >= VOCABULARY:
            changes[name] = 1
    return changes


def _narrow_parts(config: Any, size: int) -> dict[str, int]:
    """Shrink heads that consist of parts of several sizes, in proportion."""
    parts = {name: found for name in HEAD_PARTS if isinstance(found := _own(config, name), int)}
    unit = math.gcd(*parts.values())
    if ROTATED not in parts or unit <= size // 2:
        return {}
    found = {name: part // unit * (size // 2) for name, part in parts.items()}
    whole = {name: found[ROTATED] for name in ("head_dim",) if _own(config, name) == parts[ROTATED]}
    if isinstance(_own(config, "qk_head_dim"), int):
        whole["qk_head_dim"] = sum(found.get(name, 0) for name in HEAD_PARTS[:2])
    return found | whole


def _narrow_others(config: Any, heads: int, size: int) -> dict[str, int]:
    """Shrink other attention in proportion: ``swa_num_attention_heads`` and the like, and linear attention."""
    of_all, found = _get(config, HEADS) or heads, {}
    of_head = _head_size(config, of_all, _get(config, WIDTH) or size)
    for prefix in [name.removesuffix(HEADS[0]) for name in vars(config) if name.endswith(f"_{HEADS[0]}")]:
        counts = (prefix + HEADS[0], prefix + KEY_HEADS[0])
        found |= _scaled(config, counts, heads, of_all) | _scaled(
            config, (prefix + "head_dim", prefix + "v_head_dim"), size, of_head
        )
    found |= _narrow_sections(config, size)
    return found | _scaled(config, LINEAR_HEADS, heads, of_all) | _scaled(config, LINEAR_SIZES, size, of_head)


def _narrow_sections(config: Any, size: int) -> dict[str, Any]:
    """Shrink the parts of a head that are rotated by positions of their own: by time, height and width."""
    found: dict[str, Any] = {}
    for key in ("rope_parameters", "rope_scaling"):
        value = _own(config, key)
        sections = value.get("mrope_section") if isinstance(value, dict) else None
        if isinstance(sections, (list, tuple)) and 1 < len(sections) <= size // 2:
            part = size // 2 // len(sections)
            parts = [part] * (len(sections) - 1)
            found[key] = {**value, "mrope_section": [*parts, size // 2 - sum(parts)]}
    return found


def _scaled(config: Any, names: tuple[str, ...], small: int, large: int) -> dict[str, int]:
    """Scale by ``small / large`` the values that stay whole numbers."""
    values = {name: value for name in names if isinstance(value := _own(config, name), int)}
    return {
        name: value * small // large
        for name, value in values.items()
        if value * small >= large and value * small % large == 0
    }


def _head_size(config: Any, heads: int, width: int) -> int:
    return _get(config, ("head_dim",)) or width // heads


def _fewer_layers(config: Any, blocks: int) -> dict[str, Any]:
    """Reduce the number of layers, and shorten lists with one entry per layer (kinds of layers, by any name)."""
    for name in LAYERS:
        if isinstance(found := _own(config, name), int) and blocks < found:
            lists = {
                key: value
                for key, value in vars(config).items()
                if isinstance(value, (list, tuple)) and len(value) == found
            }
            return {name: blocks} | {key: list(value)[:blocks] for key, value in lists.items()}
    return {}


def _fewer_experts(config: Any) -> dict[str, Any]:
    """Reduce experts to a number that leaves tokens a choice, in the same number of groups, at least two in each."""
    top_k, groups = _get(config, TOP_K), _get(config, ("n_group",)) or 1
    if top_k is None:
        return {}
    few = groups * max(2, -(-max(FEW_EXPERTS, 2 * top_k) // groups))
    return {name: few for name in EXPERTS if isinstance(found := _own(config, name), int) and found > few}


def _get(config: Any, names: tuple[str, ...]) -> int | None:
    return next((found for name in names if isinstance(found := _value(config, name), int) and found > 0), None)


def _value(config: Any, name: str) -> Any:
    """Return a config's value; None also where the config refuses to give it, as layers may have their own values."""
    try:
        return getattr(config, name, None)
    except Exception:  # noqa: BLE001  (whatever a config's class raises)
        return None


def stated_width(model: Any) -> int | None:
    """Return the number of features of the residual stream, where the model's config states it."""
    config = getattr(model, "config", None)
    if callable(of_text := getattr(config, "get_text_config", None)):
        config = of_text()  # of a model of images and text, the language model's
    return None if config is None else _get(config, WIDTH)


def _own(config: Any, name: str) -> Any:
    """Return a value that can be set; None for a property, which cannot."""
    is_property = isinstance(getattr(type(config), name, None), property)
    return None if is_property else _value(config, name)


def _replaced(config: Any, changes: dict[str, Any]) -> Any:
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        names = {field.name for field in dataclasses.fields(config)}
        try:
            return dataclasses.replace(config, **{key: value for key, value in changes.items() if key in names})
        except TypeError:  # a config class of transformers: keys are not the constructor's alone
            pass
    made = copy.deepcopy(config)
    for key, value in changes.items():
        setattr(made, key, value)
    return made


# --- shrink configs of several models in one

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
