"""Compare the passes of one step row by row: which rows each rank had, what modules returned, what came back."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor

from .sketches import INPUT
from .traces import Place, Row, Run, origins, parts_of_rows, relative, row_keys, rows_of, usual

ROUNDING = {"float64": 1e-7, "float32": 5e-5, "bfloat16": 3e-2, "float16": 4e-3}
"""Least relative error by dtype that is no rounding; traces hold float32."""
ANOTHER = 0.2
"""Least relative error of an output that no rounding of 16 bits makes."""

Key = tuple[str, int]
"""A module and the number of its call within an outermost call."""


@dataclass(frozen=True)
class Pair:
    """A row of a module's output on a rank, and what one process has there."""

    rank: int
    row: str
    found: Tensor
    whole: Tensor
    dtypes: tuple[str, str]
    rounding: float = 5e-5
    features: tuple[Tensor, Tensor] | None = None
    """Both rows by feature, where all tokens of both are there."""
    least: float = 1e-6
    """Size of what is compared, at least; a tenth of what rows have, since less is what is left of sums that cancel."""

    @property
    def error(self) -> float:
        return relative(self.found, self.whole, self.least)

    @property
    def differs(self) -> bool:
        return self.error > self.rounding / 2

    @property
    def is_shorter(self) -> bool:
        """Return whether it is of 16 bits, and one process's of more."""
        return "float16" in self.dtypes[0] and "float16" not in self.dtypes[1]

    @property
    def is_permuted(self) -> bool:
        """Return whether tokens, or features, are one process's in another order."""
        return any(is_permuted(*both) for both in ((self.found, self.whole), self.features) if both is not None)


@dataclass
class Sights:
    """What attention's queries see: the ranks that see other numbers of keys, and those with other scales of scores.

    Attributes:
        is_known: whether any were compared.
        is_causal: whether a row's queries see different numbers of keys.
    """

    masked: set[int] = field(default_factory=set)
    scaled: set[int] = field(default_factory=set)
    is_known: bool = False
    is_causal: bool = False


class Passes:
    """One step of all ranks beside one process's.

    Args:
        places: by rank, the place of each parameter in one process's.
    """

    def __init__(self, base: dict[str, Any], many: Run, places: list[dict[str, Place]], step: int):
        self.whole = base["steps"][step]
        self.own = many.at(step)
        self.places = places
        self.names = [module_names(placed) for placed in places]
        self.held = [{place.name for place in placed.values()} for placed in places]
        self.lengths = [parts_of_rows(self.whole, one) for one in self.own]
        self.keys, self.whole_keys = row_keys(self.own), row_keys([self.whole])[0]
        # rows of a rank whose inputs nobody returned, such as rounded ones, are named as those of another rank
        known = {row for rows in self.whole_keys.values() for row in rows or ()}
        known |= {row for lengths in self.lengths for row in lengths}
        sizes = [[len(rows or ()) for rows in keys.values()] for keys in self.keys]
        named = [any(row in known for rows in keys.values() for row in rows or ()) for keys in self.keys]
        for rank in range(len(self.keys)):
            donor = next((r for r, is_named in enumerate(named) if is_named and sizes[r] == sizes[rank]), None)
            if not named[rank] and donor is not None:
                self.keys[rank] = dict(self.keys[donor])
        rows = rows_of(self.whole, 0, {}, {}, self.whole_keys)
        self.first = {key: {row.key: row for row in reversed(found)} for key, found in rows.items()}
        self.reference: dict[Key, dict[str, Row]] = {}
        for key, found in rows.items():  # without rows that a module was given again, beside something else
            first = self.first[key]
            others = {row.key for row in found if relative(row.features, first[row.key].features) > 1e-6}
            self.reference[key] = {name: row for name, row in first.items() if name not in others}
        self.rows = [
            rows_of(one, rank, self.names[rank], self.lengths[rank], self.keys[rank])
            for rank, one in enumerate(self.own)
        ]
        self.cut_outputs: list[dict[str, Tensor]] = [{} for _ in places]
        """The features of which each rank has a part, by module."""
        self.cut_inputs = set[str]()
        """The modules whose weight is cut along its inputs: ranks return parts of a sum."""
        for cut, placed in zip(self.cut_outputs, places, strict=True):
            for place in placed.values():
                if place.index is None or place.offset is not None or not place.name.endswith("weight"):
                    continue
                module = place.name.rpartition(".")[0]
                if place.dim == 0:
                    cut[module] = place.index
                elif place.dim == 1:
                    self.cut_inputs.add(module)

    # --- data

    def wrong_rows(self) -> tuple[tuple[int, ...], str] | None:
        """Compare which rows the ranks had: the ranks that have others, and what is wrong."""
        theirs, mine = self.counts()
        shapes = {tuple(given["shape"][1:]) for _, given in origins(self.whole)}
        for rank, one in enumerate(self.own):
            for _, given in origins(one) if self._has_data(rank) else ():
                homeless = not all(row in self.lengths[rank] for row in given["rows"])
                if tuple(given["shape"][1:]) not in shapes and homeless:
                    return None  # parts of rows that have no place in one process's
        if not theirs or not any(mine):
            return None
        union = set().union(*mine)
        lacking, strange = set(theirs) - union, union - set(theirs)
        own = [set(counts) for counts in mine]
        doubled = [
            rank
            for rank, rows in enumerate(own)
            if any(
                lacking
                if rows == own[other]
                else any((mine[rank] + mine[other] - theirs)[row] for row in rows & own[other])
                for other in range(rank)
            )
        ]
        more = [rank for rank, counts in enumerate(mine) if (counts - theirs).keys() & theirs.keys()]
        absent = [rank for rank, one in enumerate(self.own) if not one["calls"]]
        if lacking or strange:
            ranks = [rank for rank, rows in enumerate(own) if rows & strange] or doubled or absent or range(len(mine))
            missing = f"{len(lacking)} of {len(theirs)} rows are missing"
            return tuple(ranks), missing if lacking else f"{len(strange)} rows are not of this step"
        if doubled or more:
            return tuple(doubled or more), "some rows are used more than once"
        return None

    def counts(self) -> tuple[Counter[str], list[Counter[str]]]:
        """Count how often each row went through the model, in one process and on each rank."""
        mine = [
            self._counts(one, self.lengths[rank]) if self._has_data(rank) else Counter()
            for rank, one in enumerate(self.own)
        ]
        return self._counts(self.whole, {}), mine

    def other_batches(self) -> bool:
        """Return whether ranks take other numbers of rows at a time than one process."""
        sizes = [{len(given["rows"]) for _, given in origins(one)} for one in (self.whole, *self.own)]
        return any(size and size != sizes[0] for size in sizes)

    def _has_data(self, rank: int) -> bool:
        """Return whether a rank's first module is given data, and not what another rank's returned."""
        made = {row for one in self.own for call in one["calls"] for row in call["gives"]}
        kinds = {given["dtype"] for _, given in origins(self.whole)}
        found = [given for _, given in origins(self.own[rank])]
        return any(given["dtype"] in kinds for given in found) and not any(r in made for g in found for r in g["rows"])

    def _counts(self, step: dict[str, Any], lengths: dict[str, tuple[str, Tensor]]) -> Counter[str]:
        """Count how often each row of the data went through the model; a module that is called again counts again."""
        counted: dict[str, Counter[str]] = defaultdict(Counter)
        for module, given in origins(step):
            counted[module].update(lengths.get(row, (row,))[0] for row in given["rows"])
        total: Counter[str] = Counter()
        for counts in counted.values():
            total |= counts
        return total

    def wrong_labels(self) -> tuple[tuple[int, ...], str] | None:
        """Compare what each row was to predict; fractions may be computed, and are wrong where another row's."""
        theirs: dict[str, list[Tensor]] = defaultdict(list)  # such a row as a token has several
        for key, labels in self._labels(self.whole, self.whole_keys):
            theirs[key].append(labels)
        every = [labels for found in theirs.values() for labels in found]
        wrong = set()
        for rank, one in enumerate(self.own):
            for key, labels in self._labels(one, self.keys[rank]):
                home, at = self.lengths[rank].get(key, (key, None))
                found = [
                    there[at] if at is not None and len(at) == len(labels) and int(at.max()) < len(there) else there
                    for there in theirs.get(home, ())
                ]
                alike = [torch.equal(there, labels) for there in found if len(there) == len(labels)]
                if not alike or any(alike):
                    continue
                if torch.equal(labels, labels.round()) or any(torch.equal(labels, other) for other in every):
                    wrong.add(rank)
        return (tuple(sorted(wrong)), "labels are other rows' or are missing") if wrong else None

    @staticmethod
    def _labels(step: dict[str, Any], keys: dict[int, list[str] | None]) -> Iterator[tuple[str, Tensor]]:
        seen = set()
        for target in step["targets"]:
            rows, flat = keys.get(target["call"]), target["flat"]
            is_second = target["call"] in seen  # a second loss of the same rows
            if is_second or not rows or len(flat) % len(rows) or len(flat) != torch.Size(target["shape"]).numel():
                continue
            seen.add(target["call"])
            yield from zip(rows, flat.reshape(len(rows), -1), strict=True)

    def other_inputs(self) -> tuple[str, tuple[int, ...], str] | None:
        """Compare what else models were given beside each row: (input, ranks, what it is)."""
        theirs = self._beside(self.whole, self.whole_keys)
        wrong: dict[str, set[int]] = defaultdict(set)
        for rank, one in enumerate(self.own):
            for where, value in self._beside(one, self.keys[rank]).items():
                if where in theirs and theirs[where] != value and where[1] not in self.lengths[rank]:
                    wrong[where[0]].add(rank)
        for name, ranks in wrong.items():
            kind = "position" if "pos" in name else "mask" if any(w in name for w in ("mask", "doc", "seg")) else ""
            if kind:
                return name, tuple(sorted(ranks)), kind
        return None

    @staticmethod
    def _beside(step: dict[str, Any], keys: dict[int, list[str] | None]) -> dict[tuple[str, str], tuple[str, Any]]:
        found = {}
        for number, call in enumerate(step["calls"], 1):
            rows = keys.get(number)
            for name, given in call["inputs"].items():
                if rows and len(given["rows"]) == len(rows) and not given["dtype"].startswith(("float", "bfloat")):
                    for key, value in zip(rows, given["rows"], strict=True):
                        found[name, key] = (value, given["shape"][1:])
        return found

    def sights(self) -> Sights:
        """Compare what attention's queries see with what one process's see."""
        whole, found = self._sights(self.whole, self.whole_keys), Sights()
        for rank, one in enumerate(self.own):
            for (module, row), (counts, scale) in self._sights(one, self.keys[rank]).items():
                home, at = self.lengths[rank].get(row, (row, None))
                there, usual = whole.get((self.names[rank].get(module, module), home), (None, 0.0))
                if there is not None and at is not None and len(at) == len(counts) < len(there):
                    there = there[at]
                if there is not None and there.shape == counts.shape:
                    found.masked |= {rank} if not torch.equal(there.round(), counts.round()) else set()
                    found.scaled |= {rank} if scale and usual and abs(scale - usual) > 1e-6 * usual else set()
                    found.is_causal |= len(set(counts.tolist())) > 1
                    found.is_known = True
        return found

    def attends(self, name: str) -> bool:
        """Return whether a module has attention in it, or is a layer beside it; by its name where none was seen."""
        homes = {sight["module"] for sight in self.whole["sights"]}
        if not homes:
            return any(word in name.lower() for word in ("attn", "attention", "sdpa"))
        is_leaf = not any(other.startswith(f"{name}.") for other, _ in self.reference)
        return any(
            f"{home}.".startswith(f"{name}.") or (is_leaf and f"{name}.".startswith(f"{home}." * bool(home)))
            for home in homes
        )

    @staticmethod
    def _sights(step: dict[str, Any], keys: dict[int, list[str] | None]) -> dict[tuple[str, str], tuple[Tensor, float]]:
        """Add up the keys that each row's queries see in a module's call, which may take some keys at a time."""
        found: dict[tuple[str, str], tuple[Tensor, float]] = {}
        calls: dict[tuple[str, str], int] = {}
        for sight in step["sights"]:
            rows, counts = keys.get(sight["call"]), sight["counts"]
            if not rows or len(counts) % len(rows):
                continue
            for row, own in zip(rows, counts.reshape(len(rows), -1, counts.shape[1]).mean(1), strict=True):
                key = sight["module"], row
                if calls.setdefault(key, sight["call"]) == sight["call"]:
                    before, _ = found.get(key, (own, 0.0))
                    is_more = key in found and before.shape == own.shape
                    found[key] = (own + before if is_more else own), sight["scale"]
        return found

    # --- outputs

    def _shared(self, key: Key, at_first: bool = False) -> Iterator[tuple[int, Row, Row]]:
        """Go through a rank's and one process's rows of an output; of rows given again take the first, or none."""
        for rank, rows in enumerate(self.rows):
            own = rows.get(key, []) if not self.is_another(rank, key[0]) else []
            for row in own if not at_first else {row.key: row for row in reversed(own)}.values():
                there = (self.first if at_first else self.reference)[key].get(row.key)
                if there is not None:
                    yield rank, row, there

    def pairs(self, key: Key, at_first: bool = False) -> list[Pair]:
        """Pair the ranks' rows of an output with one process's, as far as they can be compared."""
        found = []
        for rank, row, there in self._shared(key, at_first):
            if (values := self._aligned(rank, key[0], row, there)) is not None:
                is_short = self.whole["short"] and ("float16" in there.dtype or "float16" not in row.dtype)
                least = ROUNDING["bfloat16" if is_short else there.dtype]
                is_whole = len(row.tokens) == len(there.tokens) and len(row.features) == len(there.features)
                by_feature = (row.features, there.features) if is_whole else None
                found.append(Pair(rank, row.key, *values, (row.dtype, there.dtype), least, by_feature))
        least = max(1e-6, 0.1 * usual(float(pair.whole.double().norm()) for pair in found))
        return [replace(pair, least=least) for pair in found]

    def is_another(self, rank: int, name: str) -> bool:
        """Return whether a rank's module is not one process's of that name: a stage, or what stands in for a module."""
        inside = [other for other in self.whole["before"] if not name or other.startswith(name + ".")]
        direct = [other for other in inside if "." not in other[len(name) + 1 :]]
        return not self.held[rank].issuperset(direct if name else inside)

    def _aligned(self, rank: int, name: str, row: Row, there: Row) -> tuple[Tensor, Tensor] | None:
        mine, theirs = row.tokens, there.tokens
        index = self.cut_outputs[rank].get(name)
        is_whole = len(mine) == len(theirs) and (index is not None or row.features.shape == there.features.shape)
        if row.at is not None and is_whole and int(row.at[-1] - row.at[0]) == len(row.at) - 1:
            row = replace(row, at=None)  # the module gathers the whole row
        if row.at is not None and len(mine) == len(row.at) and int(row.at.max()) < len(theirs):
            theirs = theirs[row.at]
        elif (
            row.at is not None and not row.is_flat and len(row.features) % len(row.at) == 0
        ):  # (rows, heads, tokens, features)
            each = len(row.features) // len(row.at)
            if len(there.features) % each == 0 and int(row.at.max()) < len(there.features) // each:
                return row.features, there.features.view(-1, each)[row.at].flatten()
        if (
            row.key == "table"
            and row.at is None
            and any(other != "table" for key, rows in self.first.items() if key[0] == name for other in rows)
        ):
            return None  # its outputs have rows of the data, too
        if index is not None and row.features.shape != there.features.shape:
            if row.at is not None or len(index) != len(row.features) or int(index.max()) >= len(there.features):
                return None
            return row.features, there.features[index]
        if row.features.shape != there.features.shape:
            return None
        if mine.shape != theirs.shape:  # a part of the tokens, as sequence parallelism cuts them
            if row.is_flat or not len(mine) or len(theirs) % len(mine):
                return None
            return mine, min(theirs.split(len(mine)), key=lambda chunk: relative(mine, chunk, 1e-6))
        return mine, theirs

    def in_order(self) -> list[Key]:
        known = [key for key, rows in self.reference.items() if rows]
        return sorted(known, key=lambda key: next(iter(self.reference[key].values())).order)

    def first_output(self, among: set[str] | None = None) -> tuple[str, list[Pair], list[Pair]] | None:
        """Find the first module whose output differs, if the last ones differ, too: its name, those rows, all rows.

        Args:
            among: modules whose gradients differ; of these, it is the first whose output is another altogether.
        """
        keys = (key for key in self.in_order() if not key[0].endswith(INPUT))
        every = {key: pairs for key in keys if (pairs := self.pairs(key))}
        last = set({pair.rank: key for key, pairs in every.items() for pair in pairs}.values())  # of each rank
        if among is None and not any(pair.differs for key in last for pair in every[key]):
            return None
        added = set[str]()
        is_clear = self.whole["short"] and any(pair.error > ANOTHER for key in last for pair in every[key])
        for key, pairs in every.items():
            off = [pair for pair in pairs if pair.differs and (among is None or pair.error > ANOTHER)]
            if is_clear and all(pair.error < pair.rounding for pair in off):
                continue  # so much is rounding's, and another module's is not
            if not off or (among is not None and (key[0] not in among or key[0] in self.cut_inputs)):
                continue
            around = every.get((key[0].rpartition(".")[0], key[1]), ())
            is_added, in_any_layer = around and not any(pair.differs for pair in around), re.sub(r"\d+", "#", key[0])
            beside = (
                around
                and not is_added
                and self.added_again(key[0].rpartition(".")[0], [p for p in around if p.differs])
            )
            if (is_added or in_any_layer in added or beside) and self.add_up(pairs):
                added.add(in_any_layer)  # the module around it, or around that of another layer, adds parts up
                continue
            if key[0] in self.cut_inputs:  # each rank's sum over its own features
                if self.add_up(pairs):
                    continue
                # a bias that every rank adds is seen in the module around it
                outer = any(other != key and other[0] and key[0].startswith(other[0] + ".") for other in every)
                if outer and len({pair.rank for pair in pairs}) == len(self.own):
                    continue
            return key[0], off, pairs
        return None

    def first_shorter(self) -> tuple[str, list[Pair], list[Pair]] | None:
        """Find the first module that returns 16 bits and rounds to them, where one process does not.

        A policy may cast other modules than autocast does, but then all layers alike.
        """
        every = {key: pairs for key in self.in_order() if (pairs := self.pairs(key))}
        kinds = {(re.sub(r"\d+", "#", key[0]), pair.is_shorter) for key, pairs in every.items() for pair in pairs}
        for key, pairs in every.items():
            off = [pair for pair in pairs if pair.is_shorter and pair.differs]
            if off and (not self.whole["short"] or (re.sub(r"\d+", "#", key[0]), False) in kinds):
                return key[0], off, off
        return None

    def first_input(self, name: str) -> tuple[str, list[Pair]]:
        """Find the first input that differs before a module's output: the module that returned it, else whose it is."""
        returned: dict[str, Row] = {}
        for key in self.in_order():
            if key[0] == name:
                break
            row = next(iter(self.reference[key].values()))
            if not key[0].endswith(INPUT):
                returned[key[0]] = row
                continue
            pairs = self.pairs(key)
            if any(pair.differs for pair in pairs):
                mine = row.tokens, row.features
                same = [
                    n for n, there in returned.items() if all(map(torch.equal, (there.tokens, there.features), mine))
                ]
                return same[-1] if same else key[0].removesuffix(INPUT), pairs
        return name, []

    def added_again(self, name: str, off: list[Pair]) -> str:
        """Name a module inside another one in whose output its own counts once for each rank; empty: none."""
        inside = (key for key in self.in_order() if key[0].startswith(f"{name}.") and not key[0].endswith(INPUT))
        for key in inside:
            own = {pair.row: pair.whole for pair in self.pairs(key)}
            pairs = [(pair.found - pair.whole, own[pair.row]) for pair in off if pair.row in own]
            times = [factor(more, once, 0.2 if self.whole["short"] else 1e-2) for more, once in pairs]
            known = [time for time in times if time is not None]
            if len(known) == len(off) and abs(median(known) + 1 - len(self.own)) < 0.05 * (len(self.own) - 1):
                return key[0]
        return ""

    def are_other_rows(self, off: list[Pair], name: str) -> str | None:
        """Say if rows are other rows' of the module: "stale value" if those came earlier on the rank, "wrong order"."""
        key = next(key for key in self.in_order() if key[0] == name)
        earlier = []
        for pair in off:
            order = [row.key for row in self.rows[pair.rank].get(key, [])]
            whole = {row: p.whole for p in self.pairs(key) if (row := p.row) != pair.row}
            other = next((row for row, there in whole.items() if relative(pair.found, there) < 1e-3), None)
            if other is None:
                return None
            earlier.append(other in order[: order.index(pair.row)])
        return "stale value" if all(earlier) else "wrong order" if earlier else None

    def are_elsewhere(self, off: list[Pair], name: str) -> bool:
        """Return whether rows of a table of positions are those of other places in it."""
        whole = next(iter(self.reference[name, 1].values())).tokens if self.reference.get((name, 1)) else torch.zeros(0)
        return all(
            pair.row == "table" and len(whole) and float((pair.found[:, None] - whole).abs().amin(1).max()) < 1e-4
            for pair in off
        )

    def begins_alike(self) -> bool:
        """Return whether rows that a model is given again had the right outputs at first."""
        again = any(len(self.reference[key]) < len(rows) for key, rows in self.first.items())
        pairs = [pair for key in self.first for pair in self.pairs(key, at_first=True)]
        return again and bool(pairs) and not any(pair.differs for pair in pairs)

    @staticmethod
    def add_up(pairs: list[Pair]) -> bool:
        """Return whether the ranks' rows are parts of a sum, or of a mean, that is one process's."""
        by_row: dict[str, list[Pair]] = defaultdict(list)
        for pair in pairs:
            by_row[pair.row].append(pair)
        for parts in by_row.values():
            first = parts[0]
            if len(parts) < 2 or any(p.found.shape != first.found.shape for p in parts):
                return False
            if any(relative(p.whole, first.whole) > 1e-3 for p in parts):
                return False  # parts of a row, not of a sum
        sums = [(torch.stack([part.found for part in parts]).sum(0), parts) for parts in by_row.values()]
        return any(
            all(
                relative(total / (len(parts) if is_mean else 1), parts[0].whole) < max(1e-3, 2 * parts[0].rounding)
                for total, parts in sums
            )
            for is_mean in (False, True)
        )

    # --- what came back

    def _returned(self, key: Key) -> list[Pair]:
        found = []
        for rank, row, there in self._shared(key):
            mine, theirs = row.back_tokens, there.back_tokens
            if mine is None or theirs is None or row.features.shape != there.features.shape:
                continue
            if row.at is not None and len(mine) == len(row.at) and int(row.at.max()) < len(theirs):
                theirs = theirs[row.at]
            if mine.shape == theirs.shape and float(theirs.norm()) > 0:
                found.append(Pair(rank, row.key, mine, theirs, (row.dtype, there.dtype)))
        return found

    def given_back(self, ranks: tuple[int, ...]) -> tuple[str, str, tuple[int, ...]] | None:
        """Say what is wrong with what came back to the last outputs of ranks: the kind, why, and where it arises."""
        keys = reversed(self.in_order())
        pairs = next((found for key in keys if (found := [p for p in self._returned(key) if p.rank in ranks])), [])
        if not pairs or any(factor(pair.found, pair.whole) is not None for pair in pairs):
            return None
        if all(any(relative(pair.found, other.whole) < 1e-3 for other in pairs) for pair in pairs):
            return "wrong order", "another row's comes back to its output", ranks
        others = {*range(len(self.own))}.difference(ranks)
        return "dead path", "a part of what comes back to its output lacks", tuple(others)

    def loss_scales(self) -> list[float | None]:
        """Return by how much the gradient of each row's last output is more than one process's."""
        for key in reversed(self.in_order()):
            if pairs := self._returned(key):
                return [factor(pair.found, pair.whole, max(1e-3, ROUNDING.get(pair.dtypes[1], 0.0))) for pair in pairs]
        return []


def is_permuted(found: Tensor, whole: Tensor) -> bool:
    """Return whether a tensor has another's numbers in another order."""
    return found.shape == whole.shape and relative(found.sort().values, whole.sort().values) < 1e-3


def module_names(places: dict[str, Place]) -> dict[str, str]:
    """Map a rank's names of modules to one process's."""
    found: dict[str, str] = {}
    for name, place in places.items():
        a, b = name.split(".")[:-1], place.name.split(".")[:-1]
        while a and b:
            found.setdefault(".".join(a), ".".join(b))
            if a[-1] != b[-1]:
                break
            a, b = a[:-1], b[:-1]
    return found


def factor(found: Tensor, whole: Tensor, bound: float = 1e-3) -> float | None:
    """Return the factor between two tensors, if there is one for all elements."""
    size = float((whole.double() ** 2).sum())
    if found.shape != whole.shape or size == 0:
        return None
    value = float((found.double() * whole.double()).sum()) / size
    return value if value and relative(found, whole * value) < bound else None


def is_one(factors: Iterable[float | None], bound: float = 1e-3) -> bool:
    """Return whether there are factors, and all are the same."""
    known = list(factors)
    return bool(known) and None not in known and max(known) - min(known) < bound * abs(known[0])  # type: ignore[type-var, operator, arg-type]
