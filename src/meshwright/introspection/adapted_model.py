"""Build a model with adapters: the base by its own constructor, then the adapters by peft.

peft replaces an adapted layer ``q_proj`` by a module that holds the layer as ``q_proj.base_layer`` and its adapter as
``q_proj.lora_A.default`` and ``q_proj.lora_B.default``. A module that is trained whole, ``lm_head``, becomes
``lm_head.modules_to_save.default`` beside the untrained ``lm_head.original_module``. Its wrapper around a whole model
puts ``base_model.model.`` before every name.
"""

from __future__ import annotations

import copy
import importlib
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from meshwright.core.errors import ConfigError, MissingExtraError, UnsupportedError, nearest, quieten_torchao
from meshwright.core.names import is_within, pattern
from meshwright.core.record import recall, remember
from meshwright.introspection.adapter_request import ALL_LINEAR, Adapters
from meshwright.introspection.blocks import repeated_blocks
from meshwright.introspection.module_kinds import tied_modules
from meshwright.models.decoder import Decoder
from meshwright.models.decoder_config import DecoderConfig

# --- tell the names of an adapted model's parameters apart

ADAPTER = "default"
"""peft's name of the adapter."""
WRAPPER = "base_model.model."
_ADAPTERS = re.compile(r"\.lora_(A|B|embedding_A|embedding_B|magnitude_vector|bias)\b")
_MAGNITUDE = re.compile(rf"\.lora_magnitude_vector\.{ADAPTER}\.weight$")
_HOST = re.compile(r"\.base_layer\b")
_UNTRAINED = re.compile(r"\.original_module\b")
_TRAINED_WHOLE = re.compile(r"\.modules_to_save\.[^.]+")


def is_adapter(name: str) -> bool:
    """Return whether a parameter belongs to an adapter, so that the base has nothing of its kind."""
    return _ADAPTERS.search(name) is not None


def host_of_magnitude(name: str) -> str | None:
    """Return the name of the weight whose rows' lengths a parameter holds (DoRA); None for any other parameter."""
    host, count = _MAGNITUDE.subn(".base_layer.weight", name)
    return host if count else None


def base_name(name: str) -> str:
    """Return the name that a parameter of the base has without adapters; a copy that is trained whole has it too."""
    for part in (_HOST, _UNTRAINED, _TRAINED_WHOLE):
        name = part.sub("", name)
    return name.removeprefix(WRAPPER)


def is_trained_copy(name: str) -> bool:
    """Return whether a parameter is the trained copy of one that the base has too."""
    return _TRAINED_WHOLE.search(name) is not None


def peft_name(name: str) -> str:
    """Return the name under which peft stores an adapter's parameter or a trained copy."""
    without = re.sub(rf"\.{ADAPTER}\b", "", _MAGNITUDE.sub(".lora_magnitude_vector", name)).replace(
        ".modules_to_save", ""
    )
    return WRAPPER + without.removeprefix(WRAPPER)


# --- reach what peft keeps private

CONVERTS = "peft.utils.transformers_weight_conversion"
CONVERTER = "convert_peft_config_for_transformers"


def injected(peft: Any, config: Any, model: nn.Module, name: str) -> None:
    """Put adapters beside the layers that a config names, and beside no others.

    Of models whose experts were linear layers once, peft takes ``gate_proj`` for the experts' stack, also where a layer
    of that name is there (a shared expert, a dense block).
    """
    place = importlib.import_module(CONVERTS)
    converter = getattr(place, CONVERTER)
    setattr(place, CONVERTER, lambda *args, **kwargs: None)
    try:
        peft.inject_adapter_in_model(config, model, name)
    finally:
        setattr(place, CONVERTER, converter)


def rewritten(config: Any, model: nn.Module, names: Iterable[str]) -> list[str]:
    """List the names among a config's targets that peft takes for the experts' stack of a model."""
    convert = getattr(importlib.import_module(CONVERTS), CONVERTER)
    found = []
    for name in names:
        alone = copy.copy(config)
        alone.target_modules, alone.target_parameters = {name}, None
        try:
            convert(alone, model=model, conversions=None)
        except ValueError:  # it asks for the layers that are fused with this one
            alone.target_modules = set()
        if alone.target_modules != {name}:
            found.append(name)
    return found


# --- build a model with adapters

SHOWN = 6
"""Number of names that an error lists."""


@dataclass(frozen=True)
class AdaptedModel:
    """A model with adapters; a call builds both on the device of the context.

    Attributes:
        base: the model without adapters: a config of our decoder, or a function, class or config object whose call
            returns the model.
        adapters: the adapters to put beside its layers.
        where: the request's place, for errors.
    """

    base: Any
    adapters: Adapters
    where: str = "adapters"

    def __call__(self) -> nn.Module:
        base = Decoder(self.base) if isinstance(self.base, DecoderConfig) else self.base()
        return put_adapters(base, self.adapters, self.where)


@dataclass(frozen=True)
class AdaptersPut:
    """A module's record of the adapters that were put into it."""

    adapters: Adapters
    targets: tuple[str, ...]
    """Paths of the layers with adapters."""
    parameters: tuple[str, ...] = ()
    """Names of the stacked parameters with adapters."""


@dataclass(frozen=True)
class AdaptersRead:
    """A module's record that its adapters were trained before: without them the model is another one than at first."""

    folder: str


def adapters_of(model: nn.Module) -> AdaptersPut | None:
    """Return the adapters that ``put_adapters`` put into a model; None without any."""
    return recall(model, AdaptersPut)


def put_adapters(model: nn.Module, adapters: Adapters, where: str = "adapters") -> nn.Module:
    """Put adapters beside a model's layers, in place, and freeze every parameter that is not trained.

    Adapters draw their first matrix from torch's stream; the second one is zero, so that the model computes the same
    as before.

    Args:
        where: the request's place, for errors: ``adapters`` in a config.

    Returns:
        The same module. Its own class stays; the adapted layers become modules of peft.

    Raises:
        MissingExtraError: peft is not installed.
        ConfigError: a value out of range, a target that matches no layer or one whose weight is tied, adapters inside
            already, or peft refuses a target.
        UnsupportedError: dropout or DoRA beside stacked parameters, or peft puts adapters elsewhere.
    """
    adapters.check(where)
    peft = import_peft(where)
    if any(is_adapter(name) for name, _ in model.named_parameters()):
        raise ConfigError(f"{where}: {type(model).__name__} has adapters already: leave out {where}")
    targets, parameters = matched_layers(model, adapters.targets, f"{where}.targets")
    if parameters:  # to whose values peft adds the adapters' product
        name = pattern(parameters[0])
        if adapters.dropout:
            raise UnsupportedError(
                f"{where}.dropout = {adapters.dropout}: beside stacked experts ({name}) adapters are added to the"
                f" weights, not to what comes out, so that no feature of their input can be zeroed. Set dropout = 0, or"
                f" leave the stacks out of {where}.targets."
            )
        if adapters.kind == "dora":
            raise UnsupportedError(
                f"{where}.kind = dora: peft has no magnitudes beside stacked experts ({name}). Set kind = lora, or"
                f" leave the stacks out of {where}.targets."
            )
    paths = [path for path, module in model.named_modules() if path and next(module.parameters(), None) is not None]
    kept: dict[str, None] = {}
    for text in adapters.modules_to_save:
        if not (hits := _ending_in(text, paths)):
            near = nearest(text, sorted({path.rpartition(".")[2] for path in paths}))
            raise ConfigError(f"{where}.modules_to_save: '{text}' matches no module of {type(model).__name__}.{near}")
        kept |= dict.fromkeys(hits)
    groups = tied_modules(model)
    for path, key in (*((path, "targets") for path in targets), *((path, "modules_to_save") for path in kept)):
        if group := next((group for group in groups if any(is_within(tied, path) for tied in group)), None):
            raise ConfigError(
                f"{where}.{key}: {path} shares its weight with {', '.join(tied for tied in group if tied != path)}, and"
                f" trained alone it would no longer be the same. Leave it out, or untie the weights"
                f" (tie_word_embeddings of the model's config)"
            )
    both = [path for path in kept if any(is_within(target, path) for target in (*targets, *parameters))]
    if both:
        raise ConfigError(f"{where}: {both[0]} is trained whole (modules_to_save), and targets too: leave out one")
    put = AdaptersPut(adapters, targets, parameters)
    config = peft_config(model, put, kept)
    try:
        injected(peft, config, model, ADAPTER)
    except ValueError as error:
        raise ConfigError(f"{where}.targets: peft refuses them: {error}") from error
    found = {base_name(name.partition(".lora_")[0]) for name, _ in model.named_parameters() if is_adapter(name)}
    wanted = {*put.targets, *(name.rpartition(".")[0] for name in put.parameters)}
    if found != wanted:
        here = ", ".join(sorted(found ^ wanted)[:SHOWN])
        raise UnsupportedError(
            f"{where}.targets: peft put adapters elsewhere than beside the layers of {type(model).__name__} that are"
            f" named. It took otherwise: {here}. Name other layers"
        )
    remember(model, put)
    return model


def peft_config(model: nn.Module, put: AdaptersPut, kept: Iterable[str]) -> Any:
    """Return peft's config of adapters, shortened to the layers' names where these are as exact."""
    adapters = put.adapters
    stored_transposed = {_is_transposed(model.get_submodule(path)) for path in put.targets}
    return import_peft("adapters").LoraConfig(
        r=adapters.rank,
        lora_alpha=adapters.alpha,
        lora_dropout=adapters.dropout,
        use_rslora=adapters.kind == "rslora",
        use_dora=adapters.kind == "dora",
        target_modules=_shortest((path for path, _ in model.named_modules()), put.targets, 1),
        target_parameters=_shortest((name for name, _ in model.named_parameters()), put.parameters, 2) or None,
        modules_to_save=list(kept) or None,
        fan_in_fan_out=stored_transposed == {True},
    )


def matched_layers(model: nn.Module, targets: Iterable[str], where: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """List the layers that targets select, and the stacked parameters, in the model's order; refuse vain targets.

    A parameter is selected by its module's name and its own, so that ``down_proj`` alone is a layer.
    """
    layers = [
        path
        for path, module in model.named_modules()
        if (isinstance(module, nn.Linear | nn.Embedding) or _is_transposed(module))
    ]
    blocks = repeated_blocks(model)
    stacked = [  # one matrix for each expert, inside the blocks, but those of torch's own modules
        f"{path}.{name}"
        for path, module in model.named_modules()
        if not type(module).__module__.startswith("torch.nn.") and any(is_within(path, block) for block in blocks)
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.dim() == 3
    ]
    found: set[str] = set()
    for target in targets:
        if target == ALL_LINEAR:
            hits = [
                path
                for path in layers
                if not isinstance(model.get_submodule(path), nn.Embedding) and any(is_within(path, b) for b in blocks)
            ]
        else:
            hits = _ending_in(target, [*layers, *(stacked if "." in target else ())])
        if not hits:
            if inside := _ending_in(target, stacked):
                raise ConfigError(
                    f"{where}: '{target}' is a parameter that holds all experts of {inside[0].rpartition('.')[0]}, no"
                    f" layer: write '{_end(inside[0])}' to put adapters beside each of them"
                )
            others = _ending_in(target, [path for path, _ in model.named_modules() if path])
            names = sorted({path.rpartition(".")[2] for path in layers})
            near = nearest(target.rpartition(".")[2], names)
            if "." in target:
                near = nearest(".".join(target.split(".")[-2:]), (_end(name) for name in stacked)) or near
            what = (
                f"is a {type(model.get_submodule(others[0])).__name__}, no linear layer"
                if others
                else f"matches no layer of {type(model).__name__}"
            )
            raise ConfigError(
                f"{where}: '{target}' {what}.{near} Adapters stand beside linear"
                f" layers and embeddings: {', '.join(names[:SHOWN])}{', …' if len(names) > SHOWN else ''}; or"
                f" '{ALL_LINEAR}', those of all blocks"
            )
        found.update(hits)
    return tuple(path for path in layers if path in found), tuple(name for name in stacked if name in found)


def import_peft(what: str) -> Any:
    """Import peft; raise MissingExtraError, which names ``what`` as in need of it, if it is not installed."""
    try:
        quieten_torchao()
        import peft
    except ImportError as error:
        raise MissingExtraError(what, "peft", "adapters") from error
    return peft


def _ending_in(text: str, paths: Iterable[str]) -> list[str]:
    """Select the paths that end in ``text``, in which ``*`` stands for one part."""
    end = re.compile(r"(?:.*\.)?" + r"[^.]+".join(re.escape(part) for part in text.split("*")))
    return [path for path in paths if end.fullmatch(path)]


def _shortest(names: Iterable[str], targets: tuple[str, ...], parts: int) -> list[str]:
    """Return the last parts of the targets' names where those select the same names as the whole do."""
    ends = {_end(name, parts) for name in targets}
    is_exact = {name for name in names if _end(name, parts) in ends} == set(targets)
    return sorted(ends) if is_exact else list(targets)


def _end(name: str, parts: int = 2) -> str:
    """Return the last parts of a name: of a parameter, its module's and its own."""
    return ".".join(name.split(".")[-parts:])


def _is_transposed(module: nn.Module) -> bool:
    """Return whether a module is the linear layer of transformers that stores its weight as (in, out)."""
    loaded = sys.modules.get("transformers.pytorch_utils")
    return loaded is not None and isinstance(module, loaded.Conv1D)
