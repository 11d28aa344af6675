"""Convert a folder that ``meshwright.save`` wrote in a loop of the user's own: no run stands around it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from meshwright.checkpoint.export import code_to_read, export_adapter, export_merged, export_tensors
from meshwright.checkpoint.folder import OLD, PARTIAL, beside
from meshwright.checkpoint.huggingface import Pretrained, pretrained
from meshwright.checkpoint.load import open_manifest
from meshwright.checkpoint.manifest import NAME, Manifest
from meshwright.checkpoint.save import differing
from meshwright.checkpoint.tensor_files import holds_weights
from meshwright.core.errors import ConfigError, IntegrityError, UnsupportedError
from meshwright.core.files import inside
from meshwright.introspection.adapted.model import base_name, is_adapter, is_trained_copy
from meshwright.introspection.constructor.origin import ModelOrigin
from meshwright.introspection.source import CONFIG, as_module, with_adapters
from meshwright.training.model_source import KEPT, LEFT

from .convert import TOKENIZER_FILES, ExportedModel, complete, dtype_of, new_folder
from .folder import RunFolder


def is_saved(path: Path) -> bool:
    """Return whether a folder looks as ``meshwright.save`` writes or leaves it, and is no run."""
    if path.name.endswith(PARTIAL) or not path.is_dir():
        return beside(path, PARTIAL).is_dir() or beside(path, OLD).is_dir() or path.name.endswith(PARTIAL)
    if RunFolder(path).config.is_file():
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
    if not folder.exists() and not beside(folder, OLD).exists():
        raise IntegrityError(f"{folder} does not exist: {beside(folder, PARTIAL)} is what an unfinished save left")
    manifest = open_manifest(folder)
    origin = ModelOrigin.read(manifest.model, folder / NAME)
    _refuse_other_kinds(folder, origin, form)
    if form != "adapter" and manifest.left_out and base is None:
        raise ConfigError(
            f"{folder} was saved with only_trained=True and lacks {manifest.left_out[0]} ({len(manifest.left_out)}"
            f" frozen parameters in all): give the folder of the model that training began from with --base"
        )
    with new_folder(out) as partial:
        model = _Model.built(folder, manifest, origin, dtype, partial)
        (partial / CONFIG).unlink()
        weights = _weights(folder, manifest, model, base)
        if form == "adapter":
            size = export_adapter(folder, partial, model.adapted, str(base) if base is not None else "", dtype)
        else:
            if origin.adapters is None and not manifest.left_out:
                size = export_tensors(folder, partial, model.plain, None, dtype)
            else:
                size = export_merged(folder, partial, model.adapted, model.plain, weights, dtype)
            complete(partial, model.plain, dict(origin.config), dtype or model.dtype)
        has_tokenizer = _copy_small_files(base, partial, form) if base is not None else False
    code = code_to_read(folder, out, model.plain, origin.kind, str(base or "BASE")) if form == "adapter" else ""
    return ExportedModel(out, folder, size, has_tokenizer, origin.kind, code)


@dataclass(frozen=True)
class _Model:
    """The model of a checkpoint, on meta: with its adapters, and without."""

    adapted: nn.Module
    plain: nn.Module
    dtype: str

    @classmethod
    def built(cls, folder: Path, manifest: Manifest, origin: ModelOrigin, dtype: str | None, room: Path) -> _Model:
        build, stored = origin.builder(room), getattr(torch, dtype_of(folder))
        plain = as_module(build).to(stored)
        request = origin.requested_adapters()
        adapted = as_module(with_adapters(build, request, where="adapters")).to(stored) if request else plain
        _refuse_other_names(folder, manifest, adapted)
        return cls(adapted, plain, dtype or dtype_of(folder))


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


def _refuse_other_names(folder: Path, manifest: Manifest, model: nn.Module) -> None:
    """Refuse where this transformers builds another model from the config than the one that was saved."""
    held = {key.removeprefix("model.") for key in manifest.tensors if key.startswith("model.")}
    held |= set(manifest.left_out)
    lacking = [name for name, _ in model.named_parameters() if name not in held]
    if lacking:
        raise ConfigError(
            f"{folder} has no {lacking[0]} ({len(lacking)} in all), which a {type(model).__name__} of its config has:"
            f" convert with the versions of transformers and peft that trained it"
        )


def _weights(folder: Path, manifest: Manifest, model: _Model, base: Path | None) -> Pretrained | None:
    """Return the weights of the base, once they are known to be those beside which the checkpoint was trained.

    Raises:
        ConfigError: the base has no weights, is another model, or holds other numbers.
    """
    if base is None:
        return None
    if not (base.expanduser().is_dir() and holds_weights(base.expanduser())):
        raise ConfigError(f"--base {base}: the folder is not there, or holds no weights (model.safetensors)")
    weights = pretrained(base)
    try:
        read = weights.reader(model.plain)
    except ConfigError as error:
        raise ConfigError(f"--base {base} is not the model that {folder} was trained from: {error}") from None
    runs = {name: run for name, run in manifest.base.items() if not is_adapter(name) and not is_trained_copy(name)}
    if others := differing(runs, lambda name: read(base_name(name))):
        raise ConfigError(
            f"--base {base} is not the model that {folder} was trained from: {base_name(others[0])} holds other numbers"
            f" ({len(others)} of {len(runs)} frozen parameters differ)"
        )
    return weights


def _copy_small_files(base: Path, out: Path, form: str) -> bool:
    """Copy tokenizer and settings that lie beside the base; return whether there is a tokenizer."""
    patterns = TOKENIZER_FILES if form == "adapter" else KEPT
    found: dict[str, Any] = {path.name: path for pattern in patterns for path in base.expanduser().glob(pattern)}
    for name in found:
        if name != CONFIG and not any(Path(name).match(left) for left in (*LEFT, "*.py")):
            (out / name).write_bytes(inside(base.expanduser(), name).read_bytes())
    return "tokenizer.json" in found
