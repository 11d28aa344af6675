"""List the messages over the context axis in a microbatch, counted before anything runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from meshwright.core.axes import Axis
from meshwright.core.names import is_within
from meshwright.introspection.facts import ModelFacts
from meshwright.introspection.mixing.values import Caller, MaskRule, Sizes
from meshwright.planning.values import Collective, PrecisionPlan

from .methods import Method, keys_and_values, of_rank, summed_dtype, traded_elements
from .plan import ContextPlan

ROW_WORDS = 2
"""Numbers by which ranks compare the rows that they bring."""
TRADES = 2
"""Messages in which tokens are traded for heads and back: queries, keys and values; outputs."""


def context_collectives(
    facts: ModelFacts,
    plan: ContextPlan,
    precision: PrecisionPlan,
    recomputed: Mapping[str, tuple[str, ...]],
    tensor_ranks: int = 1,
    *,
    keeps_attention: bool = False,
) -> Iterator[Collective]:
    """List what each attention sends, and the sums of gradients.

    Args:
        recomputed: block -> paths of the modules recomputed in it: keys and values are gathered once more there.
        tensor_ranks: ranks that share the heads; one head is copied to several where there are fewer.
        keeps_attention: a recomputation has attention's result, and so passes nothing round a ring again.
    """
    again = [f"{block}.{path}".rstrip(".") for block, paths in recomputed.items() for path in paths]
    yield Collective("all_reduce", Axis.CP.value, plan.ranks, "rows are the same", ROW_WORDS, "int64", "step")
    for caller, method in zip(plan.mixing.callers, plan.methods, strict=True):
        calls = 1 + any(is_within(caller.path, path) for path in again)
        passes = 1 if keeps_attention else calls
        to = _To(plan.ranks, caller, precision, calls, passes, of_rank(caller.sizes, tensor_ranks))
        messages = _MESSAGES[method.kind](to, method)
        yield from (c for c, backward in messages if not backward or _has_gradient(facts, caller.path))


@dataclass(frozen=True)
class _To:
    """The messages of one attention; ``calls``: of its forward in a microbatch; ``passes``: of those, round a ring."""

    ranks: int
    caller: Caller
    precision: PrecisionPlan
    calls: int
    passes: int
    sizes: Sizes

    def make(self, op: Op, unit: str, elements: int, calls: int, *, summed: bool = False, **options: Any) -> Message:
        """Describe a message of the forward, or of the backward where ``summed`` gradients or ``calls`` < 0."""
        compute = self.precision.compute
        dtype = summed_dtype(compute) if summed else compute
        unit = f"{unit} of {self.caller.path}"
        is_backward = calls < 0
        calls, elements = (-calls, elements) if is_backward else (self.calls * calls, self.calls * elements)
        of_all = {"axis": Axis.CP.value, "ranks": self.ranks, "per": "microbatch", "by_token": True} | options
        return Collective(op=op, unit=unit, elements=elements, dtype=dtype, calls=calls, **of_all), is_backward


Message = tuple[Collective, bool]
"""A message, and whether the backward sends it."""
Messages = Iterator[Message]
Op = Literal["all_gather", "reduce_scatter", "send", "all_to_all"]
BOTH = "keys and values"


def _gathered(to: _To, method: Method) -> Messages:
    yield to.make("all_gather", BOTH, keys_and_values(to.sizes), 1)
    yield to.make("reduce_scatter", BOTH, keys_and_values(to.sizes), -1, summed=True)


def _passed(to: _To, method: Method) -> Messages:
    """Parts of ``neighbours`` ranks go round, each with the key heads that one of the neighbours has."""
    neighbours = method.neighbours
    passes = to.ranks // neighbours - 1
    heads = max(1, -(-to.sizes.key_heads // neighbours))
    elements = passes * neighbours * heads * (to.sizes.key_features + to.sizes.value_features)
    options: dict[str, Any] = {"among": to.ranks, "ranks": 2}
    to = replace(to, calls=to.passes)
    yield to.make("send", BOTH, elements, passes, **options)
    yield to.make("send", BOTH, elements, -passes, **options)
    yield to.make("send", BOTH, elements, -passes, summed=True, **options)


def _traded(to: _To, method: Method) -> Messages:
    # each keeps its own part of what neighbours trade; a message over the whole axis counts as keeping a part of that
    others = method.neighbours - 1
    elements, among = others * traded_elements(to.sizes, method.neighbours), method.neighbours * (to.ranks - 1)
    for direction in (1, -1):
        yield to.make("all_to_all", "heads", elements, direction * TRADES, among=among)


def _traded_and_passed(to: _To, method: Method) -> Messages:
    yield from _traded(to, method)
    yield from _passed(to, method)


def _fetched(to: _To, method: Method) -> Messages:
    options: dict[str, Any] = {"sees": to.caller.rule or MaskRule()}
    yield to.make("all_to_all", BOTH, keys_and_values(to.sizes), 1, **options)
    yield to.make("all_to_all", BOTH, keys_and_values(to.sizes), -1, summed=True, **options)


_MESSAGES = {
    "all_gather": _gathered,
    "ring": _passed,
    "ulysses": _traded,
    "ulysses_ring": _traded_and_passed,
    "halo": _fetched,
}


def _has_gradient(facts: ModelFacts, path: str) -> bool:
    """Tell whether something is trained inside or before a module that calls attention."""
    for parameter in facts.parameters:
        if parameter.trainable:
            return True
        if is_within(parameter.name, path):
            return any(p.trainable for p in facts.parameters if is_within(p.name, path))
    return False
