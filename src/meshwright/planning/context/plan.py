"""Describe context parallelism: how each attention of a model reaches the tokens of other ranks."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.introspection.mixing.calls import Mixing


@dataclass(frozen=True)
class ContextPlan:
    """How rows are cut over the ranks of the context axis, and how attention reaches whole rows.

    Attributes:
        ranks: size of the context axis.
        mixing: the calls by which the model's tokens see each other.
        cut: which tokens of a row a rank has: "head_tail".
    """

    ranks: int
    mixing: Mixing
    cut: str = "head_tail"
