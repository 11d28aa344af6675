"""Collect tensor-parallel plans by name, from the user or from the model itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from meshwright.core.names import clean
from meshwright.introspection.facts import ModelFacts
from meshwright.introspection.hints import NONE, Hints, hints_of
from meshwright.introspection.module_kinds import ModuleKind, module_kinds, own_tensor_plan, tied_modules
from meshwright.planning.techniques import TensorStyleRequest

from .styles import GivenStyles, given_styles


@dataclass(frozen=True)
class Words:
    """The named plans of a model, beside its measured structure.

    Attributes:
        given: a user's plan; None: the measured structure decides.
        own: the model's own plan, patterns -> names of styles; the measured structure decides, and notes report the
            differences.
        kinds: kinds of the model's modules.
        tied: groups of modules that share their weight.
        hints: hints of the model's author.
        elsewhere: modules that are distributed over another axis.
    """

    given: GivenStyles | None = None
    own: Mapping[str, str] = field(default_factory=dict)
    kinds: Mapping[str, ModuleKind] = field(default_factory=dict)
    tied: tuple[tuple[str, ...], ...] = ()
    hints: Hints = NONE
    elsewhere: tuple[str, ...] = ()


def words_for(facts: ModelFacts, requested: tuple[TensorStyleRequest, ...]) -> Words:
    """Read the user's plan if there is one, else the regions of the model's hints, else its own plan.

    Raises:
        ConfigError, UnsupportedError: the user's plan does not fit the model.
    """
    model = facts.module
    assert model is not None
    kinds = module_kinds(model)
    tied, hints = tuple(tied_modules(model)), hints_of(model)
    requested = requested or tuple(TensorStyleRequest(wildcard, style) for wildcard, style in hints.regions.items())
    if not requested:
        return Words(own=own_tensor_plan(model), kinds=kinds, tied=tied, hints=hints)
    linears = {
        clean(path): (m.out_features, m.in_features) for path, m in model.named_modules() if isinstance(m, nn.Linear)
    }
    return Words(given_styles(requested, kinds, linears), kinds=kinds, tied=tied, hints=hints)
