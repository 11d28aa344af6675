"""What is said by name of how a model is cut: by the user, or by the model itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from meshwright.core.names import clean
from meshwright.introspection.facts import ModelFacts
from meshwright.introspection.module_kinds import ModuleKind, module_kinds, tied_modules
from meshwright.introspection.own_plan import own_tensor_plan
from meshwright.planning.techniques import TensorStyleWish

from .styles import GivenStyles, given_styles


@dataclass(frozen=True)
class Words:
    """What is said of a model by name, beside what was measured.

    Attributes:
        given: a user's plan; None: what was measured is done.
        own: the plan that the model brings along: patterns -> words of styles. What was measured is done, and where it differs is said.
        kinds: of the model's modules.
        tied: modules that share their weight, together.
        elsewhere: modules that are shared out over another axis.
    """

    given: GivenStyles | None = None
    own: Mapping[str, str] = field(default_factory=dict)
    kinds: Mapping[str, ModuleKind] = field(default_factory=dict)
    tied: tuple[tuple[str, ...], ...] = ()
    elsewhere: tuple[str, ...] = ()


def words_for(facts: ModelFacts, wishes: tuple[TensorStyleWish, ...]) -> Words:
    """The user's plan where there is one, else the model's own.

    Raises:
        ConfigError, UnsupportedError: the user's plan does not fit the model.
    """
    model = facts.module
    assert model is not None
    kinds = module_kinds(model)
    tied = tuple(tied_modules(model))
    if not wishes:
        return Words(own=own_tensor_plan(model), kinds=kinds, tied=tied)
    linears = {clean(path): (m.out_features, m.in_features) for path, m in model.named_modules() if isinstance(m, nn.Linear)}
    return Words(given_styles(wishes, kinds, linears), kinds=kinds, tied=tied)
