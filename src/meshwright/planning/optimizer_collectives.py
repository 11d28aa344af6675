"""List the messages of optimizers that need whole matrices, and which ranks own these.

The owner of a matrix receives its parts, computes on the whole, and returns to each rank the part that it holds. The
schedule follows from shapes and placements alone, so the plan counts what the ranks later send.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, product
from typing import NamedTuple

from meshwright.core.axes import Axis
from meshwright.core.parts import LocalRange, Range, is_plain, runs_of_chunk, runs_of_parts
from meshwright.introspection.facts import ParameterFact
from meshwright.planning.layout import sharded_dim
from meshwright.planning.plan import Plan
from meshwright.planning.rank_kinds import coordinates
from meshwright.planning.values import Collective

# --- share whole matrices out among the ranks that hold parts or copies of them

ROUND_ELEMENTS = 1 << 22
"""Number of elements of whole matrices, on all owners together, beyond which the next ones travel in a message of their
own; each owner's first matrix of a round may exceed it.
"""

Box = tuple[Range, ...]
"""A range for each dim of a whole tensor."""


@dataclass(frozen=True, order=True)
class HeldBox:
    """A box of a matrix and the ranks that hold it."""

    box: Box
    ranks: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(high - low for low, high in self.box)

    def sender(self, owner: int) -> int:
        """Return the rank that brings the box to its owner: the owner itself, or the nearest that holds a copy."""
        return min(self.ranks, key=lambda rank: (abs(rank - owner), rank))


@dataclass(frozen=True)
class Matrix:
    """A matrix, and where its boxes are; together they cover it once."""

    rows: int
    columns: int
    boxes: tuple[HeldBox, ...]

    @property
    def cost(self) -> int:
        """Operations of a step of Newton–Schulz, up to a factor: two products with the Gram matrix, and its square."""
        short, long = sorted((self.rows, self.columns))
        return short * short * (2 * long + short)

    @property
    def whole_on(self) -> tuple[int, ...]:
        """The ranks that hold all of it."""
        return self.boxes[0].ranks if len(self.boxes) == 1 else ()

    @property
    def elements(self) -> int:
        return self.rows * self.columns


class Transfer(NamedTuple):
    """A box that one rank sends to another."""

    matrix: int
    held: HeldBox
    sender: int
    receiver: int


@dataclass(frozen=True)
class Round:
    """Matrices whose parts travel together: (number of the matrix, its owner) of each."""

    owners: tuple[tuple[int, int], ...]

    def brought(self, matrices: Sequence[Matrix]) -> Iterator[Transfer]:
        """Yield the boxes that owners receive."""
        for number, owner in self.owners:
            for held in matrices[number].boxes:
                if (sender := held.sender(owner)) != owner:
                    yield Transfer(number, held, sender, owner)

    def returned(self, matrices: Sequence[Matrix]) -> Iterator[Transfer]:
        """Yield the boxes that owners send back."""
        for number, owner in self.owners:
            for held in matrices[number].boxes:
                yield from (Transfer(number, held, owner, rank) for rank in held.ranks if rank != owner)


def boxes_of(runs: Sequence[Sequence[LocalRange]]) -> list[Box]:
    """List the boxes that ranges of each dim make, in memory order, without empty ones."""
    ranges = [[(run.low, run.high) for run in runs_of_dim if run.size] for runs_of_dim in runs]
    return list(product(*ranges))


def matrices_of(shape: Sequence[int], boxes: Sequence[Sequence[Box]]) -> list[Matrix]:
    """List the matrices of a parameter: itself, or one for each expert of a stack.

    Args:
        boxes: those that each rank holds.
    """
    *stack, rows, columns = shape
    holders: list[dict[Box, list[int]]] = [{} for _ in range(stack[0] if stack else 1)]
    for rank, held in enumerate(boxes):
        for box in held:
            for number in range(*box[0]) if stack else (0,):
                holders[number].setdefault(box[-2:], []).append(rank)
    return [
        Matrix(rows, columns, tuple(HeldBox(box, tuple(ranks)) for box, ranks in sorted(found.items())))
        for found in holders
    ]


def rounds_of(matrices: Sequence[Matrix], ranks: int) -> tuple[Round, ...]:
    """Give each matrix an owner, and cut the work into rounds, in each of which all owners have as much as possible.

    Matrices that some ranks hold whole go to one of these, before the others; all by their cost, the largest first, to
    the rank with least work. Equal matrices are interchangeable, so what each rank sends does not depend on the order
    in which they are given.
    """
    owned: list[list[int]] = [[] for _ in range(ranks)]
    work = [0] * ranks

    def place(number: int, rank: int) -> None:
        owned[rank].append(number)
        work[rank] += matrices[number].cost

    # matrices by their places, in an order that does not depend on theirs; most share one object for their boxes, since
    # to hash each by its boxes would take long
    distinct = {id(matrix.boxes): matrix.boxes for matrix in matrices}
    numbers = {boxes: number for number, boxes in enumerate(sorted(set(distinct.values())))}
    by_object = {key: numbers[boxes] for key, boxes in distinct.items()}
    places = [by_object[id(matrix.boxes)] for matrix in matrices]
    order = sorted(range(len(matrices)), key=lambda n: (-matrices[n].cost, matrices[n].rows, places[n]))
    some = [n for n in order if 0 < len(matrices[n].whole_on) < ranks]
    for number in some:
        place(number, min(matrices[number].whole_on, key=lambda rank: (work[rank], rank)))
    least = [(work[rank], rank) for rank in range(ranks)]
    heapq.heapify(least)
    bound = set(some)
    for number in (n for n in order if n not in bound):
        _, rank = heapq.heappop(least)
        place(number, rank)
        heapq.heappush(least, (work[rank], rank))
    rounds: list[Round] = []
    found: list[tuple[int, int]] = []
    for turn in range(max(map(len, owned), default=0)):
        following = [(mine[turn], rank) for rank, mine in enumerate(owned) if turn < len(mine)]
        if found and sum(matrices[number].elements for number, _ in (*found, *following)) > ROUND_ELEMENTS:
            rounds.append(Round(tuple(found)))
            found = []
        found += following
    return (*rounds, Round(tuple(found))) if found else tuple(rounds)


def sent_by(matrices: Sequence[Matrix], rounds: Sequence[Round], ranks: int) -> list[int]:
    """Count the elements that each rank sends to others, in all rounds together."""
    sent = [0] * ranks
    for one in rounds:
        for transfer in chain(one.brought(matrices), one.returned(matrices)):
            sent[transfer.sender] += transfer.held.elements
    return sent


def messages_of(matrices: Sequence[Matrix], rounds: Sequence[Round]) -> int:
    """Count the all-to-alls of all rounds; one that would carry nothing is left out."""
    ways = (way for one in rounds for way in (one.brought(matrices), one.returned(matrices)))
    return sum(next(way, None) is not None for way in ways)


# --- list the messages of optimizers that need whole matrices, or sums over them

STAGE = (Axis.DP_REPLICATE, Axis.DP_SHARD, Axis.CP, Axis.TP)
"""Axes whose ranks hold parts or copies of the same matrices."""


def optimizer_collectives(plan: Plan, parameters: Sequence[ParameterFact]) -> Iterator[Collective]:
    """List the messages of the optimizer's step for a rank's parameters.

    They are all-to-alls to owners of matrices and back, with the elements of the rank that sends most; or all-reduces
    over parts of cut matrices, first of squares, then of updates.
    """
    shares, experts = plan.shares, plan.experts
    if plan.optimizer.row.by_role and (ranks := shares.size(*STAGE)) > 1:
        sent, calls = sent_elements(plan, parameters)
        if calls:
            axes = " × ".join(axis.value for axis in STAGE if shares.size(axis) > 1)
            unit, dtype = "parts of matrices", next(p.dtype for p in parameters if p.trainable and p.hidden)
            yield Collective("all_to_all", axes, ranks, unit, max(sent), dtype, "step", calls, to_others=True)
    if not plan.optimizer.row.sums_parts:
        return
    packs: dict[tuple[tuple[str, int], ...], list[int]] = {}
    for p in parameters:
        if not p.trainable or p.name in plan.frozen:
            continue
        if experts is not None and experts.has(p.name):
            axes = [(Axis.EFSDP, experts.shards), (Axis.EP, experts.ranks)]
        else:
            cut = plan.tensor is not None and plan.tensor.cut_of(p.name, p.shape) is not None
            axes = [(Axis.DP_SHARD, shares.shards), (Axis.TP, shares.size(Axis.TP) if cut else 1)]
        cut_by = tuple((axis.value, size) for axis, size in axes if size > 1)
        if any(size == plan.world for _, size in cut_by):  # one group of all ranks, whatever the axis
            cut_by = next((pack for pack in packs if any(size == plan.world for _, size in pack)), cut_by)
        packs.setdefault(cut_by, []).append(size_of_sums(p.shape))
    dtype = "float64" if any(p.dtype == "float64" for p in parameters if p.trainable) else "float32"
    for cut_by, sizes in packs.items():
        for elements, unit in ((sum(sizes), "squares of rows and columns"), (len(sizes), "squares of updates")):
            for axis, ranks in cut_by:
                yield Collective("all_reduce", axis, ranks, unit, elements, dtype, "step")


def size_of_sums(shape: Sequence[int]) -> int:
    """Count the numbers that ranks sum for a parameter: its square, and those of its gradient's rows and columns."""
    return 1 if len(shape) < 2 else 1 + math.prod(shape[:-2]) * (shape[-2] + shape[-1])


def sent_elements(plan: Plan, parameters: Iterable[ParameterFact]) -> tuple[list[int], int]:
    """Count the elements that each rank of a stage sends to others in a step, and the messages of each."""
    ranks = plan.shares.size(*STAGE)
    places = [coordinates(plan, rank) for rank in range(ranks)]  # of the first stage, like those of all
    known: dict[tuple, list[Matrix]] = {}
    matrices: list[Matrix] = []
    for p in parameters:
        if p.trainable and p.hidden and p.name not in plan.frozen:
            cut = plan.tensor.cut_of(p.name, p.shape) if plan.tensor is not None else None
            key = (p.shape, cut, plan.experts is not None and plan.experts.has(p.name))
            if key not in known:
                known[key] = matrices_of(p.shape, [_boxes(plan, p, place) for place in places])
            matrices += known[key]
    rounds = rounds_of(matrices, ranks)
    return sent_by(matrices, rounds, ranks), messages_of(matrices, rounds)


def _boxes(plan: Plan, p: ParameterFact, places: Mapping[Axis, int]) -> list[Box]:
    """List the boxes of a parameter that a rank holds."""
    shares, experts = plan.shares, plan.experts
    runs = [[LocalRange(0, size)] for size in p.shape]
    if experts is not None and experts.has(p.name):
        runs[0] = runs_of_chunk(runs[0], places[Axis.EP], experts.ranks)
        dim = experts.sharded_dim(p.shape)
        runs[dim] = runs_of_chunk(runs[dim], places[Axis.EFSDP], experts.shards)
        return boxes_of(runs)
    if plan.tensor is not None and (cut := plan.tensor.cut_of(p.name, p.shape)) is not None:
        dim, parts = cut
        place = places[Axis.TP], plan.tensor.ranks
        runs[dim] = runs_of_chunk(runs[dim], *place) if is_plain(parts, place[1]) else runs_of_parts(parts, *place)
        dim = 0
    else:
        dim = sharded_dim(p.shape, shares.shards)
    runs[dim] = runs_of_chunk(runs[dim], shares.position(places, shares.shard_axes), shares.shards)
    return boxes_of(runs)
