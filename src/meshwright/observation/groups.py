"""Say over which ranks collectives go, and find those that meet ranks which have nothing to add up."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .findings import Off
from .passes import Passes, factor
from .traces import own_part, relative, rows_given, vector


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


def adds_up_around(passes: Passes, module: str) -> bool:
    """Return whether parts are added up over ranks in the forward of a module or of one around it, but the model."""
    homes = {_home(passes, 0, event) for event in passes.own[0]["sent"] if event["kind"] == "all_reduce"}
    return any(home and f"{module}.".startswith(f"{home}.") for home in homes)


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
    numbers = []
    for one in passes.own:
        first = next((n for n, e in enumerate(one["sent"]) if e["of"] or e["phase"] == "backward"), 0)
        numbers.append([event for event in one["sent"][:first] if len(event["values"]) == 1])
    for every in zip(*numbers, strict=False):
        (values,) = zip(*(event["values"] for event in every), strict=True)
        is_sum = all(event["kind"] == "all_reduce" and len(event["ranks"]) == len(data) for event in every)
        if is_sum and len({*values}) > 1 and all(values[a] == values[b] for a, bs in enumerate(alike) for b in bs):
            return f"a number is summed over all ranks, of which groups of {max(sizes)} have the same rows"
    return ""


def sums_a_copy(passes: Passes, phase: str) -> str:
    """Find numbers that the ranks of a group have in common and sum, though a rank outside has others.

    Args:
        phase: "forward", or "" for what is between passes.
    """
    sent = [[e for e in one["sent"] if e["phase"] == phase and e["values"] and not e["of"]] for one in passes.own]
    for every in zip(*sent, strict=False):
        for event in every if all(e["kind"] == "all_reduce" for e in every) else ():
            inside, outside = (
                [every[r]["values"] for r in range(len(every)) if (r in event["ranks"]) == i] for i in (1, 0)
            )
            if len(inside) > 1 and all(v == inside[0] for v in inside) and any(v != inside[0] for v in outside):
                return f"{listed(event['ranks'])} sum numbers that are the same on them, and other ranks have others"
    return ""


def sums_strangers(passes: Passes, names: set[str]) -> str:
    """Find a sum of gradients over ranks that hold other parts of a parameter."""
    keys = [{place.name: place.key for place in placed.values()} for placed in passes.places]
    for rank, one in enumerate(passes.own):
        homes = {own: place.name for own, place in passes.places[rank].items()}
        for event in (event for event in one["sent"] if event["kind"] == "all_reduce" and event["phase"] != "forward"):
            for name in {homes.get(own) for own in event["of"]} & names:
                if len({keys[other].get(name) for other in event["ranks"]}) > 1:
                    return f"all_reduce over {listed(event['ranks'])}, which hold other parts of it, or none"
    return ""


def sums_twice(passes: Passes, names: set[str]) -> bool:
    """Return whether a rank sums the gradient of each of these parameters more than once in a step."""
    for rank, one in enumerate(passes.own):
        homes = {own: place.name for own, place in passes.places[rank].items()}
        sums = [event["of"] for event in one["sent"] if event["kind"] == "all_reduce" and event["phase"] != "forward"]
        if all(sum(name in {homes.get(own) for own in of} for of in sums) > 1 for name in names):
            return True
    return False


def steps_in_groups(passes: Passes, names: set[str]) -> bool:
    """Return whether parameters that all ranks hold are alike after the step on some of them, in several groups."""
    for name in names:
        every = [
            one["after"].get(own)
            for one, placed in zip(passes.own, passes.places, strict=True)
            for own, place in placed.items()
            if place.name == name and place.dim is None
        ]
        values = [tuple(vector(entry).tolist()) for entry in every if entry]
        if not 1 < len({*values}) < len(values) == len(passes.own):
            return False
    return True


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


def unreduced(passes: Passes, off: Sequence[Off], bound: float) -> tuple[str, str] | None:
    """Recognise gradients that are some ranks' parts of a sum, or mixtures of what belongs to several places."""
    own: dict[Any, dict[tuple[int, str], Tensor]] = defaultdict(dict)
    for rank in range(len(passes.own)):
        for name, entry in passes.own[rank]["gradients"].items():
            place = passes.places[rank].get(name)
            if place is not None and entry is not None and place.offset is None:
                own[place.name, place.key][rank, name] = own_part(entry, place)
    wholes = {(o.name, o.place.key): o.whole for o in off if o.place is not None and o.whole is not None}
    rows = [frozenset(counts) for counts in passes.counts()[1]]
    words = set()
    for key, whole in wholes.items():
        parts = own[key]
        distinct: list[Tensor] = []
        for t in parts.values():
            if all(relative(t, other) > max(1e-4, bound / 10) for other in distinct):
                distinct.append(t)
        if len(distinct) < 2:
            others = [ts.values() for other, ts in own.items() if other[0] == key[0] and other != key]
            mixed = any(relative(t, other) < bound for t in distinct for ts in others for other in ts)
            words.add("mixed" if mixed else "")
            continue
        total = factor(torch.stack(distinct).sum(0), whole, bound)
        holders = {rank for rank, _ in parts}
        alone = [passes.held[a] & passes.held[b] for a in holders for b in holders if a < b]
        # a first stage, and another, which is given no rows
        stages = {bool(rows[rank]) for rank in holders} == {True, False} and any(
            passes.held[a] != passes.held[b] for a in holders for b in holders
        )
        tied = len({name for _, name in parts}) > 1 or any(len(shared) == 1 for shared in alone) or stages
        in_groups = 1 < len(distinct) < max(len(parts), len({*rows}))
        words.add("" if total is None else "tie" if tied else "group" if in_groups else "sum")
    if words == {"tie"}:
        return "tie broken", "two parameters are one in one process, and each has its own part of the gradient"
    if words == {"sum"} and steps_in_groups(passes, {name for name, _ in wholes}):
        return "wrong group", "groups of ranks take steps of their own"
    if words == {"sum"}:
        return "missing reduction", "each rank has its own part of the sum"
    if words == {"mixed"}:
        return "wrong group", "ranks with different shards have the same gradient"
    if words and words <= {"sum", "group"}:
        return "wrong group", "groups of ranks have their own parts of the sum"
    return None
