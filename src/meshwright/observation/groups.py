"""Say over which ranks collectives go, and find those that meet ranks which have nothing to add up."""

from __future__ import annotations

from typing import Any

from .passes import Passes
from .traces import rows_given


def listed(ranks: list[int] | tuple[int, ...]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def sent(passes: Passes, place: str, rank: int) -> str:
    """Say which collectives a module's forward calls, or a parameter's gradient goes through; empty: unknown."""
    names = {own: home.name for own, home in passes.places[rank].items()}
    found = {
        f"{event['kind']} over {listed(event['ranks'])}": event["bytes"]
        for event in passes.own[rank]["sent"]
        if event["ranks"] and place in (_home(passes, rank, event), *(names.get(name) for name in event["of"]))
    }
    return ", ".join(f"{words} ({size:,} B)" for words, size in [*found.items()][:2])


def meets_strangers(passes: Passes, module: str) -> str:
    """Find a group in the forward of a module, or around it, whose ranks have different rows, though a rank outside has
    those of one.
    """
    data, prefix = _data(passes), f"{module}." * bool(module)
    for rank, one in enumerate(passes.own):
        for event in one["sent"]:
            home, group = _home(passes, rank, event), event["ranks"]
            if home is None or not (f"{home}.".startswith(prefix) or prefix.startswith(f"{home}." * bool(home))):
                continue
            outside = {*range(len(data))} - {*group}
            if any(data[a] & data[b] for a in outside for b in group) and not all(
                data[a] & data[b] for a in group for b in group
            ):
                return f"{event['kind']} over {listed(group)}, which have different rows"
    return ""


def counted_again(passes: Passes, scale: float) -> str:
    """Find a number that all ranks sum before the gradients, and that those with the same rows have in common.

    Args:
        scale: of all gradients: one by the number of those ranks.
    """
    data = _data(passes)
    alike = [[b for b, rows in enumerate(data) if rows & own] for own in data]
    sizes = {len(others) for others in alike}
    if sizes == {1} or len(sizes) > 1 or abs(scale * max(sizes) - 1) > 1e-2:
        return ""
    for every in zip(*map(_numbers, passes.own), strict=False):
        values = [event["value"] for event in every]
        is_sum = all(event["kind"] == "all_reduce" and len(event["ranks"]) == len(data) for event in every)
        if is_sum and len({*values}) > 1 and all(values[a] == values[b] for a, bs in enumerate(alike) for b in bs):
            return f"a number is summed over all ranks, of which groups of {max(sizes)} have the same rows"
    return ""


def sums_copies(passes: Passes, name: str) -> str:
    """Find a sum in the optimizer's step over ranks that hold the same part of a parameter, which is cut."""
    keys = [{p.key for p in placed.values() if p.name == name} for placed in passes.places]
    for event in (event for one in passes.own for event in one["sent"]):
        held = [keys[rank] for rank in event["ranks"]]
        is_sum = event["phase"] == "step" and event["kind"] == "all_reduce" and 1 < len(held) < len(keys)
        if is_sum and all(key == held[0] for key in held) and any(key != held[0] for key in keys):
            return f"{event['kind']} over {listed(event['ranks'])}, which hold the same part of it"
    return ""


def _home(passes: Passes, rank: int, event: dict[str, Any]) -> str | None:
    return passes.names[rank].get(event["module"], event["module"]) if event["phase"] == "forward" else None


def _data(passes: Passes) -> list[set[str]]:
    """Return each rank's rows; parts of a row as the row."""
    return [
        {passes.lengths[rank].get(row, (row, None))[0] for row in rows_given(one)}
        for rank, one in enumerate(passes.own)
    ]


def _numbers(step: dict[str, Any]) -> list[dict[str, Any]]:
    """List the collectives of one number before the first that sends gradients."""
    first = next((n for n, e in enumerate(step["sent"]) if e["of"] or e["phase"] == "backward"), 0)
    return [event for event in step["sent"][:first] if event["value"] is not None]
