"""What travels over the tensor axis in a microbatch, counted before anything runs.

With the sequence cut (arXiv 2205.05198), a column-parallel input is gathered in forward, again in backward, and its gradient reduced and
scattered; a row-parallel output is reduced and scattered in forward, and its gradient gathered. Without, one all-reduce each.
"""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.core.axes import Axis
from meshwright.introspection.facts import ModelFacts

from .plan import Collective, LossPlan, PrecisionPlan
from .tensor_plan import BlocksPlan, TensorPlan


def tensor_collectives(
    facts: ModelFacts, plan: TensorPlan, precision: PrecisionPlan, loss: LossPlan | None, recomputed: tuple[str, ...], frozen: set[str]
) -> tuple[Collective, ...]:
    """Of one forward and backward, and of the sums of gradients at the end of a step.

    Args:
        recomputed: blocks whose forward runs twice.
        frozen: names of parameters that are not trained.
    """
    return tuple(_found(_Counts(facts, plan, precision, frozen), loss, recomputed))


class _Counts:
    """Makes the entries of one plan."""

    def __init__(self, facts: ModelFacts, plan: TensorPlan, precision: PrecisionPlan, frozen: set[str]):
        self.plan, self.frozen = plan, frozen
        self.shapes = {p.name: p.shape for p in facts.parameters} | {alias: p.shape for p in facts.parameters for alias in p.aliases}
        self.dtype, self.master = precision.compute, precision.master

    def one(self, op: str, unit: str, elements: int, calls: int = 1, dtype: str | None = None) -> Collective:
        """Of activations: ``elements`` for each token."""
        return Collective(op, Axis.TP.value, self.plan.ranks, unit, elements, dtype or self.dtype, "microbatch", calls, by_token=True)  # type: ignore[arg-type]

    def features(self, path: str, dim: int) -> int:
        return self.shapes[f"{path}.weight"][dim]

    def trains(self, *paths: str) -> bool:
        return any(f"{path}.{name}" not in self.frozen for path in paths for name in ("weight", "bias") if f"{path}.{name}" in self.shapes)


def _found(count: _Counts, loss: LossPlan | None, recomputed: tuple[str, ...]) -> Iterator[Collective]:
    plan = count.plan
    cut = plan.sequence_parallel
    width = _width(count)
    flows = any(name not in count.frozen for name in plan.before)
    yield from _entry(count, width, flows)
    for block in plan.blocks:
        kind = plan.kind_of(block)
        for part in _block(count, kind, block, width, flows):
            twice = part.elements and block in recomputed
            yield part
            if twice:
                yield from ()
        if block in recomputed and (flows or _trains(count, block)):
            yield from _forward(count, kind, block, width)
        flows = flows or _trains(count, block)
    if cut and plan.gathers_after_blocks:
        yield count.one("all_gather", "behind the blocks", width)
        yield count.one("reduce_scatter", "behind the blocks", width)
    yield from _head(count, loss)
    summed = sum(_numel(count.shapes[name]) for name in _summed_names(count))
    if summed:
        yield Collective("all_reduce", Axis.TP.value, plan.ranks, "gradients of whole parameters", summed, count.master, "step")


def _entry(count: _Counts, width: int, flows: bool) -> Iterator[Collective]:
    plan = count.plan
    if plan.embedding:
        yield count.one("reduce_scatter" if plan.sequence_parallel and plan.embedding_is_hidden else "all_reduce", "embedding", width)
    if plan.sequence_parallel and flows:
        yield count.one("all_gather", "embedding", width)


def _forward(count: _Counts, kind: BlocksPlan, block: str, width: int) -> Iterator[Collective]:
    """Of a block."""
    into, out = ("all_gather", "reduce_scatter") if count.plan.sequence_parallel else ("", "all_reduce")
    ends = kind.summed[-1:] or tuple(planned.region.consumer for planned in kind.regions)
    if into and kind.gathers:
        yield count.one(into, block, width, len(kind.gathers))
    if ends:
        yield count.one(out, block, width, len(ends))
    for norm, features in _spanning(count, kind, block):
        yield count.one("all_gather", f"{block}.{norm}", features)


def _block(count: _Counts, kind: BlocksPlan, block: str, width: int, flows: bool) -> Iterator[Collective]:
    plan = count.plan
    yield from _forward(count, kind, block, width)
    ends = kind.summed[-1:] or tuple(planned.region.consumer for planned in kind.regions)
    if plan.sequence_parallel:
        regathered = len(kind.gathers) if plan.regather else 0
        if ends:
            yield count.one("all_gather", block, width, len(ends) + regathered)
        if kind.gathers:
            yield count.one("reduce_scatter", block, width, len(kind.gathers))
    elif kind.gathers:
        yield count.one("all_reduce", block, width, len(kind.gathers))
    for norm, features in _spanning(count, kind, block):
        yield count.one("all_reduce", f"{block}.{norm}", features)


def _spanning(count: _Counts, kind: BlocksPlan, block: str) -> Iterator[tuple[str, int]]:
    for planned in kind.regions:
        for norm in planned.region.spanning:
            yield norm, count.shapes[f"{block}.{norm}.weight"][0]


def _head(count: _Counts, loss: LossPlan | None) -> Iterator[Collective]:
    plan = count.plan
    if not plan.head:
        return
    width = count.features(plan.head, 1)
    whole = plan.sequence_parallel and plan.gathers_after_blocks
    if not whole:
        if plan.sequence_parallel:
            yield count.one("all_gather", "head", width, 1 if loss is not None or not plan.regather else 2)
        yield count.one("reduce_scatter" if plan.sequence_parallel else "all_reduce", "head", width)
    wide = "float64" if count.dtype == "float64" else "float32"
    if not plan.tail.obstacle:
        yield count.one("all_reduce", "loss", 3, 1, wide)


def _width(count: _Counts) -> int:
    plan = count.plan
    for block in plan.blocks:
        for planned in plan.kind_of(block).regions:
            cut = planned.region.cut_of(f"{planned.region.consumer}.weight")
            assert cut is not None
            return count.shapes[f"{block}.{planned.region.consumer}.weight"][1 - cut.dim]
    return 0


def _trains(count: _Counts, block: str) -> bool:
    return any(name.startswith(block + ".") and name not in count.frozen for name in count.shapes)


def _summed_names(count: _Counts) -> Iterator[str]:
    for name, shape in count.shapes.items():
        if name not in count.frozen and count.plan.cut_of(name, shape) is None and count.plan.is_summed(name):
            yield name


def _numel(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total
