"""From what a user hands over (a config, a module, a factory) to a module, without allocating weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from meshwright.core.errors import ConfigError
from meshwright.models.decoder import Decoder
from meshwright.models.decoder_config import DecoderConfig

from .constructor.recording import NotRecordedError, built, record
from .huggingface import CausalLM, is_config
from .meta import on_meta

BUILDER = "_meshwright_builder"
"""Under this name a module knows what built it."""


def builder_of(module: nn.Module) -> Callable[[], nn.Module] | None:
    """The function, class or config that ``as_module`` built a module by; None where somebody handed over the module."""
    return module.__dict__.get(BUILDER)


def as_module(model: DecoderConfig | nn.Module | Callable[[], nn.Module] | Any, seed: int = 0) -> nn.Module:
    """The module itself; a config (ours, or one of transformers) or a factory is built on the meta device.

    Args:
        seed: of the weights of a factory that decides by the numbers that it draws: no other is built with weights here.

    Raises:
        ConfigError: neither a module, a known config, nor a callable that returns a module.
    """
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
            built.__dict__[BUILDER] = model
            return built
        raise ConfigError(f"the model factory returned {type(built).__name__}, not an nn.Module")
    raise ConfigError(f"a model is an nn.Module, a model config, or a function that returns a module; got {type(model).__name__}")


def _without_memory(build: Callable[[], Any], seed: int) -> Any:
    """Call a factory on meta; with weights if it asks for values that it has only then."""
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
