"""Define the input and the output of a planning rule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.core.errors import MeshwrightError
from meshwright.introspection.facts import ModelFacts, ParameterFact

from .layout import Layout, shares_of
from .techniques import Techniques
from .values import PrecisionPlan

Found = Iterator[MeshwrightError]
"""The errors that one rule yields, worded for the user."""


@dataclass(frozen=True)
class Case:
    """The input of a rule: facts, a resolved layout, the requested techniques and what they resolved to.

    Attributes:
        facts: with the request's frozen parameters.
    """

    facts: ModelFacts
    layout: Layout
    techniques: Techniques
    precision: PrecisionPlan
    technique: str
    device: str
    reduction: str = "sum"

    @property
    def trained(self) -> tuple[ParameterFact, ...]:
        """The parameters that the request leaves trained."""
        return tuple(p for p in self.facts.parameters if p.trainable)

    @property
    def trained_dtypes(self) -> tuple[str, ...]:
        """The dtypes in which those rest."""
        kept = tuple(dict.fromkeys(p.dtype for p in self.trained))
        return kept if self.precision.is_kept else (self.precision.master,)

    @property
    def data_ranks(self) -> int:
        return shares_of(self.layout).data_ranks

    @property
    def batch_ranks(self) -> int:
        return shares_of(self.layout).batch_ranks
