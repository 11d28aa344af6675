"""What the rules judge, and what they find."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.core.errors import MeshwrightError
from meshwright.introspection.facts import ModelFacts

from .layout import Layout
from .techniques import Techniques
from .values import PrecisionPlan

Found = Iterator[MeshwrightError]
"""The errors that one rule finds, in the user's words."""


@dataclass(frozen=True)
class Case:
    """What the rules judge: facts, a resolved layout, wishes, and what the wishes came to."""

    facts: ModelFacts
    layout: Layout
    techniques: Techniques
    precision: PrecisionPlan
    technique: str
    device: str
    reduction: str = "sum"

    @property
    def data_ranks(self) -> int:
        return self.layout.dp_replicate * self.layout.dp_shard
