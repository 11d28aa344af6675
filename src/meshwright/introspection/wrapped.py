"""Find models inside others that pass their inputs on, as adapter libraries wrap them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from torch import nn


def layers_of_wrapping(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the model, then each model inside that receives its wrapper's inputs unchanged; the innermost last."""
    yield model
    while (inner := _inside(model)) is not None:
        yield (model := inner)


def core_of(model: nn.Module) -> nn.Module:
    """Return the innermost wrapped model, the one that a config builds."""
    *_, core = layers_of_wrapping(model)
    return core


def _inside(model: nn.Module) -> nn.Module | None:
    """Return the model inside a wrapper: the only child with parameters, where the wrapper has none of its own.

    The wrapper either takes any arguments, or takes any keyword and shows the child's config as its own.
    """
    children = [child for child in model.children() if next(child.parameters(), None) is not None]
    if len(children) != 1 or any(parameter is not None for parameter in model._parameters.values()):
        return None
    kinds = {parameter.kind for parameter in inspect.signature(model.forward).parameters.values()}
    takes_anything = kinds == {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    config = getattr(model, "config", None)
    shows_config = config is not None and getattr(children[0], "config", None) is config
    return children[0] if takes_anything or (inspect.Parameter.VAR_KEYWORD in kinds and shows_config) else None
