"""Find a run's model: the built-in decoder, or a causal language model of transformers."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshwright.checkpoint.folder import CheckpointFolder, checkpoints_of
from meshwright.checkpoint.huggingface import Pretrained, pretrained
from meshwright.checkpoint.loading import to_be_loaded
from meshwright.checkpoint.mirror import KEPT
from meshwright.checkpoint.tensor_files import holds_weights
from meshwright.core.config import to_dict
from meshwright.core.dtypes import canonical_dtype
from meshwright.core.errors import ConfigError
from meshwright.core.files import inside, read_object, replace_text
from meshwright.core.names import HEADS, TOP_K, WIDTH
from meshwright.data import Tokenizer, load_tokenizer
from meshwright.data.cache import BPE, trained_bpe, vocabulary_of
from meshwright.data.images import Vision
from meshwright.data.tokenizers import (
    BYTES,
    SETTINGS,
    TEMPLATE,
    FileTokenizer,
    IdTokenizer,
    encode_prompt,
    read_settings,
)
from meshwright.data.turns import OWN, ChatTemplate, Message
from meshwright.distributed.weights.constructed import Weights
from meshwright.introspection.adapted_model import AdaptedModel
from meshwright.introspection.adapter_request import WEIGHTS
from meshwright.introspection.facts import ModelFacts
from meshwright.introspection.measurements import stated
from meshwright.introspection.source import CONFIG, CausalLM, read_causal_lm, with_adapters
from meshwright.models.decoder_config import SIZES, DecoderConfig, idle_parameters, parameter_count
from meshwright.training.config import Config, ModelConfig
from meshwright.training.run.request import IDENTITY

BaseSource = DecoderConfig | CausalLM
ModelSource = BaseSource | AdaptedModel
FOLDER = "model"
"""Subfolder of a run with a copy of the small files of its Hugging Face model."""
LEFT = ("*.index.json",)


def model_source(config: Config, tokenizer: Tokenizer) -> ModelSource:
    """Return the model that ``model.hf`` names, or the named size with the config's overrides; with its adapters.

    Raises:
        ConfigError: the sizes contradict each other, or there is no such model on this machine.
    """
    base = causal_lm(config) if config.model.hf else decoder_config(config, tokenizer)
    return with_adapters(base, config.adapters, where="adapters")


def base_of(source: ModelSource) -> BaseSource:
    """Return a run's model without adapters."""
    return source.base if isinstance(source, AdaptedModel) else source


def decoder_config(config: Config, tokenizer: Tokenizer) -> DecoderConfig:
    """Return the named size with the config's overrides; an unset vocabulary grows to the tokenizer's.

    Raises:
        ConfigError: the sizes contradict each other.
    """
    known = {field.name for field in dataclasses.fields(DecoderConfig)}
    chosen = {key: value for key, value in vars(config.model).items() if key in known and value is not None}
    try:
        size = SIZES[config.model.size]
        return replace(size, **{"vocab_size": max(size.vocab_size, tokenizer.vocab_size), **chosen})
    except ValueError as error:
        raise ConfigError(str(error)) from None


def causal_lm(config: Config) -> CausalLM:
    """Return the Hugging Face model of a run, in the dtype of its master weights.

    The dtype in the model's config only tells how its weights were stored, and is ignored: bfloat16 weights lose
    small updates, so "auto" is float32.

    A run with a checkpoint uses its own copy of the model's files if the original folder is gone.
    """
    m, master = config.model, config.techniques.precision.master
    dtype = "float32" if master == "auto" else canonical_dtype(master, where="techniques.precision.master")
    place = Path(m.hf).expanduser()
    if not place.exists() and _has_checkpoint(config):
        place = Path(config.run) / FOLDER
    return read_causal_lm(place if place.exists() else m.hf, dtype=dtype, trust_remote_code=m.trust_remote_code)


def with_kept_model(config: Config, run: Path) -> Config:
    """Point a config to the run's own copy of its Hugging Face model, independent of the original folder.

    Raises:
        ConfigError: the run has no copy; the folder that its config names may hold any model.
    """
    kept = run / FOLDER
    if not config.model.hf:
        return config
    if not (kept / CONFIG).is_file():
        raise ConfigError(
            f"{run} has no {FOLDER}/{CONFIG}, and the model that its config.toml names (model.hf = {config.model.hf})"
            f" is not its own: copy that model's files to {kept}"
        )
    return replace(config, model=replace(config.model, hf=str(kept), adapter=""))


def file_weights(config: Config) -> Pretrained | None:
    """Return the weights beside a Hugging Face model's config; None without any.

    Raises:
        ConfigError: the weights cannot be read.
    """
    folder = Path(config.model.hf).expanduser() if config.model.hf else None
    return pretrained(folder) if folder is not None and folder.is_dir() and holds_weights(folder) else None


def first_weights(config: Config) -> Weights | None:
    """Return the source of a run's parameters when its model is laid out; None: the model's random initialization.

    Raises:
        ConfigError: adapters are to be trained, and the weights beside which they stand are not in model.hf.
    """
    if config.adapters is not None:
        base = base_weights(config)
        return base if _has_checkpoint(config) else pretrained(base.folder, config.model.adapter)
    if config.model.hf and _has_checkpoint(config):
        return to_be_loaded
    return file_weights(config)


def base_weights(config: Config) -> Pretrained:
    """Return the weights beside which a run's adapters stand.

    Raises:
        ConfigError: model.hf has none.
    """
    if (found := file_weights(config)) is None:
        raise ConfigError(
            f"[adapters] are trained beside the weights of model.hf = {config.model.hf}, and no weights lie there:"
            f" give the folder that has them, or leave [adapters] out to train the model from random weights"
        )
    return found


def where_weights_come_from(config: Config) -> str:
    """Describe the source of the weights."""
    if config.adapters is not None:
        first = f"read from {config.model.adapter}" if config.model.adapter else f"drawn from seed {config.seed}"
        adapters = "of the run's checkpoint" if _has_checkpoint(config) else first
        return f"read from {config.model.hf}; adapters {adapters}"
    if _has_checkpoint(config):
        return "of the run's checkpoint"
    return (
        f"read from {config.model.hf}"
        if file_weights(config)
        else f"drawn from seed {config.seed}: {config.model.hf} holds none"
    )


def _has_checkpoint(config: Config) -> bool:
    if config.checkpoint.folder:
        return CheckpointFolder(config.checkpoint.folder).latest() is not None
    return bool(config.run) and checkpoints_of(Path(config.run).expanduser()).latest() is not None


def keep_model(config: Config, run: Path) -> None:
    """Copy the small files of a Hugging Face model (config, tokenizer, code) into the folder of a run, once."""
    place, kept = Path(config.model.hf).expanduser(), run / FOLDER
    if not config.model.hf or (kept / CONFIG).is_file() or not place.exists():
        return
    kept.mkdir(exist_ok=True)
    found = {
        path.name: path
        for pattern in KEPT
        for path in place.glob(pattern)
        if not any(path.match(left) for left in LEFT)
    }
    config_file = found.pop(CONFIG, place)
    for name, path in [*found.items(), (CONFIG, config_file)]:  # config.json last: it marks the copy as complete
        shutil.copyfile(path if path == place else inside(place, name), kept / f"{name}.new")
        (kept / f"{name}.new").replace(kept / name)


def identity_of(source: ModelSource, config: Config) -> dict[str, Any]:
    """Return the model's facts that must not change when a run is continued, as JSON values.

    Adapters that it began from are known by their digest, also where they are gone.
    """
    if not isinstance(source, AdaptedModel):
        return source.facts if isinstance(source, CausalLM) else dataclasses.asdict(source)
    facts = identity_of(source.base, config)
    facts |= {"adapters": to_dict(source.adapters), "base": base_weights(config).fingerprint()}
    if config.model.adapter:
        file, kept = Path(config.model.adapter).expanduser() / WEIGHTS, Path(config.run).expanduser() / IDENTITY
        if not file.is_file() and config.run and kept.is_file():
            return facts | {"first_adapters": read_object(kept).get("model", {}).get("first_adapters")}
        with open(file, "rb") as stream:
            facts |= {"first_adapters": hashlib.file_digest(stream, "sha256").hexdigest()}
    return facts


def resolved_model(model: ModelConfig, source: ModelSource) -> ModelConfig:
    """Return the model section with all values filled in and an absolute path."""
    source = base_of(source)
    if isinstance(source, CausalLM):
        begun = str(Path(model.adapter).expanduser().absolute()) if model.adapter else ""
        return replace(model, hf=str(Path(model.hf).expanduser().absolute()), adapter=begun)
    known = {field.name for field in dataclasses.fields(model)}
    return replace(model, **{key: value for key, value in vars(source).items() if key in known})


@dataclass(frozen=True)
class Shape:
    """Sizes of a model, for reports and FLOP counts.

    Attributes:
        matmul_parameters: parameters that enter a matrix product for each token: without the input embedding, and
            only the routed share of experts.
        dim_attention: width of all query heads together.
    """

    parameters: int
    matmul_parameters: int
    n_layers: int
    dim: int
    dim_attention: int
    vocab_size: int


def shape_of(source: ModelSource, facts: ModelFacts) -> Shape:
    """Return the shape of a run's model."""
    source = base_of(source)
    if isinstance(source, DecoderConfig):
        embedding = 0 if source.tied_embeddings else source.vocab_size * source.dim
        numel = parameter_count(source)
        matmul, attention = numel - embedding - idle_parameters(source), source.n_heads * source.head_dim
        return Shape(numel, matmul, source.n_layers, source.dim, attention, source.vocab_size)
    config = source.config.get_text_config()
    dim, heads = stated(source, *WIDTH) or 0, stated(source, *HEADS) or 0
    head_dim = getattr(config, "head_dim", None) or (dim // heads if heads else 0)
    vocabulary = facts.vocab_size or 0
    tables = [p for p in facts.parameters if len(p.shape) == 2 and p.shape[0] == vocabulary]
    matmul = facts.numel - (tables[0].numel if tables and not tables[0].aliases else 0)
    if (chosen := stated(source, *TOP_K)) is not None:  # without experts that a token is not routed to
        stacks = [p for p in facts.parameters if len(p.shape) == 3]  # a layer's experts, along the first dim
        matmul -= sum(p.numel - p.numel * min(chosen, p.shape[0]) // p.shape[0] for p in stacks)
    return Shape(facts.numel, matmul, len(facts.blocks), dim, heads * head_dim, vocabulary)


# --- load the tokenizer that the config names, and store it with the run

TOKENIZER = "tokenizer"
"""Subfolder of a run with a copy of its tokenizer's files."""

AUTO = "auto"
_FILES = ("tokenizer.json", SETTINGS, TEMPLATE, "special_tokens_map.json", "added_tokens.json")


def tokenizer_name(config: Config) -> str:
    """Return ``data.tokenizer``, with "auto" resolved to the tokenizer beside a Hugging Face model, or to bytes.

    Raises:
        ConfigError: the model has weights, but its tokenizer is not beside it.
    """
    if config.data.tokenizer != AUTO:
        return config.data.tokenizer
    folder = Path(config.model.hf).expanduser() if config.model.hf else None
    if folder is None or not folder.is_dir():
        return BYTES
    if (folder / _FILES[0]).is_file():
        return str(folder)
    if holds_weights(folder):
        raise ConfigError(
            f"data.tokenizer: {folder} has weights and no {_FILES[0]}, so the meaning of their token ids is unknown:"
            f" name the tokenizer that they were trained with (or bytes)"
        )
    return BYTES


def run_tokenizer(config: Config, say: Callable[[str], None] = print) -> Tokenizer:
    """Return the tokenizer that ``data.tokenizer`` names.

    For an existing run: its stored copy, if the tokenizer was trained for the run or is gone.

    Raises:
        ConfigError: there is no such tokenizer.
    """
    name = tokenizer_name(config)
    kept = kept_tokenizer(Path(config.run)) if config.run else None
    if kept and (name.startswith(BPE) or not Path(name).expanduser().exists()):
        return kept
    if name.startswith(BPE):
        return trained_bpe(name, config.data.mixture or (config.data,), config.data.cache, say)
    return load_tokenizer(name)


def planned_tokenizer(config: Config, warn: Callable[[str], None] | None = None) -> Tokenizer:
    """Return a tokenizer for planning: one that is yet to be trained, or is not here, has only a vocabulary size.

    Args:
        warn: receives a sentence where that size is the one of ``model.size``.
    """
    name = tokenizer_name(config)
    if name.startswith(BPE):
        return IdTokenizer(vocabulary_of(name), 0)
    try:
        return load_tokenizer(name)
    except ConfigError as error:
        if config.model.hf:
            raise ConfigError(f"{error}. To plan without it, give --data.tokenizer=bytes") from None
        if config.model.vocab_size is not None:
            return IdTokenizer(config.model.vocab_size, 0)
        if warn is None:
            raise ConfigError(f"{error}. To plan without it, give --model.vocab_size=N") from None
        vocabulary = SIZES[config.model.size].vocab_size
        warn(f"{error}: planned with {vocabulary:,} tokens, as model.size = {config.model.size} has")
        return IdTokenizer(vocabulary, 0)


def kept_tokenizer(run: Path) -> FileTokenizer | None:
    """Return the tokenizer stored in a run's folder; None without one (bytes and ids need no files)."""
    return FileTokenizer(run / TOKENIZER) if (run / TOKENIZER / _FILES[0]).is_file() else None


def own_tokenizer(config: Config, run: Path) -> Tokenizer:
    """Return a run's tokenizer without reading files outside its folder: its stored copy, bytes, or ids.

    Raises:
        ConfigError: the run has no copy; the path that its config names may hold any tokenizer.
    """
    name = tokenizer_name(config)
    if (kept := kept_tokenizer(run)) is not None:
        return kept
    if name == BYTES or name.startswith("ids:"):
        return load_tokenizer(name)
    raise ConfigError(
        f"{run} has no {TOKENIZER}/{_FILES[0]}, and the tokenizer that its config.toml names (data.tokenizer = {name})"
        f" is not its own: copy that tokenizer's files to {run / TOKENIZER}"
    )


def template_file(config: Config) -> str:
    """Return the file of the chat template that the config names, the first one of a mixture; "" without one."""
    named = (part.template for part in (config.data.mixture or (config.data,)))
    return next((template for template in named if template not in ("", OWN)), "")


def template_folder(run: Path, tokenizer: Tokenizer) -> Path | None:
    """Return the folder with the chat template that a run trained with: its own, or the tokenizer's."""
    return run / TOKENIZER if (run / TOKENIZER / TEMPLATE).is_file() else getattr(tokenizer, "folder", None)


def question_ids(messages: list[Message], template: ChatTemplate, tokenizer: Tokenizer, vision: Vision) -> list[int]:
    """Return the ids of a conversation in its chat template, up to the answer to its last message.

    Args:
        vision: of the model; what its processor puts before a text is put before the conversation.

    Raises:
        ValueError: as ``ChatTemplate.render``.
    """
    text = template.render(messages, prompts_answer=True)
    if messages[-1]["content"] not in text:  # templates of models with images may know contents of parts alone
        parts = [m | {"content": [{"type": "text", "text": m["content"]}]} for m in messages]
        text = template.render(parts, prompts_answer=True)
    if vision.folder:
        text = vision.processor.begun(text)
    return [int(i) for i in encode_prompt(tokenizer, text, is_rendered=True)]


def keep_tokenizer(tokenizer: Tokenizer, run: Path, template: str = "") -> None:
    """Copy a tokenizer's files into the folder of a run, once.

    Args:
        template: file of the chat template that the run trains with; "": the tokenizer's own.
    """
    folder = run / TOKENIZER
    if template and not (folder / TEMPLATE).is_file():
        folder.mkdir(exist_ok=True)
        replace_text(folder / TEMPLATE, Path(template).expanduser().read_text(encoding="utf-8"))
    if not isinstance(tokenizer, FileTokenizer) or (folder / _FILES[0]).is_file():
        return
    folder.mkdir(exist_ok=True)
    for name in reversed(_FILES):  # tokenizer.json last: it marks the copy as complete
        file = tokenizer.path if name == _FILES[0] else inside(tokenizer.folder, name)
        if name == SETTINGS and (settings := tokenizer.settings) != read_settings(tokenizer.folder):
            replace_text(folder / name, json.dumps(settings, indent=2) + "\n")
        elif file.is_file() and not (name == TEMPLATE and template):
            shutil.copyfile(file, folder / f"{name}.new")
            (folder / f"{name}.new").replace(folder / name)
