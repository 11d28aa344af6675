"""Convert a run's model into a folder that transformers or peft reads."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from meshwright.checkpoint.export import MadeOf, code_to_read, export_adapter, export_merged, export_tensors
from meshwright.checkpoint.folder import PARTIAL, beside
from meshwright.checkpoint.huggingface import Pretrained, pretrained
from meshwright.checkpoint.loading import open_manifest
from meshwright.checkpoint.manifest import NAME, Manifest
from meshwright.checkpoint.mirror import KEPT
from meshwright.checkpoint.saving import differing
from meshwright.checkpoint.store import Location
from meshwright.checkpoint.tensor_files import holds_weights
from meshwright.core.errors import ConfigError, UnsupportedError
from meshwright.core.files import inside, read_object, sync_folder
from meshwright.introspection.adapted_model import base_name, is_adapter, is_trained_copy
from meshwright.introspection.source import CONFIG, CausalLM, ModelOrigin, as_module, with_adapters
from meshwright.training.config import Config
from meshwright.training.model_source import FOLDER, LEFT, TOKENIZER, causal_lm, with_kept_model
from meshwright.training.run.folder import IDENTITY, RunFolder

# --- find the weights beside which a run's adapters stand


def weights_beside_adapters(run: Path, config: Config, base: Path | None) -> Pretrained | None:
    """Return the weights in ``base``, if they are those that a run's adapters were trained beside.

    The path in the run's own config is not opened: nothing in a run's folder names a file outside.

    Returns:
        None for a run without adapters.

    Raises:
        ConfigError: no folder is given for a run with adapters, one for a run without, or one of other weights.
    """
    if config.adapters is None:
        if base is not None:
            raise ConfigError(f"--base {base}: the run {run} trained a whole model, no adapters; leave --base out")
        return None
    if base is None:
        raise ConfigError(
            f"{run} trained adapters, and its folder does not hold the model beside which they stand: give that"
            f" model's folder with --base (the run's config names {config.model.hf})"
        )
    found, identity = pretrained(_holding_weights(base)), read_object(run / IDENTITY)
    if found.fingerprint() != identity.get("model", {}).get("base"):
        raise ConfigError(
            f"--base {base}: these are not the weights beside which the adapters of {run} were trained (the run's"
            f" config names {config.model.hf})"
        )
    return found


# --- convert a run's model into a folder that transformers or peft reads

TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "chat_template*",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.model",
)


@dataclass(frozen=True)
class Counterpart:
    """A model of transformers that computes the same as a run's model.

    Attributes:
        source: the model of transformers.
        made_of: tensor name -> names of the run's tensors that it is made of; None: every name is the run's.
        config: the keys of its config.json.
    """

    source: CausalLM
    made_of: MadeOf | None
    config: dict[str, Any]


@dataclass(frozen=True)
class ExportedModel:
    """The result of a conversion."""

    folder: Path
    checkpoint: Location
    bytes: int
    has_tokenizer: bool
    kind: str = "AutoModelForCausalLM"
    """Class of transformers that reads it."""
    code: str = ""
    """Of adapters: Python code that reads them beside their base."""


def of_hugging_face(folder: Path, config: Config) -> Counterpart:
    """Return the counterpart of a run that trained a model of transformers.

    Raises:
        ConfigError: the run trained the built-in decoder.
    """
    if not config.model.hf:
        raise ConfigError(
            f"{folder} trained meshwright's own decoder, which transformers does not know by name: say with --like NAME"
            f" which model type of transformers computes the same (llama, mistral, qwen3, mixtral, qwen3_moe or"
            f" glm4_moe); it will be proven"
        )
    source = causal_lm(with_kept_model(config, folder))
    kept = folder / FOLDER / CONFIG
    return Counterpart(source, None, json.loads(kept.read_text()) if kept.is_file() else source.config.to_dict())


def convert(
    folder: Path,
    checkpoint: Location,
    config: Config,
    out: Path,
    form: str = "hf",
    base: Path | None = None,
    *,
    like: Counterpart | None = None,
    dtype: str | None = None,
) -> ExportedModel:
    """Write a run's checkpoint to the folder ``out``, for ``from_pretrained(out)`` of transformers, or for peft.

    The files are written to a folder beside ``out``, which is renamed once it is complete and its tensors' names and
    shapes are those of the model.

    Args:
        folder: the run's folder.
        form: "hf"; of a run that trained adapters "merged", with these added to the weights, or "adapter".
        base: folder of the weights beside which the adapters were trained, as the readers of "adapter" are told; None:
            the run's ``model.hf``.
        like: a model of transformers that computes the same as the run's own decoder.
        dtype: dtype of the weights, by name; None: as in the checkpoint.

    Raises:
        ConfigError: ``out`` exists and is not empty, or as ``weights_beside_adapters`` does.
        IntegrityError: the checkpoint is damaged.
    """
    weights = weights_beside_adapters(folder, config, base) if form == "merged" or base is not None else None
    made = of_hugging_face(folder, config) if like is None else like
    plain, kind, named = as_module(made.source), made.source.auto_class.__name__, str(base or config.model.hf)
    adapted = as_module(with_adapters(made.source, config.adapters, where="adapters")) if form != "hf" else plain
    with new_folder(out) as partial:
        if form == "adapter":
            size = export_adapter(checkpoint, partial, adapted, named, dtype)
        else:
            if form == "merged":
                size = export_merged(checkpoint, partial, adapted, plain, weights, dtype)
            else:
                size = export_tensors(checkpoint, partial, plain, made.made_of, dtype)
            complete(partial, plain, made.config, dtype or dtype_of(checkpoint))
        model, own = folder / FOLDER, folder / TOKENIZER
        kept = {path.name: path for path in model.iterdir() if path.name != CONFIG} if model.is_dir() else {}
        if own.is_dir():
            both = [place / "tokenizer.json" for place in (own, model)]
            if not (all(file.is_file() for file in both) and both[0].read_bytes() == both[1].read_bytes()):
                kept = {name: path for name, path in kept.items() if not any(map(path.match, TOKENIZER_FILES))}
            kept |= {path.name: path for path in own.iterdir()}
        for name, path in kept.items():
            if any(map(path.match, TOKENIZER_FILES if form == "adapter" else ("*",))):
                shutil.copyfile(inside(path.parent, name), partial / name)
    code = code_to_read(checkpoint, out, plain, kind, named) if form == "adapter" else ""
    return ExportedModel(out, checkpoint, size, "tokenizer.json" in kept, kind, code)


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Give a folder beside ``out`` to write into, and rename it to ``out`` when the body has written all of it.

    Raises:
        ConfigError: ``out`` exists and is not empty, or cannot be written.
    """
    out = Path(os.path.abspath(out.expanduser()))
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ConfigError(f"{out} is there and not empty: give a new folder, or remove it first")
    partial = beside(out, PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        yield partial
        sync_folder(partial)
        os.rename(partial, out)
    except OSError as error:
        raise ConfigError(f"cannot write {out}: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    sync_folder(out.parent)


def complete(folder: Path, model: nn.Module, keys: dict[str, Any], dtype: str) -> None:
    """Check the weights in ``folder``, and write the model's config beside them."""
    pretrained(folder).check(model)
    config = {key: value for key, value in keys.items() if key != "torch_dtype"}
    written = {**config, "architectures": config.get("architectures") or [type(model).__name__], "dtype": dtype}
    (folder / CONFIG).write_text(json.dumps(written, indent=2) + "\n")


def dtype_of(checkpoint: Location) -> str:
    """Return the dtype of a checkpoint's weights, by name."""
    tensors = Manifest.read(checkpoint).tensors
    return next(entry.dtype for key, entry in tensors.items() if key.startswith("model.") and "float" in entry.dtype)


# --- convert a folder that ``meshwright.save`` wrote in a loop of the user's own


def is_saved(path: Path) -> bool:
    """Return whether a folder looks as ``meshwright.save`` writes or leaves it, and is no run."""
    if path.name.endswith(PARTIAL):
        return True
    if not path.is_dir() or RunFolder(path).config.is_file():
        return False
    return (path / NAME).is_file() or (any(path.glob("*.safetensors")) and not (path / CONFIG).is_file())


def convert_saved(
    folder: Path, out: Path, form: str, base: Path | None = None, *, dtype: str | None = None
) -> ExportedModel:
    """Write the model that a folder holds to the new folder ``out``, as transformers or peft reads it.

    Args:
        form: "hf", "merged" or "adapter".
        base: folder of the model that training began from: what the checkpoint left out is read there, and the
            tokenizer is copied.
        dtype: dtype of the weights, by name; None: as in the checkpoint.

    Raises:
        IntegrityError: the folder is half written, or damaged.
        ConfigError: the form is not that of what was trained, or the base is missing or another model.
        UnsupportedError: the model is none of transformers, or its adapters were put by other code.
    """
    manifest = open_manifest(folder)
    origin = ModelOrigin.read(manifest.model, folder / NAME)
    _refuse_other_kinds(folder, origin, form)
    if form != "adapter" and manifest.left_out and base is None:
        raise ConfigError(
            f"{folder} was saved with only_trained=True and lacks {manifest.left_out[0]} ({len(manifest.left_out)}"
            f" frozen parameters in all): give the folder of the model that training began from with --base"
        )
    with new_folder(out) as partial:
        build, stored, request = origin.builder(partial), dtype_of(folder), origin.requested_adapters()
        plain = as_module(build).to(getattr(torch, stored))
        adapted = plain
        if request:
            adapted = as_module(with_adapters(build, request, where="adapters")).to(getattr(torch, stored))
        held = {key.removeprefix("model.") for key in manifest.tensors if key.startswith("model.")}
        lacking = [name for name, _ in adapted.named_parameters() if name not in held | set(manifest.left_out)]
        if lacking:  # this transformers builds another model from the config
            raise ConfigError(
                f"{folder} has no {lacking[0]} ({len(lacking)} in all), which a {type(adapted).__name__} of its config"
                f" has: convert with the versions of transformers and peft that trained it"
            )
        (partial / CONFIG).unlink()
        weights = None if base is None else _weights_of_base(folder, manifest, plain, base)
        if form == "adapter":
            size = export_adapter(folder, partial, adapted, str(base) if base is not None else "", dtype)
        else:
            if origin.adapters is None and not manifest.left_out:
                size = export_tensors(folder, partial, plain, None, dtype)
            else:
                size = export_merged(folder, partial, adapted, plain, weights, dtype)
            complete(partial, plain, dict(origin.config), dtype or stored)
        small: dict[str, Path] = {}  # tokenizer and settings that lie beside the base
        for pattern in TOKENIZER_FILES if form == "adapter" else KEPT:
            small |= {} if base is None else {path.name: path for path in base.expanduser().glob(pattern)}
        for name, path in small.items():
            if name != CONFIG and not any(map(path.match, (*LEFT, "*.py"))):
                (partial / name).write_bytes(inside(path.parent, name).read_bytes())
    code = code_to_read(folder, out, plain, origin.kind, str(base or "BASE")) if form == "adapter" else ""
    return ExportedModel(out, folder, size, "tokenizer.json" in small, origin.kind, code)


def _refuse_other_kinds(folder: Path, origin: ModelOrigin, form: str) -> None:
    """Refuse a model that cannot be built again, and a form that does not fit what was trained."""
    if not origin.kind:
        raise ConfigError(
            f"{folder} was saved by an older meshwright and does not say of which model: load it into the model"
            f" (meshwright.load) and save it again"
        )
    if origin.by_hand:
        raise UnsupportedError(
            f"{folder} holds a {origin.kind} whose adapters were put by code of its own: request them with"
            f' techniques={{"adapters": {{…}}}}, or write them by peft, model.save_pretrained(FOLDER)'
        )
    if not origin.config:
        raise UnsupportedError(
            f"{folder} holds a {origin.kind}, which is no model of transformers' own, so that neither transformers nor"
            f" peft could build it from files: read its weights with meshwright.load into the same module"
            f" (a decoder of meshwright trained by 'meshwright train' is converted from its run, with --like)"
        )
    if origin.adapters is not None and form == "hf":
        raise ConfigError(
            f"{folder} holds a model with adapters: --to merged writes it with the adapters added, --to adapter the"
            f" adapters alone"
        )
    if origin.adapters is None and form != "hf":
        raise ConfigError(f"{folder} holds a {origin.kind} without adapters: write it with --to hf")


def _holding_weights(base: Path) -> Path:
    """Return a folder of weights that the command line names; refuse one that has none."""
    if not (base.expanduser().is_dir() and holds_weights(base.expanduser())):
        raise ConfigError(f"--base {base}: the folder is not there, or holds no weights (model.safetensors)")
    return base


def _weights_of_base(folder: Path, manifest: Manifest, plain: nn.Module, base: Path) -> Pretrained:
    """Return the weights of the base, once they are known to be those beside which the checkpoint was trained.

    Raises:
        ConfigError: the base has no weights, is another model, or holds other numbers.
    """
    weights = pretrained(_holding_weights(base))
    try:
        read = weights.reader(plain)
    except ConfigError as error:
        raise ConfigError(f"--base {base} is not the model that {folder} was trained from: {error}") from None
    runs = {name: run for name, run in manifest.base.items() if not is_adapter(name) and not is_trained_copy(name)}
    if others := differing(runs, lambda name: read(base_name(name))):
        raise ConfigError(
            f"--base {base} is not the model that {folder} was trained from: {base_name(others[0])} holds other numbers"
            f" ({len(others)} of {len(runs)} frozen parameters differ)"
        )
    return weights
