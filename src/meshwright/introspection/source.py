"""Turn a config, a module, a factory or a Hugging Face folder into a module without allocating weights.

All facts about such a model come from its module and its config; no family is known by name.
"""

from __future__ import annotations

import copy
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from meshwright.core.config import from_dict, to_dict
from meshwright.core.dtypes import torch_dtype
from meshwright.core.errors import (
    ConfigError,
    IntegrityError,
    MissingExtraError,
    UnsupportedError,
    nearest,
    quieten_torchao,
)
from meshwright.core.files import inside, read_json
from meshwright.core.record import recall, remember
from meshwright.introspection.adapted_model import AdaptedModel, adapters_of, is_adapter, put_adapters
from meshwright.introspection.adapter_request import Adapters, holds_adapters, merging_by_peft
from meshwright.introspection.blocks import Hints, give
from meshwright.introspection.constructor import NotRecordedError, built, on_meta, record, seeded
from meshwright.introspection.module_kinds import ABOUT_THE_FILE, KERNEL_KEYS, brings_initialiser, has_model
from meshwright.introspection.signature import core_of
from meshwright.models.decoder import Decoder
from meshwright.models.decoder_config import DecoderConfig

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
        """Build the module, without a key-value cache; raise ConfigError where transformers cannot."""
        experts = self.experts or ("eager" if self.dtype == "float64" else "")
        options: dict[str, Any] = {"experts_implementation": experts} if experts else {}
        options |= {"dtype": torch_dtype(self.dtype), "trust_remote_code": self.trust_remote_code}
        cannot = f"{KEY}: transformers cannot build a causal language model of {type(self.config).__name__}"
        return _without_cache(partial(self.auto_class.from_config, **options), self.config, cannot)

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


def _without_cache(make: Callable[[Any], nn.Module], config: Any, cannot: str) -> nn.Module:
    """Build a model of a config without a key-value cache; ``cannot`` begins the ConfigError where that fails.

    With a cache, transformers neither keeps packed documents apart nor survives recomputation.
    """
    config = copy.deepcopy(config)
    config.get_text_config().use_cache = False
    try:
        return make(config)
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, ImportError) as error:
        said, _, _ = str(error).partition("\nModel type should be one of")  # all classes that transformers has
        raise ConfigError(f"{cannot}: {said}") from error


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
    config_keys = read_json(inside(file.parent, file.name) if place.is_dir() else file)
    transformers = import_transformers()
    _refuse_unknown(config_keys, file, transformers, trust_remote_code)
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
        if holds_adapters(place):
            return (
                f"{KEY} = {path}: the folder holds adapters of peft, which train, evaluate and generate take, and no"
                f" whole model. Add them to their base with {merging_by_peft(place)}"
            )
        return f"{KEY} = {path}: the folder holds no {CONFIG}, so it is no Hugging Face model"
    text = f"{KEY} = {path} is neither a folder with a {CONFIG} nor such a file."
    near = nearest(place.name, [entry.name for entry in place.parent.iterdir()]) if place.parent.is_dir() else ""
    is_name = re.fullmatch(r"[\w.-]+(/[\w.-]+)?", str(path)) is not None
    hint = f": fetch this one with 'hf download {path} --local-dir FOLDER', and give the folder" if is_name else ""
    return f"{text}{near} Models are not downloaded{hint}"


def _refuse_unknown(keys: dict[str, Any], file: Path, transformers: Any, trusted: bool) -> None:
    """Refuse a config with parts or code from elsewhere than its folder, or of a kind that transformers lacks."""
    named = keys.get("configuration_files")
    if named is not None:
        raise ConfigError(
            f"{KEY}: {file} names other files for itself (configuration_files = {named!r:.80}): give the one that is"
            f" meant as {CONFIG}"
        )
    codes, kind = keys.get("auto_map") or {}, keys.get("model_type")
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
    known = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    if not isinstance(codes, dict) or not isinstance(kind, str | None):
        raise ConfigError(
            f"{KEY}: {file} has model_type {kind!r} and auto_map {codes!r:.80}: a text and a table were expected"
        )
    if kind in known or (codes and trusted):
        return
    if codes:
        raise ConfigError(
            f"{KEY}: {file} names code of its own (auto_map: {', '.join(map(str, codes.values()))}), and"
            f" transformers {transformers.__version__} has no model_type {kind!r}. Read that code, then allow it with"
            f" {TRUST} = true, on the command line: --{TRUST}=true (of a model to inspect, --trust)"
        )
    if kind is None:
        raise ConfigError(f"{KEY}: {file} has no model_type, so it is not the config of a Hugging Face model")
    raise ConfigError(
        f"{KEY}: {file} has model_type {kind!r}, which transformers {transformers.__version__}"
        f" lacks.{nearest(kind, known)}"
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
        build: Callable[[], Any] = model
        made, is_made = None, False
        with suppress(Exception), on_meta():  # a constructor may catch torch's errors there, and raise its own
            made, is_made = build(), True
        if not is_made:
            try:
                made = record(build, seed)[0]
            except NotRecordedError:
                made = built(build, seed)
        if isinstance(made, nn.Module):
            remember(made, _BuiltBy(model))
            return made
        raise ConfigError(f"the model factory returned {type(made).__name__}, not an nn.Module")
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


# --- describe a model so that transformers, and peft, can build it again from a checkpoint alone

OWN_CODE = "auto_map"
"""Key of a config that names code beside it; a model of transformers' own needs none."""


@dataclass(frozen=True)
class ModelOrigin:
    """A model's class, config and adapters, as JSON values.

    Attributes:
        kind: name of the model's class, without a wrapper around it.
        config: transformers' config of one of its own models, as it was before any layout; empty for other models.
        adapters: the adapters that were requested; None without any.
        by_hand: whether the model has adapters that were put beside its layers by other code.
    """

    kind: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    adapters: Mapping[str, Any] | None = None
    by_hand: bool = False

    @classmethod
    def of(cls, model: nn.Module) -> ModelOrigin:
        """Describe a model, before a layout changes it."""
        core, put = core_of(model), adapters_of(model)
        config: Any = getattr(core, "config", None)
        kind, keys = type(core), dict[str, Any]()
        # of a class that transformers offers by its name, so that no other code is needed to build it
        if is_config(config) and brings_initialiser(core) and getattr(import_transformers(), kind.__name__, 0) is kind:
            values = json.loads(config.to_json_string(use_diff=False))
            keys = {key: value for key, value in values.items() if key not in (*ABOUT_THE_FILE, OWN_CODE)}
        by_hand = put is None and any(is_adapter(name) for name, _ in model.named_parameters())
        return cls(kind.__name__, keys, to_dict(put.adapters) if put is not None else None, by_hand)

    @classmethod
    def read(cls, values: Mapping[str, Any], where: Path) -> ModelOrigin:
        """Return what ``to_json`` wrote; raise IntegrityError for values of another form."""
        kind, config, adapters = values.get("kind", ""), values.get("config", {}), values.get("adapters")
        if not (isinstance(kind, str) and isinstance(config, dict) and isinstance(adapters, dict | None)):
            raise IntegrityError(f"{where} is damaged: its 'model' does not describe one")
        return cls(kind, config, adapters, values.get("by_hand") is True)

    def to_json(self) -> dict[str, Any]:
        """Return the description as JSON values."""
        adapters = dict(self.adapters) if self.adapters is not None else None
        return {"kind": self.kind, "config": dict(self.config), "adapters": adapters, "by_hand": self.by_hand}

    def requested_adapters(self) -> Adapters | None:
        """Return the request for the model's adapters. Raises ConfigError for values that this version lacks."""
        return None if self.adapters is None else from_dict(Adapters, self.adapters, where="the checkpoint's adapters")

    def builder(self, folder: Path) -> Callable[[], nn.Module]:
        """Return a function that builds the model without its adapters; code is transformers' own alone.

        The config is written into ``folder`` for transformers to read.
        """
        transformers = import_transformers("convert")
        kind = getattr(transformers, self.kind, None)
        if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
            raise UnsupportedError(
                f"transformers {transformers.__version__} has no {self.kind}: convert with the version that trained it"
            )
        (folder / CONFIG).write_text(json.dumps(self.config))
        read = read_causal_lm(folder).config  # refuses kernels and files from elsewhere
        return partial(_without_cache, kind, read, f"transformers cannot build {self.kind} of the checkpoint's config")
