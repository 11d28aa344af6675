"""Covers: a few candidates that together have what all of them have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Set
from typing import Any, TypeVar

T = TypeVar("T")


def cheapest_cover(
    candidates: Iterable[T],
    price: Callable[[T], float],
    things: Callable[[T], Collection[Any]],
    there: Set[Any] = frozenset(),
) -> list[T]:
    """Candidates that have every thing that some candidate has, besides those that are ``there`` already.

    Greedy: the cheapest for what it adds first (Chvátal 1979). Then those go, the dearest first, whose things others
        have too.
    """
    offered = {
        number: (candidate, set(things(candidate)) - there, price(candidate))
        for number, candidate in enumerate(candidates)
    }
    missing = set().union(*(adds for _, adds, _ in offered.values()))
    chosen: list[int] = []
    while missing:
        useful = [(paid / len(gain), number) for number, (_, adds, paid) in offered.items() if (gain := adds & missing)]
        chosen.append(min(useful)[1])
        missing -= offered[chosen[-1]][1]
    counted = Counter(thing for number in chosen for thing in offered[number][1])
    for number in sorted(chosen, key=lambda number: -offered[number][2]):
        if all(counted[thing] > 1 for thing in offered[number][1]):
            counted.subtract(offered[number][1])
            chosen.remove(number)
    return [offered[number][0] for number in chosen]
