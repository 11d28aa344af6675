"""List the messages over the context axis in a microbatch, counted before anything runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from meshwright.core.axes import Axis
from meshwright.core.names import is_within
from meshwright.introspection.facts import ModelFacts
from meshwright.introspection.mixing.values import MaskRule
from meshwright.planning.context.plan import (
    ContextPlan,
    keys_and_values,
    of_rank,
    summed_dtype,
    traded_elements,
)
from meshwright.planning.values import Collective, PrecisionPlan

ROW_WORDS = 2
"""Numbers by which ranks compare the rows that they bring."""
TRADES = 2
"""Messages in which tokens are traded for heads and back: queries, keys and values; outputs."""


def row_agreement(plan: ContextPlan) -> Collective:
    """Return the message by which ranks agree that they bring the same rows."""
    return Collective("all_reduce", Axis.CP.value, plan.ranks, "rows are the same", ROW_WORDS, "int64", "step")


def attention_collectives(
    facts: ModelFacts,
    plan: ContextPlan,
    precision: PrecisionPlan,
    recomputed: tuple[str, ...],
    tensor_ranks: int = 1,
    *,
    begins: bool = True,
    blocks: tuple[str, ...] | None = None,
    keeps_attention: bool = False,
) -> Iterator[Collective]:
    """List what attentions and mixers send.

    Args:
        recomputed: paths of the modules that are recomputed: keys and values are gathered once more there.
        tensor_ranks: ranks that share the heads; one head is copied to several where there are fewer.
        begins: the model's first block is here; behind it all activations have gradients.
        blocks: of a pipeline's stage; None: all attentions are here.
        keeps_attention: a recomputation has attention's result, and so passes nothing round a ring again.
    """
    for caller, method in zip(plan.mixing.callers, plan.methods, strict=True):
        if blocks is not None and not any(is_within(caller.path, block) for block in blocks):
            continue
        to = _Place.of(facts, plan, precision, recomputed, caller.path, begins)
        sizes, neighbours = of_rank(caller.sizes, tensor_ranks), method.neighbours
        if method.kind == "all_gather":
            yield from to.send("all_gather", BOTH, keys_and_values(sizes), 1)
            yield from to.send("reduce_scatter", BOTH, keys_and_values(sizes), -1, summed=True)
        if method.kind in ("ulysses", "ulysses_ring"):
            # each keeps its own part of what neighbours trade; a message over the whole axis counts as keeping a part
            elements, among = (neighbours - 1) * traded_elements(sizes, neighbours), neighbours * (to.ranks - 1)
            for direction in (1, -1):
                yield from to.send("all_to_all", "heads", elements, direction * TRADES, among=among)
        if method.kind in ("ring", "ulysses_ring"):
            # parts of all neighbours go round, each with the key heads that one of the neighbours has
            rounds, heads = to.ranks // neighbours - 1, max(1, -(-sizes.key_heads // neighbours))
            elements = rounds * neighbours * heads * (sizes.key_features + sizes.value_features)
            options: dict[str, Any] = {"among": to.ranks, "ranks": 2}
            to = replace(to, calls=1) if keeps_attention else to
            yield from to.send("send", BOTH, elements, rounds, **options)
            yield from to.send("send", BOTH, elements, -rounds, **options)
            yield from to.send("send", BOTH, elements, -rounds, summed=True, **options)
        if method.kind == "halo":
            options = {"sees": caller.rule or MaskRule()}
            yield from to.send("all_to_all", BOTH, keys_and_values(sizes), 1, **options)
            yield from to.send("all_to_all", BOTH, keys_and_values(sizes), -1, summed=True, returns=True, **options)
    for planned in plan.mixers:
        if blocks is not None and planned.block and planned.block not in blocks:
            continue
        to = _Place.of(facts, plan, precision, recomputed, planned.mixer.path, begins)
        for each in planned.gathered:
            options = {"dtype": "int64"} if each.is_integer else {}
            yield from to.send("all_gather", "tokens", each.features, 1, **options)
            if each.follows and not each.is_integer:
                yield from to.send("reduce_scatter", "tokens", each.features, -1, summed=True)
        if planned.trade is not None:  # what its layers give, and what the last is given
            traded = planned.trade.traded(to.ranks)
            elements, among = (to.ranks - 1) * sum(traded.values()), to.ranks * (to.ranks - 1)
            for direction in (1, -1):
                yield from to.send("all_to_all", "heads", elements, direction * len(traded), among=among)


Op = Literal["all_gather", "reduce_scatter", "send", "all_to_all"]
BOTH = "keys and values"


@dataclass(frozen=True)
class _Place:
    """The messages of one module.

    Attributes:
        calls: of its forward in a microbatch.
        has_gradient: whether something is trained before it, or beside it in the module around.
    """

    ranks: int
    path: str
    precision: PrecisionPlan
    calls: int
    has_gradient: bool

    @classmethod
    def of(
        cls,
        facts: ModelFacts,
        plan: ContextPlan,
        precision: PrecisionPlan,
        recomputed: tuple[str, ...],
        path: str,
        begins: bool,
    ) -> _Place:
        names = [parameter.name for parameter in facts.parameters]
        around = path
        while around and not any(is_within(name, around) for name in names):
            around = around.rpartition(".")[0]
        behind = max((number for number, name in enumerate(names) if is_within(name, around)), default=len(names) - 1)
        has_gradient = not begins or any(parameter.trainable for parameter in facts.parameters[: behind + 1])
        calls = 1 + (has_gradient and any(is_within(path, module) for module in recomputed))
        return cls(plan.ranks, path, precision, calls, has_gradient)

    def send(
        self, op: Op, unit: str, elements: int, calls: int, *, summed: bool = False, **options: Any
    ) -> Iterator[Collective]:
        """Yield a message of the forward, or of the backward (``calls`` < 0), whose gradients may be ``summed``."""
        is_backward = calls < 0
        if is_backward and not self.has_gradient:
            return
        compute = self.precision.compute
        dtype = options.pop("dtype", summed_dtype(compute) if summed else compute)
        calls, elements = (-calls, elements) if is_backward else (self.calls * calls, self.calls * elements)
        of_all = {"axis": Axis.CP.value, "ranks": self.ranks, "per": "microbatch", "by_token": True} | options
        yield Collective(op=op, unit=f"{unit} of {self.path}", elements=elements, dtype=dtype, calls=calls, **of_all)
