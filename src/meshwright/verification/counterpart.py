"""Write our decoder as a model of transformers: one of a table of families, proven by equal logits."""

from __future__ import annotations

import dataclasses
import re
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

from meshwright.comparison.equality import relative_errors
from meshwright.core.errors import ConfigError, UnsupportedError, nearest
from meshwright.introspection.constructor import on_meta
from meshwright.introspection.source import CausalLM, import_transformers
from meshwright.models.decoder import Decoder
from meshwright.models.decoder_config import DecoderConfig
from meshwright.training.config import Config
from meshwright.training.model_source import decoder_config, own_tokenizer
from meshwright.training.run.convert import Counterpart

from .problem import shrunk

PLAIN = {"experts": True, "router": "softmax", "n_shared": 0, "n_groups": 1, "scale": 1.0, "bias_rate": 0.0,
         "capacity_factor": 0.0}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"experts": False, "qk_norm": False},
    "mistral": {"experts": False, "qk_norm": False},
    "qwen3": {"experts": False, "qk_norm": True},
    "mixtral": {"qk_norm": False, "normalise": True, "first_dense": 0} | PLAIN,
    "qwen3_moe": {"qk_norm": True} | PLAIN,
    "glm4_moe": {"experts": True, "router": "sigmoid", "capacity_factor": 0.0},
}
"""Model type of transformers -> keys of our decoder and its mixture that have one value in it; others are free."""
KEYS = {
    "vocab_size": "vocab_size", "hidden_size": "dim", "intermediate_size": "hidden_dim", "head_dim": "head_dim",
    "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads", "num_key_value_heads": "n_kv_heads",
    "max_position_embeddings": "max_seq_len", "rms_norm_eps": "norm_eps", "tie_word_embeddings": "tied_embeddings",
    "use_qk_norm": "qk_norm", "moe_intermediate_size": "expert_dim", "num_local_experts": "moe.n_experts",
    "n_routed_experts": "moe.n_experts", "num_experts_per_tok": "moe.top_k", "n_shared_experts": "moe.n_shared",
    "n_group": "moe.n_groups", "topk_group": "moe.top_groups", "norm_topk_prob": "moe.normalise",
    "routed_scaling_factor": "moe.scale", "first_k_dense_replace": "moe.first_dense",
}  # fmt: skip
"""Keys of their configs -> fields of ours."""
NAMES = (
    (r"^embedding\.", "model.embed_tokens."), (r"^(norm|layers)\.", r"model.\1."), (r"^head\.", "lm_head."),
    (r"attention_norm", "input_layernorm"), (r"feed_forward_norm", "post_attention_layernorm"),
    (r"\.attention\.w(.)\.", r".self_attn.\1_proj."), (r"\.attention\.", ".self_attn."),
    (r"\.feed_forward\.", ".mlp."), (r"router\.bias", "gate.e_score_correction_bias"), (r"router", "gate"),
    (r"experts\.w_(gate|up)$", "experts.gate_up_proj"), (r"\.shared\.", ".shared_experts."),
    (r"w_(gate|up|down)", r"\1_proj"),
)  # fmt: skip
"""What is replaced, in this order, in a name of ours to become theirs."""
LIMIT = 1e-6
"""Largest relative difference of logits in float64, as models with norms, angles and routers in float32 cause it."""


def counterpart(ours: DecoderConfig, kind: str, end: int | None = None) -> CausalLM:
    """Describe the model of type ``kind`` in the sizes of ours; raise as ``of_decoder``."""
    if kind not in FAMILIES:
        raise ConfigError(f"--like = {kind!r} is none of {', '.join(FAMILIES)}.{nearest(kind, FAMILIES)}")
    moe = ours.moe
    values = {"experts": moe is not None, "qk_norm": ours.qk_norm, **(vars(moe) if moe is not None else {})}
    if wrong := {key: legal for key, legal in FAMILIES[kind].items() if values.get(key, legal) != legal}:
        has, ran = (", ".join(f"{key} = {source[key]}" for key in wrong) for source in (wrong, values))
        fit = ", ".join(name for name, legal in FAMILIES.items() if legal.items() <= values.items()) or "none"
        raise UnsupportedError(
            f"--like = {kind}: its models have {has}, and the run's model {ran}. Of {', '.join(FAMILIES)} fit: {fit}"
        )
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": ours.rope_theta}
    if (scaling := ours.rope_scaling) is not None:
        rope |= {**vars(scaling), "rope_type": "llama3"}
        rope["original_max_position_embeddings"] = rope.pop("original_max_seq_len")
    keys: dict[str, Any] = {
        theirs: attrgetter(own)(ours) for theirs, own in KEYS.items() if moe is not None or "moe." not in own
    }
    keys |= {"bos_token_id": None, "eos_token_id": end, "pad_token_id": None, "sliding_window": None}
    if moe is not None:
        keys |= {"mlp_only_layers": list(range(moe.first_dense)), "decoder_sparse_step": 1}
        keys |= {"intermediate_size": ours.expert_dim} if kind == "mixtral" else {}
    default: Any = import_transformers("--like").AutoConfig.for_model(kind)
    chosen = {key: keys[key] for key in default.to_dict().keys() & keys.keys()}
    chosen |= {"partial_rotary_factor": 1.0} if kind == "glm4_moe" else {}
    return CausalLM(type(default)(**chosen, rope_parameters=rope))


def matched(ours: DecoderConfig, source: CausalLM) -> dict[str, tuple[str, ...]]:
    """Map each tensor of theirs to ours, concatenated along the last dim but one; to none where theirs is zeros."""
    with on_meta():
        here, there = Decoder(ours), source()
    found: dict[str, tuple[str, ...]] = {}
    saved, buffers = here.state_dict(), there.state_dict()
    for name in (*dict(here.named_parameters()), *(name for name, _ in here.named_buffers() if name in saved)):
        other = name
        for ours_, theirs in NAMES:
            other = re.sub(ours_, theirs, other)
        found[other] = (*found.get(other, ()), name)
    named = (*dict(there.named_parameters()), *(name for name, _ in there.named_buffers() if name in buffers))
    return {name: found.get(name, ()) for name in named}


def of_decoder(folder: Path, config: Config, kind: str) -> Counterpart:
    """Find the counterpart of a run's decoder among the models of type ``kind``.

    Raises:
        ConfigError: the type is not in the table, or the run's model is one of transformers already.
        UnsupportedError: models of the type cannot be what the run's is, or compute something else.
    """
    if config.model.hf:
        raise ConfigError(f"--like = {kind}: the model of {folder} is a Hugging Face model already; leave --like out")
    tokenizer = own_tokenizer(config, folder)
    ours = decoder_config(config, tokenizer)
    source = counterpart(ours, kind, tokenizer.end_of_document)
    prove(shrunk(ours), kind)
    return Counterpart(source, matched(ours, source), source.config.to_dict())


@torch.no_grad()
def prove(ours: DecoderConfig, kind: str) -> float:
    """Return the relative difference of logits, in float64, on random weights and tokens; raise as ``of_decoder``.

    The weights keep tokens apart, so that routers send them to different experts.
    """
    source = dataclasses.replace(counterpart(ours, kind), dtype="float64")
    generator = torch.Generator().manual_seed(0)
    mine, theirs = Decoder(ours).double().eval(), source().double().eval()
    own, state = mine.state_dict(), theirs.state_dict()
    for name, tensor in own.items():
        drawn = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        is_bias = name.endswith("router.bias")  # as wide as the scores, so that both influence the choice
        wide = tensor.shape[-1] ** -0.5
        tensor.copy_(drawn / 10 if is_bias else drawn * wide if tensor.dim() > 1 else 1 + drawn / 4)
    for name, names in matched(ours, source).items():
        parts = [own[each] for each in names] or [torch.zeros_like(state[name])]
        state[name].copy_(torch.cat(parts, -2) if len(parts) > 1 else parts[0])
    tokens = torch.randint(0, ours.vocab_size, (8, min(16, ours.max_seq_len)), generator=generator)
    try:
        error = relative_errors({"logits": theirs(input_ids=tokens).logits}, {"logits": mine(tokens)})["logits"]
    except (RuntimeError, ValueError, TypeError, IndexError) as failed:
        message = " ".join(str(failed).split())
        raise UnsupportedError(f"--like = {kind} cannot compute in the sizes of the run's model: {message}") from failed
    if not error <= LIMIT:
        raise UnsupportedError(
            f"{type(theirs).__name__} does not compute what the run's model does: on a small copy with equal weights"
            f" the logits are {error:.1e} (relative) apart, and {LIMIT:.0e} is rounding. Nothing was written"
        )
    return error
