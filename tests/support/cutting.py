"""Facts and tensor-parallel plans of tiny models, made once per session."""

from __future__ import annotations

from functools import cache
from typing import Any

from meshwright.introspection.facts import ModelFacts, model_facts
from meshwright.introspection.structure.structure import Measured
from meshwright.planning.build import plan
from meshwright.planning.layout import Layout
from meshwright.planning.tensor.plan import TensorPlan

from . import users
from .families import config_of, on_cpu


@cache
def family(name: str) -> ModelFacts:
    return model_facts(on_cpu(config_of(name)))


@cache
def user(name: str) -> ModelFacts:
    return model_facts(users.build(name))


def measured(facts: ModelFacts, ranks: int = 2) -> Measured:
    return facts.measurements.structure(ranks)


def cut(facts: ModelFacts, ranks: int = 2, **requested: Any) -> tuple[TensorPlan, tuple[str, ...]]:
    """The plan, and what it has to say."""
    made = plan(facts, Layout(dp_shard=1, tp=ranks), techniques=requested)
    assert made.tensor is not None
    return made.tensor, made.notes
