"""Find a model of transformers that computes what our decoder does.

The user names the model type. Its config is made of the standard keys; its parameters and buffers are matched by
place (in which block, or outside), shape and the words in their names; the proof decides whether the match was right.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.comparison.equality import relative_errors
from meshwright.core.errors import ConfigError, UnsupportedError, nearest
from meshwright.core.names import is_within
from meshwright.introspection.constructor.meta import on_meta
from meshwright.introspection.facts import ModelFacts, model_facts
from meshwright.introspection.source import CausalLM, import_transformers
from meshwright.models.decoder import Decoder, rotary_frequencies
from meshwright.models.decoder_config import DecoderConfig, MoEConfig
from meshwright.models.moe import Router
from meshwright.training.config import Config
from meshwright.training.model_source import decoder_config
from meshwright.training.run.convert import Counterpart
from meshwright.training.tokenizer import own_tokenizer

from .problem import shrunk

# --- build a transformers config in the sizes of our decoder, from the standard keys that its type knows


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


# --- find a model of transformers that computes what our decoder does, and prove it by equal logits

LIMIT = 1e-6
"""Largest relative difference of logits in float64, as models with norms, angles and routers in float32 cause it."""
SHOWN = 4
Shapes = dict[str, tuple[int, ...]]
ROUTER_BIAS = 0.1
"""Standard deviation of the bias in the proof: as wide as the scores, so that both influence the choice."""

_SHARED = ("shared experts", "shared expert", "shared mlp")
WORDS: dict[tuple[str, ...], tuple[str, ...]] = {
    (".attention.wq.weight",): ("q",),
    (".attention.wk.weight",): ("k",),
    (".attention.wv.weight",): ("v",),
    (".attention.wo.weight",): ("o", "out", "dense"),
    (".attention.q_norm.weight",): ("q norm", "q layernorm", "query layernorm"),
    (".attention.k_norm.weight",): ("k norm", "k layernorm", "key layernorm"),
    (".feed_forward.w_gate.weight",): ("gate", "w1"),
    (".feed_forward.w_up.weight",): ("up", "w3"),
    (".feed_forward.w_down.weight",): ("down", "w2"),
    (".feed_forward.experts.w_gate", ".feed_forward.experts.w_up"): ("experts gate up",),
    (".feed_forward.experts.w_down",): ("experts down",),
    (".feed_forward.shared.w_gate.weight",): tuple(f"{shared} gate" for shared in _SHARED),
    (".feed_forward.shared.w_up.weight",): tuple(f"{shared} up" for shared in _SHARED),
    (".feed_forward.shared.w_down.weight",): tuple(f"{shared} down" for shared in _SHARED),
    (".feed_forward.router.weight",): ("gate", "gate wg", "router"),
    (".feed_forward.router.bias",): ("correction bias", "expert bias"),
}
"""Our tensors of a block, several where they are joined elsewhere → words that name the same tensor there.

The two norms before attention and feed-forward are matched by order."""


def of_decoder(folder: Path, config: Config, kind: str) -> Counterpart:
    """Find the counterpart of a run's decoder among the models of type ``kind``.

    Raises:
        ConfigError: transformers has no such model type, or the run's model is one of transformers already.
        UnsupportedError: the counterpart does not compute the same; the message names the difference.
    """
    if config.model.hf:
        raise ConfigError(f"--like = {kind}: the model of {folder} is a Hugging Face model already; leave --like out")
    tokenizer = own_tokenizer(config, folder)
    ours = decoder_config(config, tokenizer)
    if ours.moe is not None and ours.moe.capacity_factor:
        raise UnsupportedError(
            f"--like = {kind}: the run's model.moe.capacity_factor is {ours.moe.capacity_factor:g}: experts that are"
            f" full drop tokens, and those of transformers drop none. A run with capacity_factor = 0 can be converted"
        )
    prove(shrunk(ours), kind)
    source = counterpart(ours, kind, tokenizer.end_of_document)
    return Counterpart(source, matched(ours, source), source.config.to_dict())


def matched(ours: DecoderConfig, source: CausalLM) -> dict[str, tuple[str, ...]]:
    """Match the counterpart's parameters and saved buffers with ours.

    Returns:
        Name of theirs → names of ours, concatenated along the last dim but one; an empty tuple stands for zeros.

    Raises:
        UnsupportedError: transformers cannot build the model, or parameters on one side have no counterpart.
    """
    with on_meta():
        here, there = model_facts(Decoder(ours)), model_facts(_built(source))
    if len(here.blocks) != len(there.blocks):
        raise UnsupportedError(
            f"{there.kind} has {len(there.blocks)} blocks in these sizes, and the run's model {len(here.blocks)}"
        )
    mine, theirs = _shapes(here), _shapes(there)
    found: dict[str, tuple[str, ...]] = {}
    for one, other in zip(("", *here.blocks), ("", *there.blocks), strict=True):
        pairs = _matched_unit(_within(mine, one, here.blocks), _within(theirs, other, there.blocks))
        found |= {f"{other}{name}": tuple(f"{one}{own}" for own in names) for name, names in pairs.items()}
    buffers = {buffer.name for buffer in there.buffers}
    zeros = {
        name: () for name, shape in theirs.items() if name not in found and (name in buffers or not math.prod(shape))
    }
    strangers = [name for name in theirs if name not in found and name not in zeros]
    lost = [name for name in mine if name not in {own for names in found.values() for own in names}]
    if strangers or lost:
        sides = [
            f"{len(names)} of {whose} have no counterpart"
            f" ({', '.join(names[:SHOWN])}{' …' if len(names) > SHOWN else ''})"
            for names, whose in ((lost, "the run's parameters"), (strangers, f"the parameters of {there.kind}"))
            if names
        ]
        differences = "; ".join([*sides, *_missing_keys(ours, source)])
        raise UnsupportedError(
            f"{there.kind} is not built like the run's model: {differences}. Name another type with --like"
        )
    return found | zeros


def _built(source: CausalLM) -> nn.Module:
    try:
        return source()
    except ConfigError as error:
        kind = source.config.model_type
        raise UnsupportedError(
            f"--like = {kind}: transformers builds no such model in the sizes of the run's: {error.__cause__}"
        ) from error


def _shapes(facts: ModelFacts) -> Shapes:
    """Return the shapes of parameters and saved buffers."""
    return {p.name: p.shape for p in facts.parameters} | {b.name: b.shape for b in facts.buffers if b.persistent}


def _within(shapes: Shapes, block: str, blocks: tuple[str, ...]) -> Shapes:
    """Return the shapes in a block, by the rest of their names, or (for block "") those outside all blocks."""
    if not block:
        return {name: shape for name, shape in shapes.items() if not any(is_within(name, other) for other in blocks)}
    return {name.removeprefix(block): shape for name, shape in shapes.items() if is_within(name, block)}


def _matched_unit(mine: Shapes, theirs: Shapes) -> dict[str, tuple[str, ...]]:
    """Map theirs to ours of the same shape: first tensors with words of their own, then the others in order."""
    found: dict[str, tuple[str, ...]] = {}
    by_words = {names: words for names, words in WORDS.items() if mine.keys() >= set(names)}
    unnamed = [name for name in theirs if not by_words or not any(_ends_with(name, words) for words in WORDS.values())]
    candidates = {names: [name for name in theirs if _ends_with(name, words)] for names, words in by_words.items()}
    candidates |= {(own,): unnamed for own in mine if not any(own in names for names in by_words)}
    for names, others in candidates.items():
        shape = _joined([mine[name] for name in names])
        chosen = next((name for name in others if theirs[name] == shape and name not in found), None)
        if chosen is not None:
            found[chosen] = names
    return found


def _joined(shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    first, *others = shapes
    return (*first[:-2], first[-2] + sum(shape[-2] for shape in others), first[-1]) if others else first


def _ends_with(name: str, words: tuple[str, ...]) -> bool:
    """Return whether the words of a name end with one of ``words``; "proj" and "weight" do not count."""
    parts = [word for word in re.split(r"[._]", name) if word not in ("proj", "weight")]
    return any(parts[-len(text.split()) :] == text.split() for text in words)


def _missing_keys(ours: DecoderConfig, source: CausalLM) -> list[str]:
    keys = ", ".join(f"model.moe.{key}" for key in missing_keys(ours, source.config))
    return [f"its config has no key for {keys}"] if keys else []


def prove(ours: DecoderConfig, kind: str) -> float:
    """Compare the logits of our decoder and its counterpart, in float64, on random weights and tokens.

    Returns:
        Their relative difference.

    Raises:
        UnsupportedError: the logits differ, or the counterpart does not take the sizes.
    """
    source = dataclasses.replace(counterpart(ours, kind), dtype="float64")
    made_of = matched(ours, source)
    generator = torch.Generator().manual_seed(0)
    mine, theirs = Decoder(ours).double().eval(), source().double().eval()
    _fill(mine, generator)
    own, state = mine.state_dict(), theirs.state_dict()
    for name, names in made_of.items():
        parts = [own[each] for each in names]
        state[name].copy_(
            torch.cat(parts, -2) if len(parts) > 1 else parts[0] if parts else torch.zeros_like(state[name])
        )
    tokens = torch.randint(0, ours.vocab_size, (8, min(16, ours.max_seq_len)), generator=generator)
    with torch.no_grad():
        one: Tensor = mine(tokens)
        try:
            other: Tensor = theirs(input_ids=tokens).logits
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            message = " ".join(str(error).split())
            raise UnsupportedError(
                f"{type(theirs).__name__} cannot compute in the sizes of the run's model: {message}"
            ) from error
    error = relative_errors({"logits": other}, {"logits": one})["logits"]
    if not error <= LIMIT:
        far = f"the logits are {error:.1e} (relative) apart, and {LIMIT:.0e} is rounding"
        differences = "; ".join([far, *_missing_keys(ours, source)])
        raise UnsupportedError(
            f"{type(theirs).__name__} does not compute what the run's model does: on a small copy with equal weights"
            f" {differences}. Nothing was written; name another type with --like"
        )
    return error


@torch.no_grad()
def _fill(model: nn.Module, generator: torch.Generator) -> None:
    """Draw random weights that keep tokens apart, so that routers send them to different experts.

    The biases of routers are drawn too, to change some of the choices."""
    for parameter in model.parameters():
        drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.copy_(drawn * parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 1 + drawn / 4)
    for router in (module for module in model.modules() if isinstance(module, Router)):
        if router.bias is not None:
            router.bias.copy_(torch.randn(router.bias.shape, generator=generator, dtype=torch.float64) * ROUTER_BIAS)
