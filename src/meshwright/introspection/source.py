"""Turn a config, a module, a factory or a Hugging Face folder into a module without allocating weights.

All facts about such a model come from its module and its config; no family is known by name.
"""

from __future__ import annotations

import copy
import json
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from meshwright.core.dtypes import torch_dtype
from meshwright.core.errors import ConfigError, MissingExtraError, UnsupportedError, nearest, quieten_torchao
from meshwright.core.files import inside
from meshwright.core.record import recall, remember
from meshwright.models.decoder import Decoder
from meshwright.models.decoder_config import DecoderConfig

from .adapted.model import AdaptedModel, put_adapters
from .adapted.request import Adapters
from .blocks import Hints, give
from .constructor.meta import on_meta
from .constructor.recording import NotRecordedError, built, record, seeded
from .module_kinds import ABOUT_THE_FILE, KERNEL_KEYS, has_model

# --- read language models of transformers from a folder, a config.json or a config object

CONFIG = "config.json"
KEY = "model.hf"
TRUST = "model.trust_remote_code"


@dataclass(frozen=True)
class CausalLM:
    """A language model by its config, causal or of images and text; a call builds it on the device of the context.

    Attributes:
        config: a ``PretrainedConfig``. Its ``dtype`` is that of the stored weights, not that of the model.
        dtype: name of the parameters' dtype.
        trust_remote_code: whether code that lies beside the config may run.
        stored: content of the config's file, where there is one.
        experts: transformers' name for the experts' kernel; "": its default. Its grouped kernels take no float64.
    """

    config: Any
    dtype: str = "float32"
    trust_remote_code: bool = False
    experts: str = ""
    stored: dict[str, Any] | None = field(default=None, compare=False)

    def __call__(self) -> nn.Module:
        """Build the module, without a key-value cache.

        With a cache, transformers neither keeps packed documents apart nor survives recomputation.

        Raises:
            ConfigError: transformers has no language model for the config, or its values do not fit together.
        """
        auto = self.auto_class
        config = copy.deepcopy(self.config)
        config.get_text_config().use_cache = False
        experts = self.experts or ("eager" if self.dtype == "float64" else "")
        options = {"experts_implementation": experts} if experts else {}
        try:
            return auto.from_config(
                config, dtype=torch_dtype(self.dtype), trust_remote_code=self.trust_remote_code, **options
            )
        except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, ImportError) as error:
            raise ConfigError(
                f"{KEY}: transformers cannot build a causal language model of {type(config).__name__}: {error}"
            ) from error

    @property
    def auto_class(self) -> Any:
        """transformers' class that builds the model: of images and text where there is no causal one."""
        transformers = import_transformers()
        causal, of_images = transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText
        return of_images if takes_images(self.config, causal, of_images) else causal

    @property
    def facts(self) -> dict[str, Any]:
        """The config as JSON values, without keys that describe its file: its writer, and the weights' storage.

        A config read from a file gives the file's own keys only: transformers' defaults change with its version.
        """
        values = self.stored or json.loads(self.config.to_json_string(use_diff=False))
        return {key: value for key, value in values.items() if key not in ABOUT_THE_FILE}


def takes_images(config: Any, causal: Any, of_images: Any) -> bool:
    """Return whether transformers builds a model of images and text from a config, and no causal language model."""
    names = config.auto_map if isinstance(getattr(config, "auto_map", None), dict) else {}
    if names:  # code beside the config
        return of_images.__name__ in names and causal.__name__ not in names
    return has_model(of_images, config) and not has_model(causal, config)


def is_config(model: Any) -> bool:
    """Return whether an object is a config of transformers, without importing transformers."""
    found = sys.modules.get("transformers")
    return found is not None and isinstance(model, found.PretrainedConfig)


def read_causal_lm(path: str | Path, *, dtype: str = "float32", trust_remote_code: bool = False) -> CausalLM:
    """Read the model of a folder with a config.json, or of such a file.

    Raises:
        MissingExtraError: transformers is not installed.
        ConfigError: no such folder or file is on this machine, or it is no config that transformers knows.
        UnsupportedError: the weights are quantized.
    """
    place = Path(path).expanduser()
    file = place / CONFIG if place.is_dir() else place
    if not file.is_file():
        raise ConfigError(absent_model(path, place))
    config_keys = _json(inside(file.parent, file.name) if place.is_dir() else file)
    transformers = import_transformers()
    _refuse_elsewhere(config_keys, file)
    _check_type(config_keys, file, transformers, trust_remote_code)
    if config_keys.get("quantization_config"):
        raise UnsupportedError(
            f"{KEY} = {path}: its weights are quantized ({CONFIG}: quantization_config). Use the model in full"
            f" precision; techniques.quantize_frozen = nf4 then holds frozen weights in 4 bits."
        )
    try:
        where = place if place.is_dir() else file
        config = transformers.AutoConfig.from_pretrained(
            where, local_files_only=True, trust_remote_code=trust_remote_code
        )
    except Exception as error:  # its validators raise errors of their own
        first = str(error).strip().splitlines()
        raise ConfigError(
            f"{KEY}: {file} is no config that transformers reads: {' '.join(line.strip() for line in first)}"
        ) from error
    return CausalLM(config, dtype, trust_remote_code, stored=config_keys)


def absent_model(path: str | Path, place: Path) -> str:
    """Return what to tell of a path at which there is no model."""
    if place.is_dir():
        return f"{KEY} = {path}: " + (
            what_to_do_with_adapters(place) or f"the folder holds no {CONFIG}, so it is no Hugging Face model"
        )
    text = f"{KEY} = {path} is neither a folder with a {CONFIG} nor such a file."
    near = nearest(place.name, [entry.name for entry in place.parent.iterdir()]) if place.parent.is_dir() else ""
    is_name = re.fullmatch(r"[\w.-]+(/[\w.-]+)?", str(path)) is not None
    hint = f": fetch this one with 'hf download {path} --local-dir FOLDER', and give the folder" if is_name else ""
    return f"{text}{near} Models are not downloaded{hint}"


def what_to_do_with_adapters(folder: Path) -> str:
    """Say how the adapters of peft in a folder become a model that can be read; "" where it holds none."""
    file = folder / "adapter_config.json"
    if not file.is_file():
        return ""
    base, merged = _json(file).get("base_model_name_or_path"), str(folder.absolute()) + "-merged"
    tokenizer = str(folder if (folder / "tokenizer.json").is_file() else base)
    code = (
        f"import peft, transformers;"
        f" model = peft.AutoPeftModelForCausalLM.from_pretrained({str(folder)!r});"
        f" model.merge_and_unload().save_pretrained({merged!r});"
        f" transformers.AutoTokenizer.from_pretrained({tokenizer!r}).save_pretrained({merged!r})"
    )
    return (
        f"the folder holds adapters of peft beside {base}, no whole model. Add them to it with"
        f" {shlex.join(['python', '-c', code])} and give {merged}; a run that made them goes on by its own folder"
    )


def _json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{KEY}: {file} is no JSON ({error})") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{KEY}: {file} holds a {type(found).__name__}, not the keys of a model's config")
    return found


def _refuse_elsewhere(keys: dict[str, Any], file: Path) -> None:
    """Raise ConfigError for a config that takes a part of itself, or code, from elsewhere than its folder."""
    named = keys.get("configuration_files")
    if named is not None:
        raise ConfigError(
            f"{KEY}: {file} names other files for itself (configuration_files = {named!r:.80}): give the one that is"
            f" meant as {CONFIG}"
        )
    codes = keys.get("auto_map")
    for name in codes.values() if isinstance(codes, dict) else ():
        if "--" in str(name):
            raise ConfigError(
                f"{KEY}: {file} names code in another repository (auto_map: {name}), and only code beside it can be"
                f" allowed: copy it there"
            )
    for key, kernel in _implementations(keys):
        if "/" in kernel:
            raise ConfigError(
                f"{KEY}: {file} names code to be fetched ({key} = {kernel!r}), which is not run: take {key} out of it"
            )


def _implementations(keys: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the keys of a config and its inner configs that select the code for attention or experts."""
    for key, value in keys.items():
        if isinstance(value, dict):
            values = {str(part): name for part, name in value.items()} if key.endswith(KERNEL_KEYS) else {}
            yield from ((f"{key}.{part}", name) for part, name in values.items() if isinstance(name, str))
            yield from _implementations(value)
        elif key.endswith(KERNEL_KEYS) and isinstance(value, str):
            yield key, value


def _check_type(keys: dict[str, Any], file: Path, transformers: Any, trusted: bool) -> None:
    known = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    kind = keys.get("model_type")
    codes = keys.get("auto_map") or {}
    if not isinstance(codes, dict) or not isinstance(kind, str | None):
        raise ConfigError(
            f"{KEY}: {file} has model_type {kind!r} and auto_map {codes!r:.80}: a text and a table were expected"
        )
    if kind in known or (keys.get("auto_map") and trusted):
        return
    if keys.get("auto_map"):
        raise ConfigError(
            f"{KEY}: {file} names code of its own (auto_map: {', '.join(map(str, keys['auto_map'].values()))}), and"
            f" transformers {transformers.__version__} has no model_type {kind!r}. Read that code, then allow it with"
            f" {TRUST} = true, on the command line: --{TRUST}=true (of a model to inspect, --trust)"
        )
    if kind is None:
        raise ConfigError(f"{KEY}: {file} has no model_type, so it is not the config of a Hugging Face model")
    raise ConfigError(
        f"{KEY}: {file} has model_type {kind!r}, which transformers {transformers.__version__}"
        f" lacks.{nearest(kind, known)}"
    )


def import_transformers(what: str = KEY) -> Any:
    """Import transformers; raise MissingExtraError, which names ``what`` as in need of it, if it is not installed."""
    try:
        quieten_torchao()
        import transformers
    except ImportError as error:
        raise MissingExtraError(what, "transformers", "hf") from error
    return transformers


# --- turn a config, a module or a factory into a module without allocating weights


@dataclass(frozen=True)
class _BuiltBy:
    """The function, class or config that built a module."""

    build: Callable[[], Any]


def builder_of(module: nn.Module) -> Callable[[], nn.Module] | None:
    """Return the function, class or config from which ``as_module`` built a module; None if it was passed in."""
    found = recall(module, _BuiltBy)
    return found.build if found is not None else None


def as_module(
    model: DecoderConfig | nn.Module | Callable[[], nn.Module] | Any, seed: int = 0, hints: Hints | None = None
) -> nn.Module:
    """Return the module itself, or build a config (meshwright's or transformers') or a factory on the meta device.

    Args:
        seed: seeds the weights of a factory that branches on its random draws; only such a factory allocates weights.
        hints: hints to give for the module.

    Raises:
        ConfigError: neither a module, a known config, nor a callable that returns a module.
    """
    if hints is not None:
        module = as_module(model, seed)
        give(module, hints)
        return module
    if isinstance(model, nn.Module):
        return model
    if isinstance(model, DecoderConfig):
        with on_meta():
            return Decoder(model)
    if is_config(model):
        model = CausalLM(model)
    if callable(model):
        built = _without_memory(model, seed)
        if isinstance(built, nn.Module):
            remember(built, _BuiltBy(model))
            return built
        raise ConfigError(f"the model factory returned {type(built).__name__}, not an nn.Module")
    raise ConfigError(
        f"a model is an nn.Module, a model config, or a function that returns a module; got {type(model).__name__}"
    )


def with_adapters(
    model: Any, adapters: Adapters | None, seed: int = 0, *, where: str = "techniques.adapters", in_place: bool = True
) -> Any:
    """Return a model with adapters put beside its layers; the model itself where there is no request.

    Args:
        model: as for ``as_module``. A module with weights is changed in place.
        seed: seeds the adapters' first matrices beside a module with weights; elsewhere the seed comes later.
        where: the request's place, for errors.
        in_place: whether a module may be changed.

    Raises:
        ConfigError: the adapters are refused (``put_adapters``); or the model is a module that may not be changed, or
            one on meta, where nothing tells how adapters begin.
    """
    if adapters is None:
        return model
    if isinstance(model, nn.Module):
        if not in_place or any(parameter.is_meta for parameter in model.parameters()):
            state = "on meta, so how adapters begin beside it is not known" if in_place else "not to be changed here"
            raise ConfigError(
                f"{where}: the model is a {type(model).__name__} that is built already and {state}: give the function"
                f" or the config that builds it"
            )
        with seeded(seed):
            return put_adapters(model, adapters, where)
    return AdaptedModel(CausalLM(model) if is_config(model) else model, adapters, where)


def _without_memory(build: Callable[[], Any], seed: int) -> Any:
    """Call a factory on meta; if it fails there, record it on fake tensors, or else build it with real weights.

    Raises what it raises of real weights: on meta a constructor may catch torch's errors, and raise its own.
    """
    with suppress(Exception), on_meta():
        return build()
    try:
        return record(build, seed)[0]
    except NotRecordedError:
        return built(build, seed)
