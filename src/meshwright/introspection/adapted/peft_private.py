"""Reach what peft keeps private: it rewrites targets by the names that layers had before experts were stacked."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterable
from typing import Any

from torch import nn

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
