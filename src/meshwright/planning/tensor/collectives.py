"""List the messages over the tensor axis in a microbatch, before the model runs.

With the sequence cut (arXiv 2205.05198), a column-parallel input is gathered in forward, again in backward, and its
gradient reduced and scattered; a row-parallel output is reduced and scattered in forward, and its gradient gathered.
Without, each is one all-reduce.

A float8 operand of which each rank has a part needs one scale, so the ranks agree on one number for it: its largest
magnitude. Layers that share a gathered input agree in one message, other layers in one each. Backward reuses the
numbers of the forward, so only the gradients of outputs need further messages.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from meshwright.core.axes import Axis
from meshwright.core.names import is_within, owner
from meshwright.introspection.facts import ModelFacts
from meshwright.planning.float8 import Float8Plan
from meshwright.planning.tensor.plan import WHOLE, BlocksPlan, OperandParts, RegionPlan, TensorPlan
from meshwright.planning.values import Collective, LossPlan, PrecisionPlan

Op = Literal["all_gather", "reduce_scatter", "all_reduce"]


def tensor_collectives(
    facts: ModelFacts,
    plan: TensorPlan,
    precision: PrecisionPlan,
    loss: LossPlan | None,
    recomputed: tuple[str, ...],
    shards: int,
    float8: Float8Plan | None = None,
) -> Iterator[Collective]:
    """List the collectives of one forward and backward, and the sums of gradients at the end of a step.

    Args:
        recomputed: paths of the modules whose forward runs twice: blocks, or modules inside them.
        shards: number of ranks that shard a tensor rank's part once more.
    """
    count, width = _Counts(facts, plan, precision, shards, float8), 0
    for block, planned in ((b, r) for b in plan.blocks for r in plan.kind_of(b).regions):
        cut = planned.region.cut_of(f"{planned.region.consumer}.weight")
        assert cut is not None
        width = count.shapes[f"{block}.{planned.region.consumer}.weight"][1 - cut.dim]
        break
    flows = not plan.begins or any(count.is_trained(name) for name in plan.before)
    if plan.embedding:
        op: Op = "reduce_scatter" if plan.sequence_parallel and plan.embedding_is_hidden else "all_reduce"
        yield count.one(op, "embedding", width)
    if plan.sequence_parallel and plan.begins and flows:
        yield count.one("all_gather", "embedding", width)
    for block in plan.blocks:
        work = _BlockWork(count, plan.kind_of(block), block, width)
        yield from work.forward(work.kind.regions)
        yield from work.backward(flows)
        again = tuple(path[len(block) + 1 :] for path in recomputed if is_within(path, block))
        if again and (flows or work.trains):
            regions = (r for r in work.kind.regions if any(is_within(r.region.container, path) for path in again))
            yield from work.forward(tuple(regions))
        flows = flows or work.trains
    if plan.sequence_parallel and plan.gathers_after_blocks:
        yield count.one("all_gather", "behind the blocks", width)
        if flows and plan.head:  # a whole head gives all ranks the same gradient
            yield count.one("reduce_scatter", "behind the blocks", width)
    if plan.head:
        inside = (*plan.blocks, plan.embedding, plan.head)
        behind = (p for p in facts.parameters if not any(is_within(p.name, path) for path in inside))
        flows = flows or any(p.trainable and p.name not in plan.before for p in behind)
        width = count.shapes[f"{plan.head}.weight"][1]
        if not (plan.sequence_parallel and plan.gathers_after_blocks):
            if plan.sequence_parallel:
                regathers = plan.regather and count.trains(plan.head) and loss is None
                yield count.one("all_gather", "head", width, 2 if regathers else 1)
            if flows:
                yield count.one("reduce_scatter" if plan.sequence_parallel else "all_reduce", "head", width)
        if not plan.tail.obstacle_if_cut:
            wide = "float64" if count.dtype == "float64" else "float32"
            chunks = 1 if loss is None else loss.chunks
            yield count.one("all_reduce", "loss: maxima", 1, chunks, wide, share=1 / chunks)
            yield count.one("all_reduce", "loss: sums", 2, chunks, wide, share=1 / chunks)
    sums: dict[str, int] = {}  # elements of the gradients that are summed over the tensor axis, on one shard, by dtype
    for p in facts.parameters:
        if not p.trainable:
            continue
        cut = plan.cut_of(p.name, p.shape)
        if cut is None:
            held = -(-(p.shape[0] if p.shape else 1) // shards) * math.prod(p.shape[1:])
            sums[p.dtype] = sums.get(p.dtype, 0) + held
            continue
        dim, parts = cut
        for part in parts:
            if part.copies(plan.ranks) > 1:  # a slot for each share
                whole = (*p.shape[:dim], part.size, *p.shape[dim + 1 :])
                held = math.prod(whole) // (shards if dim == 0 else 1)
                sums[p.dtype] = sums.get(p.dtype, 0) + held
    for dtype, summed in sums.items():
        yield Collective(
            "all_reduce", Axis.TP.value, plan.ranks, "gradients of whole parameters", summed, dtype, "step"
        )


def agreeing(float8: Float8Plan | None, tensor: TensorPlan, shards: int) -> dict[str, OperandParts]:
    """Map each layer whose operands ranks agree on to the operands that are parts; row-wise scales need none.

    Args:
        shards: number of ranks among which FSDP shards; a weight that it gathers in float8 comes with its scale.
    """
    if float8 is None or float8.recipe != "tensorwise":
        return {}
    found = {path: tensor.parts_of(path) for path in float8.modules}
    if float8.all_gather and shards > 1:
        found = {path: replace(parts, weight=False) for path, parts in found.items()}
    return {path: parts for path, parts in found.items() if parts != WHOLE}


class _Counts:
    def __init__(
        self, facts: ModelFacts, plan: TensorPlan, precision: PrecisionPlan, shards: int, float8: Float8Plan | None
    ):
        self.agreeing = agreeing(float8, plan, shards)
        self.plan = plan
        self.shapes = {name: p.shape for p in facts.parameters for name in (p.name, *p.aliases)}
        self._frozen = {name for p in facts.parameters if not p.trainable for name in (p.name, *p.aliases)}
        self.dtype = precision.compute

    def one(
        self,
        op: Op,
        unit: str,
        elements: int,
        calls: int = 1,
        dtype: str | None = None,
        *,
        share: float = 1.0,
        whole: bool = False,
    ) -> Collective:
        """Make a collective of ``elements`` per token and call (``share``: of tokens; ``whole``: uncut sequences)."""
        total = round(elements * calls * share)
        filled = self.plan.sequence_parallel and op != "all_reduce" and not whole
        kind = dtype or self.dtype
        return Collective(
            op, Axis.TP.value, self.plan.ranks, unit, total, kind, "microbatch", calls, by_token=True, filled=filled
        )

    def is_trained(self, name: str) -> bool:
        return name not in self._frozen

    def trains(self, *paths: str) -> bool:
        names = (f"{path}.{name}" for path in paths for name in ("weight", "bias"))
        return any(self.is_trained(name) for name in names if name in self.shapes)


class _BlockWork:
    def __init__(self, count: _Counts, kind: BlocksPlan, block: str, width: int):
        self.count, self.kind, self.block, self.width = count, kind, block, width
        self.cut, self.regather = count.plan.sequence_parallel, count.plan.regather
        names = [name for name in count.shapes if name.startswith(f"{block}.")]
        self.trains = any(count.is_trained(name) for name in names)
        self._with = {path: r.region.linears_of(path) for r in kind.regions for path in r.region.linears}
        linears = {path for paths in self._with.values() for path in paths}
        self.norms_train = any(count.is_trained(name) for name in names if owner(name)[len(block) + 1 :] in kind.norms)
        self.others_train = any(
            count.is_trained(name) for name in names if owner(name)[len(block) + 1 :] not in linears
        )
        here = {path[len(block) + 1 :]: parts for path, parts in count.agreeing.items() if is_within(path, block)}
        self.scaled = here
        pairs = [pair for r in kind.regions for adapter in r.region.adapted for pair in adapter.pairs]
        # layers of adapters that take the output of a trained one
        self.following = {second for first, second in pairs if self._weight_trains(first)}

    def forward(self, regions: tuple[RegionPlan, ...]) -> Iterator[Collective]:
        begins = {path for planned in regions for path in planned.region.begins}
        gathers = sum(1 for paths in self.kind.gathers if begins.intersection(paths))
        gathers = min(gathers, 1) if self.kind.norms else gathers
        consumers = {planned.region.consumer for planned in regions}
        ends = sum(1 for path in self._ends() if path in consumers)
        if self.cut and gathers:
            yield self.count.one("all_gather", self.block, self.width, gathers)
        if ends:
            yield self.count.one("reduce_scatter" if self.cut else "all_reduce", self.block, self.width, ends)
        for norm, gathered, _ in self._spanning(regions):
            yield self.count.one("all_gather", f"{self.block}.{norm}", gathered, whole=True)
        called = [paths for paths in self.kind.gathers if begins.intersection(paths)]
        if self.kind.norms and called:
            called = [tuple(path for paths in self.kind.gathers for path in paths)]
        together = [paths for paths in called if not self._are_adapted(paths)]
        alone = [found for paths in called if self._are_adapted(paths) for path in paths for found in self._with[path]]
        for region in (planned.region for planned in regions):
            alone += [*region.fed, *self._with[region.consumer]]
        parts = [[self.scaled.get(p, WHOLE) for p in paths] for paths in (*together, *((path,) for path in alone))]
        yield from self._scales([sum(part.x + part.weight for part in one) for one in parts])

    def backward(self, flows: bool) -> Iterator[Collective]:
        gathered = scattered = 0
        scales: list[int] = []
        if self.kind.norms:  # the block's input before its norms, whose backward needs it whole
            runs = flows or self.norms_train or self._train(*(path for paths in self.kind.gathers for path in paths))
            gathered, scattered = int(self.cut and self.regather and runs), int(flows)
            pairs = zip(self.kind.norms, self.kind.gathers, strict=True)
            needs = {norm: flows or self.count.trains(f"{self.block}.{norm}") for norm in self.kind.norms}
            scales.append(sum(self._scale_of_gradient(p, needs[norm]) for norm, paths in pairs for p in paths))
        flows = flows or self.others_train
        for planned in self.kind.regions:
            region = planned.region
            begins = [paths for paths in self.kind.gathers if set(paths) & set(region.begins) and not self.kind.norms]
            first = [paths for paths in begins if paths[0] in region.begins]  # shared inputs count where they begin
            if region.consumer in self._ends() and (flows or self._train(*region.linears)):
                gathered += 1
            if self.cut and self.regather:
                # with adapters, the input is saved whole for backward
                gathered += sum(1 for paths in first if self._train(*paths) and not self._are_adapted(paths))
            if flows:
                scattered += len(first)
            for norm, _, features in self._spanning((planned,)):
                if flows or self._train(*region.latent, *region.producers):
                    yield self.count.one("all_reduce", f"{self.block}.{norm}", features)
            for paths in first:
                if self._are_adapted(paths):
                    adapted = [found for path in paths for found in self._with[path]]
                    scales += (self._scale_of_gradient(p, flows or p in self.following) for p in adapted)
                else:
                    scales.append(sum(self._scale_of_gradient(path, flows) for path in paths))
            fed = flows or self._train(*region.latent)
            scales += [self._scale_of_gradient(path, fed) for path in region.fed]
            if not self.kind.summed:
                flows = flows or self._train(*region.linears)
        if self.cut and gathered:
            yield self.count.one("all_gather", self.block, self.width, gathered)
        if scattered:
            yield self.count.one("reduce_scatter" if self.cut else "all_reduce", self.block, self.width, scattered)
        yield from self._scales(scales)

    def _ends(self) -> tuple[str, ...]:
        return self.kind.summed[-1:] or tuple(planned.region.consumer for planned in self.kind.regions)

    def _train(self, *paths: str) -> bool:
        """Return whether any of these linear layers, or of their adapters, is trained."""
        return self.count.trains(*(f"{self.block}.{found}" for path in paths for found in self._with[path]))

    def _weight_trains(self, path: str) -> bool:
        return self.count.is_trained(f"{self.block}.{path}.weight")

    def _are_adapted(self, paths: tuple[str, ...]) -> bool:
        return any(len(self._with[path]) > 1 for path in paths)

    def _scale_of_gradient(self, path: str, flows: bool) -> int:
        return int(self.scaled.get(path, WHOLE).gradient and (flows or self._weight_trains(path)))

    def _scales(self, sizes: list[int]) -> Iterator[Collective]:
        """List the messages by which ranks agree on so many float8 scales each."""
        for size, calls in Counter(size for size in sizes if size).items():
            unit, ranks = f"{self.block}: float8 scales", self.count.plan.ranks
            yield Collective("all_reduce", Axis.TP.value, ranks, unit, size, "float32", "microbatch", calls)

    def _spanning(self, regions: tuple[RegionPlan, ...]) -> Iterator[tuple[str, int, int]]:
        """Yield (norm, gathered features, features whose gradients are summed)."""
        for planned in regions:
            for norm in planned.region.spanning:
                cut = planned.region.cut_of(f"{norm}.weight")
                assert cut is not None
                features = sum(part.size for part in cut.parts)
                yield norm, features * cut.parts[0].copies(self.count.plan.ranks), features
