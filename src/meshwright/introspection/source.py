"""Turn a config, a module or a factory into a module without allocating weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from meshwright.core.errors import ConfigError
from meshwright.core.record import recall, remember
from meshwright.models.decoder import Decoder
from meshwright.models.decoder_config import DecoderConfig

from .constructor.meta import on_meta
from .constructor.recording import NotRecordedError, built, record
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


def _without_memory(build: Callable[[], Any], seed: int) -> Any:
    """Call a factory on meta; if it reads values, record it on fake tensors, or else build it with real weights."""
    try:
        with on_meta():
            return build()
    except Exception as error:
        if "meta" not in str(error):
            raise
    try:
        return record(build, seed)[0]
    except NotRecordedError:
        return built(build, seed)
