"""Read traces, and place what each rank had in what one process had."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain
from math import hypot
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.core.errors import ConfigError

from .sketches import FORMAT, INPUT, REST, new_step, unpacked

CLOSE = 1e-4
"""Largest relative error of a marginal's value that is found in another marginal, before the first step."""
NOTHING: dict[str, Any] = {**new_step(), "left": {}}
"""The step of a rank that took none."""


@dataclass
class Run:
    """All ranks' traces of one run; ``turns``: each has a model of its own, and one process trains these by turns."""

    folder: Path
    ranks: list[dict[str, Any]]
    turns: bool = False

    @classmethod
    def read(cls, folder: str | Path) -> Run:
        """Read the traces in a folder.

        Raises:
            ConfigError: there is none, or one of another format, or ranks are missing.
        """
        files = sorted(Path(folder).glob("rank-*.pt"))
        if not files:
            raise ConfigError(
                f"{folder} holds no trace: no process of that run changed a module's parameters by gradients. Write"
                f" one with: meshwright observe {folder} -- python train.py"
            )
        read = {file.name: torch.load(file, map_location="cpu", weights_only=True) for file in files}
        every = {name: unpacked(part) if "json" in part else part for name, part in read.items()}
        if any(part["format"] != FORMAT for part in every.values()):
            raise ConfigError(f"{folder} holds traces of another version of meshwright; observe the run anew")
        for name in [name for name in every if REST in name]:
            if (part := every.get(first := name.replace(REST, ""))) is None:
                raise ConfigError(f"{folder} holds {name} and lacks {first}: copy the whole folder, or observe anew")
            rest = every.pop(name)
            part |= rest | {"step": part["step"] | rest["step"]}
        parts = list(every.values())
        for step in (part["step"] for part in parts if "left" in part["step"]):
            step["left"] = {name: entry or step["after"][name] for name, entry in step["left"].items()}
        ranks: dict[int, list[dict[str, Any]]] = defaultdict(list)
        for entry in sorted(parts, key=lambda part: part["time"]):
            ranks[entry["rank"]].append(entry)
        for rank, entries in ranks.items():
            pairs = list(zip(entries, entries[1:], strict=False))
            if any(old["process"] != new["process"] and new["began"] < old["time"] for old, new in pairs):
                raise ConfigError(
                    f"{folder}: two processes call themselves rank {rank} at the same time: the script forks and both"
                    f" train. Observe one of them"
                )
        world = max(entry["world"] for entry in parts)
        if max(ranks) != len(ranks) - 1:  # the last ones may do other work
            raise ConfigError(f"{folder} holds traces of {len(ranks)} of {world} ranks; the others never stepped")
        found = [
            {"rank": rank, "world": world, "steps": without_undone([entry["step"] for entry in entries])}
            | {key: entries[-1].get(key) for key in ("others", "cut", "command")}
            for rank, entries in sorted(ranks.items())
        ]
        return cls(Path(folder), found)

    def aligned(self, one: dict[str, Any]) -> Run:
        """Return the run with empty steps where a rank took none, as its rows say: it joined later, or was away.

        A rank that was away takes part again once its parameters are those of one process or of another rank.

        Args:
            one: the trace of one process.
        """
        rows = [rows_given(step) for step in one["steps"]]
        order = {
            name: n for step in reversed(one["steps"]) for c in step["calls"] for n, name in enumerate(c["inputs"])
        }
        given = []
        for trace in self.ranks:
            for call in (call for step in trace["steps"] for call in step["calls"]):  # a batch may be a dict
                call["inputs"] = dict(sorted(call["inputs"].items(), key=lambda item: order.get(item[0], len(order))))
            # passes before the last one may be those of steps that were not taken
            given.append([rows_given({"calls": step["calls"][-1:]}) for step in trace["steps"]])
        times = [matched(own, rows) for own in given]
        turns = [first_met(own, rows) for own in given]
        by_turns = len(turns) > 1 and all(turns) and sum(map(len, turns)) == len({*chain(*turns)})
        if by_turns:  # one process was perhaps not observed for all of their steps
            times = [
                [*t, *range(len(rows), len(rows) + len(own) - len(t))] for own, t in zip(given, turns, strict=True)
            ]
        every = []
        for trace, each in zip(self.ranks, times, strict=True):
            every.append([NOTHING] * (each[-1] + 1 if each else 0))
            for step, time in zip(trace["steps"], each, strict=True):
                every[-1][time] = step
        for steps in every:
            away = steps_away(steps)
            others = [one["steps"], *(other for other in every if other is not steps)]
            for time in range(away[-1] + 1 if away else len(steps), len(steps)):
                if any(begins_alike(steps[time], other[time]) for other in others if time < len(other)):
                    steps[away[-1] + 1 : time] = [NOTHING] * (time - away[-1] - 1)
                    break
        ranks = [{**trace, "steps": steps} for trace, steps in zip(self.ranks, every, strict=True)]
        return Run(self.folder, ranks, by_turns)

    @property
    def n_steps(self) -> int:
        return max(len(trace["steps"]) for trace in self.ranks)

    def step(self, rank: int, step: int) -> dict[str, Any]:
        """Return a rank's step; an empty one if the rank took fewer."""
        steps = self.ranks[rank]["steps"]
        return steps[step] if step < len(steps) else NOTHING

    def at(self, step: int) -> list[dict[str, Any]]:
        """Return all ranks' step."""
        return [self.step(rank, step) for rank in range(len(self.ranks))]


def matched(own: list[set[str]], rows: list[set[str]]) -> list[int]:
    """Return, for each step of a rank, the step of one process with which it shares rows, in increasing order.

    The rows in common are the most that such an order can have (Needleman and Wunsch 1970, with gaps on one side); of
    equal orders it is the earliest.
    """
    best: list[tuple[int, list[int], list[int]]] = [(0, [], [])] * (max(len(own), len(rows)) + 1)
    for number, mine in enumerate(own):
        longer, last = [], (-1, [0], [0])
        for step in range(len(best) - 1):
            if number <= step:
                score, early, found = best[step]
                shared = len(mine & rows[step]) if step < len(rows) else 0
                last = max(last, (score + shared, [*early, -step], [*found, step]))
            longer.append(last)
        best = [(-1, [], []), *longer]
    return best[-1][2]


def first_met(own: list[set[str]], rows: list[set[str]]) -> list[int]:
    """Return, for each step of a rank up to one without such, the next step of one process that has rows of it."""
    found: list[int] = []
    for mine in own:
        if (met := next((n for n in range(found[-1] + 1 if found else 0, len(rows)) if mine & rows[n]), None)) is None:
            break
        found.append(met)
    return found


def steps_away(steps: list[dict[str, Any]]) -> list[int]:
    """List the steps that a rank did not take between steps that it took."""
    taken = [number for number, step in enumerate(steps) if step is not NOTHING]
    return sorted(set(range(taken[0], taken[-1])).difference(taken)) if taken else []


def left_to_next_turn(one: dict[str, Any], many: Run) -> dict[str, Any]:
    """Return the trace of one process that trains the ranks' models by turns with what each has at its next turn.

    What changes a model between its turns, such as an average of all, happens in another's steps there, and between two
    steps of a rank's own.
    """
    turns = [[n for n, step in enumerate(trace["steps"]) if step is not NOTHING] for trace in many.ranks]
    steps = [dict(step) for step in one["steps"]]
    for now, then in (pair for each in turns for pair in zip(each, [*each[1:], len(steps)], strict=True)):
        if now < len(steps):
            steps[now].pop("left", None)
        if then < len(steps):
            steps[now]["left"] = steps[then]["before"]
    return {**one, "steps": steps}


def begins_alike(step: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether the parameters of the same name and shape, if there are any, begin two steps alike."""
    pairs = [(entry, other["before"].get(name)) for name, entry in step["before"].items()]
    errors = [
        relative(vector(entry), vector(theirs))
        for entry, theirs in pairs
        if theirs is not None and theirs["shape"] == entry["shape"]
    ]
    return bool(errors) and max(errors) <= 1e-3


def without_undone(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Leave out steps after which a rank went back to what it had before them, and to their rows."""
    kept: list[dict[str, Any]] = []
    for step in steps:
        for number, old in enumerate(kept):
            is_again = rows_given(old) == rows_given(step) != set() and is_same(old["before"], step["before"])
            if is_again and not is_same(old["before"], old["after"]):
                kept = kept[:number]
                break
        kept.append(step)
    return kept


def is_same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether parameters have the same numbers."""
    return one.keys() == other.keys() and all(torch.equal(vector(one[n]), vector(other[n])) for n in one)


def rows_given(step: dict[str, Any]) -> set[str]:
    return {row for call in step["calls"] for given in call["inputs"].values() for row in given["rows"]}


def first_step(trace: dict[str, Any]) -> int:
    """Return the first step that a rank took part in."""
    return next((number for number, step in enumerate(trace["steps"]) if step["before"]), 0)


@dataclass(frozen=True)
class Place:
    """Where a rank's tensor lies in one process's: the whole tensor, the elements ``index`` along ``dim``, or a block.

    Attributes:
        name: the parameter of one process.
        dim, index: the dim that is cut, and the elements there; None for the whole.
        offset: where a part begins that is no run along one dim: a block's offset, or a flat shard's start and length.
    """

    name: str
    dim: int | None = None
    index: Tensor | None = field(default=None, compare=False)
    offset: tuple[int, ...] | None = None

    @property
    def key(self) -> tuple[Any, ...]:
        return self.dim, None if self.index is None else tuple(self.index.tolist()), self.offset


def relative(found: Tensor, reference: Tensor, least: float = 0.0) -> float:
    """Return ‖found − reference‖ / ‖reference‖; infinite for other shapes or numbers that are not finite."""
    if found.shape != reference.shape:
        return float("inf")
    below = max(float(reference.double().norm()), least, 1e-300)
    error = float((found.double() - reference.double()).norm()) / below
    return error if error == error else float("inf")


def usual(sizes: Iterable[float]) -> float:
    """Return the upper quartile of the finite ones; 0 where there is none."""
    finite = sorted(size for size in sizes if math.isfinite(size)) or [0.0]
    return finite[3 * (len(finite) - 1) // 4]


def is_along(off: Tensor, *directions: Tensor) -> bool:
    """Return whether a difference is a multiple of one of the directions, and so no rounding."""
    if len(off) < 8:
        return False
    size = float(off.norm())
    return any(abs(float(off @ d)) > 0.95 * size * float(d.norm()) for d in directions if float(d.norm()))


def of_rounding(steps: list[dict[str, Any]]) -> set[str]:
    """Name the parameters whose gradients are no more than rounding in all steps: Adam makes whole updates of them."""
    small = []
    for step in steps:
        norms = {name: entry["norm"] for name, entry in step["gradients"].items() if entry}
        small.append({name for name, norm in norms.items() if 0 < norm <= 1e-6 * hypot(*norms.values())})
    return set.intersection(*small)


def vector(entry: dict[str, Any]) -> Tensor:
    return torch.cat(entry["m"])


def cut_of(own: dict[str, Any], whole: dict[str, Any]) -> tuple[int, Tensor] | None:
    """Find the dim along which a shard is cut, and its elements there, by the values of marginals."""
    if len(own["shape"]) != len(whole["shape"]):
        return None
    dims = [d for d, (a, b) in enumerate(zip(own["shape"], whole["shape"], strict=True)) if a != b]
    if len(dims) != 1 or own["shape"][dims[0]] > whole["shape"][dims[0]]:
        return None
    dim = dims[0]
    mine, all_ = own["m"][dim].double(), whole["m"][dim].double()
    scale = float(all_.abs().max())
    if scale == 0 or float(all_.std()) < 1e-6 * scale:
        return None
    for start in (i for i in range(len(all_) - len(mine) + 1) if abs(float(all_[i] - mine[0])) <= CLOSE * scale):
        if float((all_[start : start + len(mine)] - mine).abs().max()) <= CLOSE * scale:
            return dim, torch.arange(start, start + len(mine))
    for start in range(max(1, len(all_) - len(mine) + 1), len(all_) - 1):  # the last shard, filled up
        if float((all_[start:] - mine[: len(all_) - start]).abs().max()) <= CLOSE * scale:
            return dim, torch.arange(start, len(all_))
    index = (mine[:, None] - all_[None]).abs().argmin(1)
    if float((all_[index] - mine).abs().max()) <= CLOSE * scale and len(index.unique()) == len(index):
        return dim, index
    return None


def places_of(one: dict[str, Any], own: dict[str, Any]) -> dict[str, Place]:
    """Place each parameter of a rank among those of one process, by name and by the values before the first step.

    A parameter that no value tells apart (norms of ones, biases of zeros) follows its module's other parameters.
    """
    first = min(first_step(own), len(one["steps"]) - 1)
    found: dict[str, Place] = {}
    known: set[str] = set()
    for step, mine in zip(one["steps"][first:], own["steps"][first:], strict=False):
        new = {name: entry for name, entry in mine["before"].items() if name not in known}
        known |= new.keys()
        found |= places_in(new, step["before"]) if new else {}  # later than at first where a model is built anew
    return found


def places_in(mine: dict[str, Any], whole: dict[str, Any]) -> dict[str, Place]:
    """Place parameters by name and by their values at one time."""
    found: dict[str, Place] = {}
    open_: list[str] = []
    for name, entry in mine.items():
        if (place := _place(name, entry, whole)) is not None:
            found[name] = place
        else:
            open_.append(name)
    prefixes = {
        name.rpartition(".")[0]: place.name.rpartition(".")[0]
        for name, place in found.items()
        if name.rpartition(".")[2] == place.name.rpartition(".")[2]
    }
    blocks: dict[str, str] = {}
    for theirs, ours in prefixes.items():  # what a stage calls its blocks
        a, b = theirs.split("."), ours.split(".")
        while a and b and a[-1] == b[-1]:
            a, b = a[:-1], b[:-1]
        blocks[".".join(a)] = ".".join(b)
    for name in open_:
        entry, (module, _, leaf) = mine[name], name.rpartition(".")
        guess = f"{prefixes[module]}.{leaf}" if module in prefixes else ""
        if guess not in whole:
            parts = name.split(".")
            for n in range(len(parts), -1, -1):
                head = ".".join(parts[:n])
                if head in blocks:
                    guess = ".".join(filter(None, (blocks[head], *parts[n:])))
                    break
        if guess not in whole:
            guess = name
        if guess not in whole:
            continue
        if entry["shape"] == whole[guess]["shape"]:
            found[name] = Place(guess)
            continue
        own, all_ = entry["shape"], whole[guess]["shape"]
        cut = [dim for dim, (a, b) in enumerate(zip(own, all_, strict=False)) if a != b]
        if len(own) != len(all_) or len(cut) != 1:
            continue
        for other, place in list(found.items()):
            if other.rpartition(".")[0] != module or place.index is None or len(place.index) != own[cut[0]]:
                continue
            if whole[place.name]["shape"][place.dim] == all_[cut[0]]:
                found[name] = Place(guess, cut[0], place.index)
                break
    return found


def _place(name: str, entry: dict[str, Any], whole: dict[str, Any]) -> Place | None:
    if "part" in entry:  # of a flat shard, the rows that lie in it whole are compared
        if name not in whole:
            return None
        (start, count), width = entry["part"], max(1, torch.Size(entry["shape"][1:]).numel())
        rows = torch.arange(-(-start // width), max(-(-start // width), (start + count) // width))
        return Place(name, 0, rows, (start, count))
    if entry["whole"] and entry["offset"] is not None and name in whole and entry["whole"] == whole[name]["shape"]:
        dims = [d for d, (a, b) in enumerate(zip(entry["shape"], entry["whole"], strict=True)) if a != b]
        if not dims:
            return Place(name)
        if len(dims) == 1:
            start = entry["offset"][dims[0]]
            return Place(name, dims[0], torch.arange(start, start + entry["shape"][dims[0]]))
        return Place(name, offset=tuple(entry["offset"]))
    if not len(m := entry["m"][0]):
        return None
    constant = float(m.std(correction=0)) < 1e-6 * (float(m.abs().max()) + 1e-300)
    order = [name, *(other for other in whole if other != name)] if name in whole else list(whole)
    for other in order:
        if entry["shape"] == whole[other]["shape"]:
            if relative(vector(entry), vector(whole[other])) <= CLOSE and (other == name or not constant):
                return Place(other)
        elif (cut := cut_of(entry, whole[other])) is not None:
            return Place(other, *cut)
    return None


def part(whole: dict[str, Any], place: Place) -> Tensor:
    """Return the numbers of one process that a rank's tensor at ``place`` must equal."""
    if place.dim is None:
        return vector(whole)
    return whole["m"][place.dim][place.index]


def own_part(entry: dict[str, Any], place: Place) -> Tensor:
    if place.dim is None:
        return vector(entry)
    assert place.index is not None
    is_whole = "part" in entry or entry["shape"] == entry["whole"]  # such as a gradient that was gathered
    return entry["m"][place.dim][place.index if is_whole else slice(len(place.index))]


# --- rows


@dataclass(frozen=True)
class Row:
    """One row of an output: its numbers by token and by feature, and by token the gradient that came back."""

    key: str
    rank: int
    tokens: Tensor
    features: Tensor
    order: int
    dtype: str
    back_tokens: Tensor | None = None
    at: Tensor | None = None
    """The places of its tokens in the whole row; None for the whole."""
    is_flat: bool = False
    """Whether rows and tokens are one dim of the output."""


Keys = dict[int, list[str] | None]


def holds_ids(given: dict[str, Any]) -> bool:
    return given["ids"] is not None and "int" in given["dtype"]


def given_rows(call: dict[str, Any]) -> dict[str, Any] | None:
    """Return the input that tells a call's rows apart: token ids, else what has most dims."""
    inputs = [given for given in call["inputs"].values() if given["rows"]]
    ids = [given for given in inputs if holds_ids(given)]
    return ids[0] if ids else max(inputs, key=lambda given: len(given["shape"]), default=None)


def row_keys(steps: list[dict[str, Any]]) -> list[Keys]:
    """Name the rows of each outermost call of each rank by the hash of the row that the first module was given.

    What a call returns, and another is given, keeps its name, on other ranks too (the stages of a pipeline). A call
    whose rows are nobody's follows the last one of its rank.
    """
    names: dict[str, str] = {}
    made = {row for step in steps for call in step["calls"] for row in call["gives"]}
    data = [{row for _, given in origins(step) for row in given["rows"]} for step in steps]
    for _ in range(len(steps) + 1):
        before = len(names)
        for step in steps:
            for call in step["calls"]:
                given = given_rows(call)
                if given is None or len(call["gives"]) != len(given["rows"]):
                    continue
                for row, result in zip(given["rows"], call["gives"], strict=True):
                    if row in names or row not in made:
                        names.setdefault(result, names.get(row) or row)
        if len(names) == before:
            break
    found = []
    for step, own in zip(steps, data, strict=True):
        keys: Keys = {}
        last = None
        for number, call in enumerate(step["calls"], 1):
            given = given_rows(call)
            if given is not None and any(row in own or row in names for row in given["rows"]):
                last = [names.get(row) or row for row in given["rows"]]
            keys[number] = last
        found.append(keys)
    return found


def origins(step: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """List the modules and inputs that come from the data: token ids, else what the step's first module was given.

    A call to which no gradient came back, such as one for shapes, does not count where others do.
    """
    returned = {event["call"] for event in step["forward"] if event["back"] is not None}
    calls = [
        call for number, call in enumerate(step["calls"], 1) if call["known"] and (number in returned or not returned)
    ]
    given = [(call["module"], given_rows(call)) for call in calls]
    found = [(module, rows) for module, rows in given if rows is not None]
    with_ids = [(module, rows) for module, rows in found if holds_ids(rows)]
    return with_ids or [(module, rows) for module, rows in found if module == found[0][0]]


def rows_of(
    step: dict[str, Any], rank: int, names: dict[str, str], lengths: dict[str, tuple[str, Tensor]], keys: Keys
) -> dict[tuple[str, int], list[Row]]:
    """List the rows of every output, by module and number of the call within the outermost call.

    Args:
        names: what one process calls the rank's modules.
        lengths: hash of a rank's row -> one process's row that contains it, and the places of its tokens there.
        keys: the rows of each outermost call.
    """
    found = defaultdict(list)
    counted: dict[tuple[str, int], int] = defaultdict(int)
    sizes: dict[tuple[str, int], list[int]] = defaultdict(list)
    for event in step["forward"]:
        sizes[event["module"], event["call"]].append(len(event["out"]["t"]))
    begun: dict[tuple[str, int], int] = defaultdict(int)
    shapes = [(given_rows(call) or {"shape": []})["shape"] for call in step["calls"]]
    for order, event in enumerate(step["forward"]):
        if not event["known"]:
            continue
        module, is_input, _ = event["module"].partition(INPUT)
        name = names.get(module, module) + is_input
        counted[name, event["call"]] += 1
        tokens, features = event["out"]["t"], event["out"]["f"]
        back: dict[str, Tensor] | None = event["back"]
        rows = keys.get(event["call"])
        every = sizes[event["module"], event["call"]]
        if rows and len(every) > 1 and sum(every) == len(rows):  # some rows at a time
            first = begun[event["module"], event["call"]]
            begun[event["module"], event["call"]] += len(tokens)
            rows = rows[first : first + len(tokens)]
            counted[name, event["call"]] = 1
        places = next((lengths[key][1] for key in rows or () if key in lengths), None)
        if len(event["out"]["shape"]) == 2 and (
            places is None or len(places) == tokens.numel()
        ):  # a table of positions
            spot = found[name, counted[name, event["call"]]]
            spot.append(Row("table", rank, tokens.flatten(), features[0], order, event["out"]["dtype"], at=places))
        if rows is None or len(rows) == 0 or len(tokens) % len(rows):
            continue
        is_flat = len(tokens) != len(rows)
        if is_flat and event["call"] <= len(shapes) and [len(tokens)] == shapes[event["call"] - 1][1:2]:
            continue  # a number for each token of any row
        if is_flat:  # (rows · tokens, features)
            tokens, features = tokens.reshape(len(rows), -1), features.reshape(len(rows), -1)
            if back is not None and back["t"].numel() == tokens.numel() and len(back["t"]) % len(rows) == 0:
                back = {"t": back["t"].reshape(len(rows), -1)}
            else:
                back = None
        for number, key in enumerate(rows):
            known = lengths.get(key)
            returned = back if back is not None and len(back["t"]) == len(rows) else None
            given = tokens[number], features[number], order, event["out"]["dtype"]
            given = *given, returned["t"][number] if returned else None, known[1] if known else None, is_flat
            found[name, counted[name, event["call"]]].append(Row(known[0] if known else key, rank, *given))
    return found


def parts_of_rows(one: dict[str, Any], own: dict[str, Any]) -> dict[str, tuple[str, Tensor]]:
    """Find the rows of one process that contain a rank's rows, which are runs of their tokens."""
    whole = {
        key: ids
        for call in one["calls"]
        for given in call["inputs"].values()
        if given["ids"] is not None
        for key, ids in zip(given["rows"], given["ids"], strict=True)
    }
    found = {}
    for call in own["calls"]:
        for given in call["inputs"].values():
            for key, ids in zip(given["rows"], given["ids"] or [], strict=False):
                if key in whole or key in found:
                    continue
                for other, row in whole.items():
                    if (at := _runs(ids, row)) is not None:
                        found[key] = other, at
                        break
    return found


def _runs(ids: list[int], row: list[int]) -> Tensor | None:
    """Find ids in a row: anywhere if the row has each once, else as one run, two of equal length, or every nth."""
    n, length = len(ids), len(row)
    if n >= length or n < 2:
        return None
    if len(places := {id_: place for place, id_ in enumerate(row)}) == length:
        return torch.tensor([places[id_] for id_ in ids]) if places.keys() >= set(ids) else None
    for size in (n, n // 2):
        if size < 2 or n % size:
            continue
        runs = [ids[begin : begin + size] for begin in range(0, n, size)]
        starts = [next((i for i in range(length - size + 1) if row[i : i + size] == run), -1) for run in runs]
        if min(starts) >= 0:
            return torch.cat([torch.arange(start, start + size) for start in starts])
    every = -(-length // n)
    dealt = (torch.arange(start, length, every) for start in range(every) if row[start::every] == ids)
    return next(dealt, None)
