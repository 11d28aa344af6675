"""Define the input and the output of a planning rule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.core.errors import MeshwrightError
from meshwright.introspection.facts import ModelFacts

from .layout import Layout
from .shares import shares_of
from .techniques import Techniques
from .values import PrecisionPlan

Found = Iterator[MeshwrightError]
"""The errors that one rule yields, worded for the user."""


@dataclass(frozen=True)
class Case:
    """The input of a rule: facts, a resolved layout, the requested techniques and what they resolved to."""

    facts: ModelFacts
    layout: Layout
    techniques: Techniques
    precision: PrecisionPlan
    technique: str
    device: str
    reduction: str = "sum"

    @property
    def data_ranks(self) -> int:
        return shares_of(self.layout).data_ranks

    @property
    def batch_ranks(self) -> int:
        return shares_of(self.layout).batch_ranks
