"""Shrink configs to models of the same structure, small enough to be measured in a moment.

The keys are the usual ones of transformers' configs and of ``DecoderConfig``. Whether a small model has the structure
of the large is not taken on trust: its blocks must have the same modules and parameters.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from meshwright.core.names import EXPERT_HIDDEN, EXPERTS, HEADS, HIDDEN, KEY_HEADS, LAYERS, TOP_K, WIDTH

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
    """A smaller config: ``build`` makes a fresh one; the large model has ``heads`` times the heads of the small one.

    ``build`` raises whatever the config's class raises for values that do not go together.
    """

    build: Callable[[], Any]
    heads: int = 1


def small_configs(config: Any, blocks: int, ranks: int, *, few_experts: bool = False) -> Iterator[Small]:
    """Yield smaller configs, smallest first, then the config itself with at most ``blocks`` blocks.

    Args:
        ranks: size of the tensor axis; it divides the reduced number of heads wherever it divides the config's.
        few_experts: reduce large numbers of experts in a layer.
    """
    changes: dict[str, Any] = {name: FEW_TOKENS for name in CHUNKS if (_get(config, (name,)) or 0) > FEW_TOKENS}
    name = next((name for name in LAYERS if isinstance(found := _own(config, name), int) and blocks < found), "")
    if name:  # lists with one entry per layer (kinds of layers, by any name) are shortened
        lists = {key: value for key, value in vars(config).items() if isinstance(value, (list, tuple))}
        layers = _own(config, name)
        changes |= {key: list(value)[:blocks] for key, value in lists.items() if len(value) == layers}
        changes[name] = blocks
    fewer: dict[str, Any] = {}
    if few_experts and (top_k := _get(config, TOP_K)) is not None:
        # a number that leaves tokens a choice, in the same number of groups, at least two in each
        groups = _get(config, ("n_group",)) or 1
        few = groups * max(2, -(-max(FEW_EXPERTS, 2 * top_k) // groups))
        fewer = {name: few for name in EXPERTS if isinstance(found := _own(config, name), int) and found > few}
    heads, width = _get(config, HEADS), _get(config, WIDTH)
    for experts in (fewer, {}) if fewer else ({},):
        if heads is None or width is None:
            continue
        key_heads = _get(config, KEY_HEADS) or heads
        key_heads = heads if heads % key_heads else key_heads  # a key that its model does not know
        # the fewest key heads that ranks share as they share all, or else the fewest that show groups
        few = math.lcm(2, ranks)
        if ranks % key_heads == 0:
            few = key_heads
        elif key_heads % few:
            few = next((n for n in range(2, key_heads + 1) if key_heads % n == 0), key_heads)
        for kept in dict.fromkeys((few, key_heads)):
            shared = heads // key_heads * kept
            for size in dict.fromkeys((*HEAD_SIZES, _head_size(config, heads, width))):
                if width > shared * HEAD_SIZES[0] and width >= shared * size:
                    narrow = _narrow(config, shared, kept, size, ranks)
                    yield Small(partial(_replaced, config, changes | experts | narrow), key_heads // kept)
    yield Small(partial(_replaced, config, changes))


def _narrow(config: Any, heads: int, key_heads: int, size: int, ranks: int) -> dict[str, Any]:
    """Return the values of a config with these heads of ``size`` features, and all else in proportion."""
    changes: dict[str, Any] = {}
    for names, value in (
        (WIDTH, heads * size),
        (HEADS, heads),
        (KEY_HEADS, key_heads),
        (HIDDEN + EXPERT_HIDDEN, 4 * math.lcm(2, ranks)),
        (LATENT, 2 * size),
        (("head_dim",), size),
    ):
        changes |= {name: value for name in names if isinstance(_own(config, name), int)}
    if isinstance(found := _own(config, "rotary_dim"), int) and found > size:
        changes["rotary_dim"] = size // 2
    # heads that consist of parts of several sizes
    parts = {name: found for name in HEAD_PARTS if isinstance(found := _own(config, name), int)}
    unit = math.gcd(*parts.values())
    if ROTATED in parts and unit > size // 2:
        changes |= {name: part // unit * (size // 2) for name, part in parts.items()}
        if _own(config, "head_dim") == parts[ROTATED]:
            changes["head_dim"] = changes[ROTATED]
        if isinstance(_own(config, "qk_head_dim"), int):
            changes["qk_head_dim"] = sum(changes.get(name, 0) for name in HEAD_PARTS[:2] if name in parts)
    # other attention, swa_num_attention_heads and the like, and linear attention
    of_all = _get(config, HEADS) or heads
    of_head = _head_size(config, of_all, _get(config, WIDTH) or size)
    prefixes = [name.removesuffix(HEADS[0]) for name in vars(config) if name.endswith(f"_{HEADS[0]}")]
    counts = [*LINEAR_HEADS, *(prefix + name for prefix in prefixes for name in (HEADS[0], KEY_HEADS[0]))]
    sizes = [*LINEAR_SIZES, *(prefix + name for prefix in prefixes for name in ("head_dim", "v_head_dim"))]
    for names, small, large in ((counts, heads, of_all), (sizes, size, of_head)):
        values = {name: value * small for name in names if isinstance(value := _own(config, name), int)}
        changes |= {name: n // large for name, n in values.items() if n >= large and n % large == 0}
    # parts of a head that are rotated by positions of their own: by time, height and width
    for key in ("rope_parameters", "rope_scaling"):
        value = _own(config, key)
        sections = value.get("mrope_section") if isinstance(value, dict) else None
        if isinstance(sections, (list, tuple)) and 1 < len(sections) <= size // 2:
            part = size // 2 // len(sections)
            sections = [part] * (len(sections) - 1)
            changes[key] = {**value, "mrope_section": [*sections, size // 2 - sum(sections)]}
    if (_get(config, ("vocab_size",)) or 0) > VOCABULARY:
        changes["vocab_size"] = VOCABULARY
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if isinstance(found := _own(config, name), int) and found >= VOCABULARY:
            changes[name] = 1
    return changes


def _head_size(config: Any, heads: int, width: int) -> int:
    return _get(config, ("head_dim",)) or width // heads


def _get(config: Any, names: tuple[str, ...]) -> int | None:
    return next((found for name in names if isinstance(found := _value(config, name), int) and found > 0), None)


def _own(config: Any, name: str) -> Any:
    """Return a config's value that can be set; None for a property, which cannot."""
    return None if isinstance(getattr(type(config), name, None), property) else _value(config, name)


def _value(config: Any, name: str) -> Any:
    """Return a config's value; None also where the config refuses to give it, as layers may have their own values."""
    try:
        return getattr(config, name, None)
    except Exception:  # noqa: BLE001  (whatever a config's class raises)
        return None


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


def text_config(model: Any) -> Any:
    """Return a model's config, of a model of images and text the language model's; None where it has none."""
    config = getattr(model, "config", None)
    return of_text() if callable(of_text := getattr(config, "get_text_config", None)) else config


def stated_width(model: Any) -> int | None:
    """Return the number of features of the residual stream, where the model's config states it."""
    config = text_config(model)
    return None if config is None else _get(config, WIDTH)


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

    def build(text: Small) -> Any:
        made, small = copy.deepcopy(config), text.build()
        setattr(made, key, small)
        # tokens with a meaning of their own have ids that the small vocabulary has, each another
        vocabulary = int(getattr(small, "vocab_size", VOCABULARY))
        ids = [name for name, value in vars(made).items() if name.endswith(IDS) and type(value) is int]
        for number, name in enumerate(name for name in ids if getattr(made, name) >= vocabulary):
            setattr(made, name, vocabulary - 1 - number)
        _shrink_tower(made, int(getattr(small, "hidden_size", 0)))
        return made

    for text in small_configs(getattr(config, key), blocks, ranks, few_experts=few_experts):
        yield Small(partial(build, text), text.heads)


def _shrink_tower(config: Any, width: int) -> None:
    """Shrink the vision tower of a config in place, and the images that it takes, for a language model of ``width``."""
    tower = getattr(config, VISION)
    chosen = [getattr(config, key, None) for key in CHOSEN_LAYERS]  # one or several, from either end
    numbers = [index for named in chosen for index in (named if isinstance(named, (list, tuple)) else [named])]
    layers = max([2, *(-index if index < 0 else index for index in numbers if isinstance(index, int))])
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
    if not _is_size(tower, "image_size") or not _is_size(tower, "patch_size"):
        return
    # images are few patches large, as many as pooling and shuffling need
    side = 2 * max([1, *(getattr(config, key) for key in MERGED if _is_size(config, key))])
    if _is_size(config, "mm_tokens_per_image"):
        config.mm_tokens_per_image, side = 4, 4
    large, small = tower.image_size, side * tower.patch_size
    if small >= large:
        return
    tower.image_size = small

    def is_of_images(size: Any) -> bool:  # (height, width) of whole images side by side, which parts are cut to
        is_pair = isinstance(size, (list, tuple)) and len(size) == 2
        return is_pair and all(type(n) is int and n % large == 0 for n in size)

    for key, sizes in vars(config).items():
        if isinstance(sizes, (list, tuple)) and all(map(is_of_images, sizes)):
            setattr(config, key, [[each // large * small for each in size] for size in sizes])


def _is_size(config: Any, key: str) -> bool:
    return isinstance(value := _own(config, key), int) and value > 0
