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

LAYERS = ("num_hidden_layers", "n_layers", "n_layer", "num_layers")
WIDTH = ("hidden_size", "n_embd", "d_model", "dim")
HEADS = ("num_attention_heads", "n_heads", "n_head")
KEY_HEADS = ("num_key_value_heads", "n_kv_heads", "num_kv_heads")
HIDDEN = ("intermediate_size", "hidden_dim", "ffn_dim", "n_inner", "ffn_hidden_size", "dff", "dim_ff")
EXPERT_HIDDEN = ("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size")
EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
TOP_K = ("num_experts_per_tok", "moe_k")
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
