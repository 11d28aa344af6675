"""Covering arrays: a few combinations in which every two switches meet."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def pairs_of(combination: Mapping[str, Any]) -> frozenset:
    """All ((factor, value), (factor, value)) of one combination."""
    return frozenset(itertools.combinations(combination.items(), 2))


def legal_combinations(factors: Mapping[str, Sequence[Any]], is_legal: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
    everything = (dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values()))
    return [combination for combination in everything if is_legal(combination)]


def covering_array(
    factors: Mapping[str, Sequence[Any]],
    is_legal: Callable[[dict[str, Any]], bool] = lambda combination: True,
    price: Callable[[dict[str, Any]], float] = lambda combination: 1.0,
    covered: Callable[[dict[str, Any]], frozenset] = pairs_of,
) -> list[dict[str, Any]]:
    """Legal combinations that contain every legal pair of values; greedy (most new pairs per price first) and deterministic.

    Most faults need one switch or two to show (Kuhn, Wallace, Gallo 2004), so this finds nearly what the whole product would.
    ``covered``: what of a combination is to be covered, where that is not every pair.
    """
    candidates = [(c, covered(c), price(c)) for c in legal_combinations(factors, is_legal)]
    missing = set().union(*(pairs for _, pairs, _ in candidates))
    chosen = []
    while missing:
        combination, pairs, _ = max(candidates, key=lambda item: len(item[1] & missing) / item[2])
        chosen.append(combination)
        missing -= pairs
    return chosen
