"""From what a user hands over (a config, a module, a factory) to a module, without allocating weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from meshwright.core.errors import ConfigError
from meshwright.models.decoder import Decoder
from meshwright.models.decoder_config import DecoderConfig

from .huggingface import CausalLM, is_config


def as_module(model: DecoderConfig | nn.Module | Callable[[], nn.Module] | Any) -> nn.Module:
    """The module itself; a config (ours, or one of transformers) or a factory is built on the meta device.

    Raises:
        ConfigError: neither a module, a known config, nor a callable that returns a module.
    """
    if isinstance(model, nn.Module):
        return model
    if isinstance(model, DecoderConfig):
        with torch.device("meta"):
            return Decoder(model)
    if is_config(model):
        model = CausalLM(model)
    if callable(model):
        with torch.device("meta"):
            built = model()
        if isinstance(built, nn.Module):
            return built
        raise ConfigError(f"the model factory returned {type(built).__name__}, not an nn.Module")
    raise ConfigError(f"a model is an nn.Module, a model config, or a function that returns a module; got {type(model).__name__}")
