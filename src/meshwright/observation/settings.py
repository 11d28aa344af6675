"""Compare what optimizers and generators are set to with one process's: rates, and states at draws."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from .passes import Passes

RATES = ("lr", "weight_decay", "betas", "momentum", "eps")


def other_rates(passes: Passes, ranks: Sequence[int]) -> tuple[list[str], bool]:
    """Return what differs of the parameters' rates, and whether those of some are as they should be."""
    found, alike = set[str](), False
    for rank in ranks:
        for name, rates in passes.own[rank]["rates"].items():
            place = passes.places[rank].get(name)
            whole = passes.whole["rates"].get(place.name) if place else None
            if whole is not None:
                found |= (other := {key for key in RATES if rates.get(key) != whole.get(key)})
                alike |= not other
    return sorted(found), alike


def changes_alone(passes: Passes, last: Passes, ranks: Sequence[int]) -> bool:
    """Return whether ranks have other rates than in the last step, and neither the rest nor one process has."""
    changed = {rank for rank, own in enumerate(last.own) if own["rates"] != passes.own[rank]["rates"]}
    return changed == set(ranks) != set(range(len(passes.own))) and last.whole["rates"] == passes.whole["rates"]


def has_no_decay(passes: Passes, ranks: Sequence[int]) -> bool:
    """Return whether ranks decay no weights, and one process does."""
    whole = max((rates.get("weight_decay", 0.0) for rates in passes.whole["rates"].values()), default=0.0)
    own = [rates.get("weight_decay", 0.0) for rank in ranks for rates in passes.own[rank]["rates"].values()]
    return whole > 0 and not any(own)


def wrong_draws(
    passes: Passes, earlier: list[tuple[dict[str, Any], list[dict[str, Any]]]]
) -> tuple[str, tuple[int, ...], str] | None:
    """Compare the states of generators at draws: (module, ranks, what is wrong).

    Args:
        earlier: the steps before, of one process and of the ranks.
    """

    def states(step: dict[str, Any], again: bool) -> list[str]:
        return [draw["state"] for draw in step["draws"] if draw["again"] == again]

    def lost(step: dict[str, Any]) -> bool:
        return bool(set(states(step, True)) - set(states(step, False)))

    place = next((draw["module"] for one in passes.own for draw in one["draws"] if draw["module"]), "")
    wrong = tuple(rank for rank, one in enumerate(passes.own) if lost(one))
    if wrong and not lost(passes.whole):
        return place, wrong, "recomputation draws other numbers than the forward did"
    before = {state for whole, _ in earlier for state in states(whole, False)}
    if not before & set(states(passes.whole, False)):
        wrong = tuple(
            rank
            for rank, one in enumerate(passes.own)
            if {state for _, own in earlier for state in states(own[rank], False)} & set(states(one, False))
        )
        if wrong:
            return place, wrong, "numbers of an earlier step are drawn again"
    sizes = {draw["module"]: draw.get("n") for draw in passes.whole["draws"]}
    groups: dict[Any, dict[int, tuple[Any, Any]]] = defaultdict(dict)
    for rank, one in enumerate(passes.own):
        rows = tuple(row for call in one["calls"] for value in call["inputs"].values() for row in value["rows"])
        for number, draw in enumerate(draw for draw in one["draws"] if not draw["again"]):
            name = passes.names[rank].get(draw["module"], draw["module"])
            if sizes.get(name) == draw.get("n"):  # of a whole output, not of a share
                groups[rows, number, name][rank] = name, draw["state"]
    usual = {draw["state"] for draw in passes.whole["draws"]}
    for same in groups.values():
        name, first = next(iter(same.values()))
        found = [state for _, state in same.values()]
        right = found if usual.issuperset(found) else usual & {*found} or {first}
        if wrong := tuple(rank for rank, (_, state) in same.items() if state not in right):
            return name, wrong, "ranks with the same rows draw different numbers"
        again = tuple(rank for number, (rank, (_, state)) in enumerate(same.items()) if state in found[:number])
        n = [draw["state"] for draw in passes.whole["draws"] if draw["module"] == name]
        if again and len(n) == len({*n}) == len(found) * sum(at == name for *_, at in groups):
            return name, again, "it draws what a rank before it draws, and one process draws something else"
    return None
