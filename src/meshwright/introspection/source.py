"""Turn a config, a module or a factory into a module without allocating weights."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch import nn

from meshwright.core.errors import ConfigError
from meshwright.core.record import recall, remember
from meshwright.models.decoder import Decoder
from meshwright.models.decoder_config import DecoderConfig

from .adapted.model import AdaptedModel, put_adapters
from .adapted.request import Adapters
from .constructor.meta import on_meta
from .constructor.recording import NotRecordedError, built, record, seeded
from .hints import Hints, give
from .huggingface import CausalLM, is_config


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
