"""List the messages over the context axis in a microbatch, counted before anything runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from meshwright.core.axes import Axis
from meshwright.core.names import is_within
from meshwright.introspection.facts import ModelFacts
from meshwright.planning.values import Collective, PrecisionPlan

from .plan import ContextPlan

WIDE = {"float64": "float64"}
"""dtype in which gradients are summed, by compute dtype; float32 for all others."""


ROW_WORDS = 2
"""Numbers by which ranks compare the rows that they bring."""


def context_collectives(
    facts: ModelFacts,
    plan: ContextPlan,
    precision: PrecisionPlan,
    recomputed: Mapping[str, tuple[str, ...]],
    tensor_ranks: int = 1,
) -> Iterator[Collective]:
    """List the gathering of keys and values, and the sums of their gradients.

    Args:
        recomputed: block -> paths of the modules recomputed in it: keys and values are gathered once more there.
        tensor_ranks: ranks that share the heads; one head is copied to several where there are fewer.
    """
    axis, ranks = Axis.CP.value, plan.ranks
    again = [f"{block}.{path}".rstrip(".") for block, paths in recomputed.items() for path in paths]
    yield Collective("all_reduce", axis, ranks, "rows are the same", ROW_WORDS, "int64", "step")
    for caller in plan.mixing.callers:
        sizes = caller.sizes
        elements = -(-sizes.key_heads // tensor_ranks) * (sizes.key_features + sizes.value_features)
        unit = f"keys and values of {caller.path}"
        calls = 1 + any(is_within(caller.path, path) for path in again)
        options = {"by_token": True}
        yield Collective(
            "all_gather", axis, ranks, unit, calls * elements, precision.compute, "microbatch", calls, **options
        )
        if _has_gradient(facts, caller.path):
            wide = WIDE.get(precision.compute, "float32")
            yield Collective("reduce_scatter", axis, ranks, unit, elements, wide, "microbatch", 1, **options)


def _has_gradient(facts: ModelFacts, path: str) -> bool:
    """Tell whether something is trained inside or before a module that calls attention."""
    for parameter in facts.parameters:
        if parameter.trainable:
            return True
        if is_within(parameter.name, path):
            return any(p.trainable for p in facts.parameters if is_within(p.name, path))
    return False
