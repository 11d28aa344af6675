"""Give each parameter and module one global name, and know the keys under which configs state a model's sizes."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable


@functools.lru_cache(2**14)
def clean(name: str) -> str:
    """Strip a name of the parts that torch's wrappers add (compile, checkpoint, FSDP1, DDP's leading ``module``)."""
    inner = re.sub(r"(?:_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.", "", name)
    return inner.removeprefix("module.")


@functools.lru_cache(2**14)
def pattern(name: str) -> str:
    """Replace every index in a name by ``*``, which gives one name to the same parameter of all blocks."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


@functools.lru_cache(2**14)
def owner(name: str) -> str:
    """Return the path of the module that holds the parameter ``name`` ("" for the root)."""
    return name.rpartition(".")[0]


@functools.lru_cache(2**14)
def is_within(name: str, module: str) -> bool:
    """Return whether ``name`` is the module at path ``module`` or something inside it."""
    return module == "" or name == module or name.startswith(module + ".")


@functools.lru_cache(2**14)
def around(name: str) -> tuple[str, ...]:
    """List ``name`` and the paths of the modules around it, innermost first, the root left out."""
    return (name, *around(owner(name))) if name else ()


def selected(wildcard: str, names: Iterable[str]) -> list[str]:
    """Select the names that match a pattern in which each ``*`` stands for one part of a name: ``layers.*.mlp``."""
    exact = re.compile(r"[^.]+".join(re.escape(text) for text in wildcard.split("*")))
    return [name for name in names if exact.fullmatch(name)]


def matching(patterns: tuple[str, ...] | list[str], names: list[str], what: str, kind: str = "parameter") -> set[str]:
    """Select the names that at least one regular expression matches (``re.search``).

    Args:
        what: name of the option that holds the expressions, for the error.
        kind: kind of object that the names belong to, for the error.

    Raises:
        ConfigError: an invalid expression, or one that matches nothing.
    """
    from .errors import ConfigError, nearest

    found: set[str] = set()
    for text in patterns:
        try:
            hits = {n for n in names if re.search(text, n)}
        except re.error as error:
            raise ConfigError(f"{what}: '{text}' is not a regular expression ({error})") from None
        if not hits:
            like = f" The names are like {names[0]}" if names else ""
            raise ConfigError(f"{what}: '{text}' matches no {kind} of the model.{nearest(text, names)}{like}")
        found |= hits
    return found


def under(prefix: str, name: str) -> str:
    """Return the path of a name within a module at ``prefix``; "" is the root."""
    return f"{prefix}.{name}" if prefix else name


LAYERS = ("num_hidden_layers", "n_layers", "n_layer", "num_layers")
WIDTH = ("hidden_size", "n_embd", "d_model", "dim")
HEADS = ("num_attention_heads", "n_heads", "n_head")
KEY_HEADS = ("num_key_value_heads", "n_kv_heads", "num_kv_heads")
HIDDEN = ("intermediate_size", "hidden_dim", "ffn_dim", "n_inner", "ffn_hidden_size", "dff", "dim_ff")
EXPERT_HIDDEN = ("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size")
EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
TOP_K = ("num_experts_per_tok", "moe_topk", "moe_top_k", "top_k_experts", "moe_k", "num_selected_experts", "top_k")
"""Experts that a token goes to."""
LENGTHS = ("max_seq_len", "max_position_embeddings", "n_positions")
"""Longest sequence, in tokens."""
SECTIONS = ("moe", "ffn_config", "attn_config")
"""Configs inside a config of text, as ``DecoderConfig`` and DBRX have them."""
