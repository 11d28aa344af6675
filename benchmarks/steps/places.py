"""Translate the ranks of a message to another rank with the same work."""

from __future__ import annotations

import math
from collections.abc import Callable

from meshwright.core.axes import WORLD_AXES
from meshwright.planning.experts import EXPERT_AXES
from meshwright.planning.plan import Plan
from meshwright.planning.rank_kinds import coordinates


def places_like(plan: Plan, here: int, there: int) -> Callable[[tuple[int, ...]], tuple[int, ...]]:
    """Return a function from the ranks of a message of rank ``here`` to those of the same message of ``there``.

    Both have the same work. Ranks of a group keep their places on the axes along which the group lies; on the others
    they have those of ``there``. The function returns () for a group that fills no axes.
    """
    every = {rank: coordinates(plan, rank) for rank in range(plan.world)}
    of_axes = [WORLD_AXES] if plan.experts is None else [WORLD_AXES, EXPERT_AXES]
    sizes = dict(plan.mesh) | dict(plan.experts.mesh if plan.experts is not None else ())

    def place_of(ranks: tuple[int, ...]) -> tuple[int, ...]:
        if len(ranks) == 1:
            return (there,) if ranks == (here,) else ()
        for axes in of_axes:
            varied = [axis for axis in axes if len({every[rank][axis] for rank in ranks}) > 1]
            fills = math.prod(sizes.get(axis.value, 1) for axis in varied) == len(ranks)
            are_neighbours = len(ranks) == 2 and len(varied) == 1 and every[here][varied[0]] == every[there][varied[0]]
            if not fills and not are_neighbours:
                continue
            by_place = {tuple(every[rank][axis] for axis in axes): rank for rank in every}
            found = tuple(
                by_place[tuple(every[rank if axis in varied else there][axis] for axis in axes)] for rank in ranks
            )
            if there in found:
                return found
        return ()

    return place_of
