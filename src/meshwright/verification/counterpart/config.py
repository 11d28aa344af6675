"""Build a transformers config in the sizes of our decoder, from the standard keys that its type knows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from meshwright.core.errors import ConfigError, UnsupportedError, nearest
from meshwright.introspection.huggingface import CausalLM, import_transformers
from meshwright.models.decoder import rotary_frequencies
from meshwright.models.decoder_config import DecoderConfig, MoEConfig


def counterpart(ours: DecoderConfig, kind: str, end: int | None = None) -> CausalLM:
    """Build a model of type ``kind`` in the sizes of ours.

    Raises:
        ConfigError: transformers has no such model type.
        UnsupportedError: its config has no keys for experts and ours has some, or for none of its forms of rotary
            positions are the frequencies ours.
    """
    transformers = import_transformers("--like")
    from huggingface_hub.errors import StrictDataclassError
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as known

    if kind not in known:
        raise ConfigError(
            f"--like = {kind!r} is no model type with a causal language model in transformers.{nearest(kind, known)}"
        )
    sizes: dict[str, Any] = {
        "vocab_size": ours.vocab_size,
        "hidden_size": ours.dim,
        "intermediate_size": ours.hidden_dim,
        "num_hidden_layers": ours.n_layers,
        "num_attention_heads": ours.n_heads,
        "num_key_value_heads": ours.n_kv_heads,
        "head_dim": ours.head_dim,
        "max_position_embeddings": ours.max_seq_len,
        "rms_norm_eps": ours.norm_eps,
        "tie_word_embeddings": ours.tied_embeddings,
        "bos_token_id": None,
        "eos_token_id": end,
        "pad_token_id": None,
    }
    default: Any = transformers.AutoConfig.for_model(kind)
    if ours.moe is not None and not knows(default, _mixture(ours)["n_experts"]):
        raise UnsupportedError(
            f"--like = {kind}: its config has no key for a number of experts. Name a type that has experts"
        )
    sizes |= _more_sizes(ours, default)
    config_class = type(default)
    try:
        made = config_class(**sizes, rope_parameters={"rope_type": "default", "rope_theta": ours.rope_theta})
        if getattr(made, "sliding_window", None) is not None:
            sizes["sliding_window"] = None
            made = config_class(**sizes, rope_parameters=made.rope_parameters)
        if (made.rope_parameters or {}).get("partial_rotary_factor", 1.0) != 1.0:
            sizes["partial_rotary_factor"] = 1.0
            made = config_class(**sizes, rope_parameters={"rope_type": "default", "rope_theta": ours.rope_theta})
        if ours.rope_scaling is not None:
            made = config_class(**sizes, rope_parameters=_scaled(ours, made, kind))
    except (TypeError, ValueError, AttributeError, StrictDataclassError) as error:
        message = " ".join(str(error).split())
        raise UnsupportedError(
            f"--like = {kind}: its config does not take the sizes of the run's model: {message}"
        ) from error
    if others := {kind for kind in getattr(made, "layer_types", None) or () if kind != "full_attention"}:
        raise UnsupportedError(
            f"--like = {kind}: some of its layers have {', '.join(sorted(others))}, and those of the run's model have"
            f" not"
        )
    return CausalLM(made)


def knows(config: Any, keys: Iterable[str]) -> tuple[str, ...]:
    """Return those of ``keys`` that a config of transformers has, under other names too."""
    known = config.to_dict().keys() | config.attribute_map.keys()
    return tuple(key for key in keys if key in known)


def missing_keys(ours: DecoderConfig, config: Any) -> tuple[str, ...]:
    """Return our mixture keys that are not at their defaults and that a config of transformers cannot express."""
    mixture = {} if ours.moe is None else _mixture(ours)
    return tuple(
        key
        for key, theirs in mixture.items()
        if getattr(ours.moe, key) != getattr(MoEConfig, key) and not knows(config, theirs)
    )


def _more_sizes(ours: DecoderConfig, default: Any) -> dict[str, Any]:
    """Return the keys that only some configs have.

    An expert is as wide as a dense feed-forward where one key sets both widths."""
    found: dict[str, Any] = {"use_qk_norm": ours.qk_norm}
    if ours.moe is not None:
        found |= {"moe_intermediate_size": ours.expert_dim}
        for theirs in _mixture(ours).values():
            found |= theirs
    found = {key: found[key] for key in knows(default, found)}
    return (
        found
        if ours.moe is None or "moe_intermediate_size" in found
        else found | {"intermediate_size": ours.expert_dim}
    )


def _mixture(ours: DecoderConfig) -> dict[str, dict[str, Any]]:
    """Map our mixture keys, without the width of an expert, to the equivalent keys elsewhere and their values."""
    moe = ours.moe
    assert moe is not None
    dense, shared = moe.first_dense, moe.n_shared
    return {
        "n_experts": _all(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), moe.n_experts),
        "top_k": {"num_experts_per_tok": moe.top_k},
        "n_shared": {
            **_all(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), shared),
            **_all(("shared_expert_intermediate_size", "shared_intermediate_size"), shared * ours.expert_dim),
        },
        "first_dense": {
            **_all(("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"), dense),
            "mlp_only_layers": list(range(dense)),
            "mlp_layer_types": ["dense"] * dense + ["sparse"] * (ours.n_layers - dense),
            "decoder_sparse_step": 1,
        },
        "router": {"scoring_func": moe.router},
        "n_groups": {"n_group": moe.n_groups},
        "top_groups": {"topk_group": moe.top_groups},
        "normalise": {"norm_topk_prob": moe.normalise},
        "scale": _all(("routed_scaling_factor", "router_scaling_factor"), moe.scale),
    }


def _all(keys: tuple[str, ...], value: Any) -> dict[str, Any]:
    return dict.fromkeys(keys, value)


def _scaled(ours: DecoderConfig, plain: Any, kind: str) -> dict[str, Any]:
    """Find the form of scaled rotary positions that gives our frequencies."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    assert ours.rope_scaling is not None
    s = ours.rope_scaling
    keys = {"factor": s.factor, "low_freq_factor": s.low_freq_factor, "high_freq_factor": s.high_freq_factor}
    keys = {"rope_theta": ours.rope_theta, "original_max_position_embeddings": s.original_max_seq_len, **keys}
    wanted = rotary_frequencies(ours, torch.device("cpu"), torch.float32)
    for name, frequencies in ROPE_INIT_FUNCTIONS.items():
        plain.rope_parameters = {"rope_type": name, **keys}
        try:
            found, factor = frequencies(plain, torch.device("cpu"))
        except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError):
            continue  # this form needs other keys
        if factor == 1.0 and found.shape == wanted.shape and torch.allclose(found, wanted, rtol=1e-5, atol=0.0):
            return plain.rope_parameters
    raise UnsupportedError(
        f"--like = {kind}: transformers has no form of rotary positions with the frequencies of model.{s}"
    )
