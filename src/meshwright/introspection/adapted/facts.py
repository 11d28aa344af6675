"""Read facts about a model with the adapters that are requested for it."""

from __future__ import annotations

from typing import Any

from meshwright.core.errors import ConfigError
from meshwright.introspection.blocks import Hints
from meshwright.introspection.facts import ModelFacts, model_facts
from meshwright.introspection.source import as_module, with_adapters

from .request import Adapters


def facts_with(model: Any, adapters: Adapters | None, hints: Hints | None = None) -> ModelFacts:
    """Return facts about a model with its adapters; the model itself is not changed.

    Args:
        model: a config, a module, a function that returns one, or facts about a model as it is.

    Raises:
        ConfigError: adapters are requested for a module that is built already, or for facts.
    """
    if not isinstance(model, ModelFacts):
        return model_facts(as_module(with_adapters(model, adapters, in_place=False), hints=hints))
    if adapters is not None:
        raise ConfigError("techniques.adapters change the model, and facts about it are given: give the model")
    return model
