"""A model of transformers that computes what our decoder does, proven by equal logits before it is believed.

The user names the model type. Its config is made of the standard keys; its parameters are found by their place (in which block, or
outside), their shape and the words in their names; and the proof says whether that was right.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.checkpoint.export import ToFile, as_transformers_saves
from meshwright.comparison.equality import relative_errors
from meshwright.core.errors import ConfigError, UnsupportedError, nearest
from meshwright.introspection.facts import model_facts
from meshwright.introspection.huggingface import CausalLM, import_transformers
from meshwright.models.decoder import Decoder, rotary_frequencies
from meshwright.models.decoder_config import DecoderConfig
from meshwright.training.config import Config
from meshwright.training.convert import Counterpart
from meshwright.training.model_source import decoder_config
from meshwright.training.tokenizer import kept_tokenizer, run_tokenizer

from .shrink import shrunk

LIMIT = 1e-6
"""Relative difference of logits in float64: what models that compute norms and angles in float32 inside leave."""
SHOWN = 4

WORDS: dict[str, tuple[str, ...]] = {
    "attention.wq.weight": ("q",),
    "attention.wk.weight": ("k",),
    "attention.wv.weight": ("v",),
    "attention.wo.weight": ("o", "out", "dense"),
    "attention.q_norm.weight": ("q norm", "q layernorm", "query layernorm"),
    "attention.k_norm.weight": ("k norm", "k layernorm", "key layernorm"),
    "feed_forward.w_gate.weight": ("gate", "w1"),
    "feed_forward.w_up.weight": ("up", "w3"),
    "feed_forward.w_down.weight": ("down", "w2"),
}
"""Our parameters of a block, and words that the same ones have elsewhere. The two norms before attention and feed-forward go by order."""


def of_decoder(folder: Path, config: Config, kind: str) -> Counterpart:
    """The counterpart of a run's decoder among the models of type ``kind``.

    Raises:
        ConfigError: transformers has no such model type, or the run's model is one of transformers already.
        UnsupportedError: it does not compute the same; the text says where it differs.
    """
    if config.model.hf:
        raise ConfigError(f"--like = {kind}: the model of {folder} is a Hugging Face model already; leave --like out")
    tokenizer = kept_tokenizer(folder) or run_tokenizer(config)
    ours = decoder_config(config, tokenizer)
    prove(shrunk(ours), kind)
    source = counterpart(ours, kind, tokenizer.end_of_document)
    names = matched(ours, source)

    def to_file(model: nn.Module) -> ToFile:
        inner = as_transformers_saves(model)
        return lambda name, tensor: inner(names[name], tensor)

    return Counterpart(source, to_file, source.config.to_dict())


def counterpart(ours: DecoderConfig, kind: str, end: int | None = None) -> CausalLM:
    """A model of that type in the sizes of ours.

    Raises:
        ConfigError: transformers has no such model type.
        UnsupportedError: it has no form of rotary positions with our frequencies.
    """
    transformers = import_transformers("--like")
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as known

    if kind not in known:
        raise ConfigError(f"--like = {kind!r} is no model type with a causal language model in transformers.{nearest(kind, known)}")
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
    config_class: Any = transformers.AutoConfig.for_model(kind).__class__
    try:
        made = config_class(**sizes, rope_parameters={"rope_type": "default", "rope_theta": ours.rope_theta})
        if getattr(made, "sliding_window", None) is not None:
            sizes["sliding_window"] = None
            made = config_class(**sizes, rope_parameters=made.rope_parameters)
        if ours.rope_scaling is not None:
            made = config_class(**sizes, rope_parameters=_scaled(ours, made, kind))
    except (TypeError, ValueError, AttributeError) as error:
        raise UnsupportedError(f"--like = {kind}: its config does not take the sizes of the run's model: {error}") from error
    if others := {kind for kind in getattr(made, "layer_types", None) or () if kind != "full_attention"}:
        raise UnsupportedError(
            f"--like = {kind}: some of its layers have {', '.join(sorted(others))}, and those of the run's model have not"
        )
    return CausalLM(made)


def _scaled(ours: DecoderConfig, plain: Any, kind: str) -> dict[str, Any]:
    """Of the forms of scaled rotary positions, the one that gives our frequencies."""
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
    raise UnsupportedError(f"--like = {kind}: transformers has no form of rotary positions with the frequencies of model.{s}")


def matched(ours: DecoderConfig, source: CausalLM) -> dict[str, str]:
    """Our parameters' names -> those of the counterpart.

    Raises:
        UnsupportedError: parameters on one side that have no counterpart on the other.
    """
    with torch.device("meta"):
        here, there = model_facts(Decoder(ours)), model_facts(source())
    if len(here.blocks) != len(there.blocks):
        raise UnsupportedError(f"{there.kind} has {len(there.blocks)} blocks in these sizes, and the run's model {len(here.blocks)}")
    shapes = [{p.name: p.shape for p in facts.parameters} for facts in (here, there)]
    found: dict[str, str] = {}
    for mine, theirs in zip(("", *here.blocks), ("", *there.blocks), strict=True):
        own = {p.name.removeprefix(f"{mine}."): p.name for p in here.of_unit(mine)}
        left = [p.name for p in there.of_unit(theirs)]
        for short, name in own.items():  # those with words of their own first: the others go by order
            if short in WORDS:
                _take(found, left, name, [n for n in left if _says(n.removeprefix(f"{theirs}."), WORDS[short])], shapes)
        for short, name in own.items():
            if short not in WORDS:
                _take(found, left, name, left, shapes)
    strangers = [name for name in shapes[1] if name not in found.values()]
    lost = [name for name in shapes[0] if name not in found]
    if strangers or lost:
        sides = [
            f"{len(names)} of {whose} have no counterpart ({', '.join(names[:SHOWN])}{' …' if len(names) > SHOWN else ''})"
            for names, whose in ((lost, "the run's parameters"), (strangers, f"the parameters of {there.kind}"))
            if names
        ]
        raise UnsupportedError(f"{there.kind} is not built like the run's model: {'; '.join(sides)}. Name another type with --like")
    return found


def _take(found: dict[str, str], left: list[str], name: str, candidates: list[str], shapes: list[dict[str, tuple[int, ...]]]) -> None:
    """The first candidate of the right shape is the counterpart of ``name``."""
    chosen = next((other for other in candidates if shapes[1][other] == shapes[0][name]), None)
    if chosen is not None:
        found[name] = chosen
        left.remove(chosen)


def _says(name: str, words: tuple[str, ...]) -> bool:
    """Whether the words of a name end with one of ``words``; "proj" and "weight" do not count."""
    said = [word for word in re.split(r"[._]", name) if word not in ("proj", "weight")]
    return any(said[-len(text.split()) :] == text.split() for text in words)


def prove(ours: DecoderConfig, kind: str) -> None:
    """Compare the logits of our decoder and its counterpart, in float64, on random weights and tokens.

    Raises:
        UnsupportedError: they differ.
    """
    source = counterpart(ours, kind)
    names = matched(ours, source)
    generator = torch.Generator().manual_seed(0)
    mine, theirs = Decoder(ours).double(), source().double().eval()
    with torch.no_grad():
        for name, parameter in mine.named_parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=generator, dtype=torch.float64) - 0.3)
            parameter.mul_(parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 1.0)
            theirs.get_parameter(names[name]).copy_(parameter)
        tokens = torch.randint(0, ours.vocab_size, (2, min(16, ours.max_seq_len)), generator=generator)
        one: Tensor = mine(tokens)
        other: Tensor = theirs(input_ids=tokens).logits
    error = relative_errors({"logits": other}, {"logits": one})["logits"]
    if not error <= LIMIT:
        raise UnsupportedError(
            f"{type(theirs).__name__} does not compute what the run's model does: on a small copy with equal weights the logits are"
            f" {error:.1e} (relative) apart, and {LIMIT:.0e} is rounding. Nothing was written; name another type with --like"
        )
