"""Compare the rates of optimizers with one process's: learning rates, decays, momenta."""

from __future__ import annotations

from collections.abc import Sequence

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
