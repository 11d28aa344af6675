"""Say where in a step a difference arises, and what kind of fault it is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from .traces import Place, Row, Run, own_part, part, parts_of_rows, relative, rows_of, vector

ROUNDING = {"float64": 1e-9, "float32": 5e-5, "bfloat16": 3e-2, "float16": 4e-3}
"""Least relative error by dtype that is no rounding."""


@dataclass(frozen=True)
class Finding:
    """The first difference of a run from one process.

    Attributes:
        verdict: "fault" or "sound".
        place: a module or parameter, as one process names it; ".+" where everything differs at once.
        step: the first step, 1 the first.
        ranks: the ranks with the difference.
        kind: what kind of fault it is.
        words: the finding in a sentence.
        unknown: parameters that were not compared, since their place in one process's is unknown.
    """

    verdict: str
    place: str = ""
    step: int = 0
    ranks: tuple[int, ...] = ()
    kind: str = ""
    words: str = "equal up to rounding"
    unknown: tuple[str, ...] = ()

    def plain(self) -> dict[str, Any]:
        return asdict(self) | {"ranks": list(self.ranks), "unknown": list(self.unknown)}


@dataclass(frozen=True)
class Off:
    """One tensor of one rank that differs."""

    name: str
    rank: int
    found: Tensor | None
    whole: Tensor | None
    error: float
    place: Place | None


class Diagnosis:
    """The place and kind of a difference.

    Args:
        base: the trace of one process.
        places: by rank, the place of each parameter in one process's.
    """

    def __init__(self, base: dict[str, Any], many: Run, places: list[dict[str, Place]]):
        self.base, self.many, self.places = base, many, places

    def place(self, step: int, gradients: list[Off], after: list[Off]) -> Finding:
        """Find where in a step the difference of gradients, or of parameters after it, arises."""
        if (rows := self._rows(step)) is not None:
            return rows
        forward = self._forward(step) if gradients else None
        if forward is not None:
            return forward
        if gradients:
            return self._of_gradients(step, gradients)
        return self._of_updates(step, after)

    def _rows(self, step: int) -> Finding | None:
        """Compare the rows, and what they were to predict."""
        whole, own = self.base["steps"][step], [self.many.step(r, step) for r in range(len(self.many.ranks))]
        theirs = _row_counts(whole)
        lengths = [parts_of_rows(whole, one) for one in own]
        mine = [
            {lengths[rank].get(key, (key,))[0]: n for key, n in _row_counts(step_).items()}
            for rank, step_ in enumerate(own)
        ]
        with_rows = [counts for counts in mine if counts]
        if theirs and with_rows:
            union = set().union(*with_rows)
            lacking, strange = set(theirs) - union, union - set(theirs)
            if lacking or strange:
                ranks = tuple(r for r, counts in enumerate(mine) if set(counts) - set(theirs))
                if not ranks:  # some rank repeats what another has
                    seen: set[str] = set()
                    doubled = []
                    for r, counts in enumerate(mine):
                        if set(counts) & seen:
                            doubled.append(r)
                        seen |= set(counts)
                    ranks = tuple(doubled)
                what = (
                    f"{len(lacking)} of {len(theirs)} rows are missing"
                    if lacking
                    else f"{len(strange)} rows are not one process's"
                )
                return Finding(
                    "fault",
                    ".+",
                    step + 1,
                    ranks or tuple(range(len(mine))),
                    "wrong rows",
                    f"{what} in step {step + 1}",
                )
            heaviest = max(n for counts in with_rows for n in counts.values())
            if heaviest > max(theirs.values()):
                ranks = tuple(r for r, counts in enumerate(mine) if counts and max(counts.values()) == heaviest)
                return Finding(
                    "fault", ".+", step + 1, ranks, "wrong rows", f"rows are used {heaviest} times in step {step + 1}"
                )
        labels = _labels(whole)
        if labels:
            wrong = tuple(
                rank
                for rank, one in enumerate(own)
                if any(
                    (home := lengths[rank].get(key, (key,))[0]) in labels and labels[home] != found and key == home
                    for key, found in _labels(one).items()
                )
            )
            if wrong:
                return Finding(
                    "fault", ".+", step + 1, wrong, "wrong rows", f"labels are other rows' on {these(wrong)}"
                )
        return None

    def _forward(self, step: int) -> Finding | None:
        """Find the first module whose output differs, in the order in which one process computes them."""
        whole = self.base["steps"][step]
        reference = rows_of(whole, 0, {}, {})
        first: dict[tuple[str, int], dict[str, Row]] = {
            key: {row.key: row for row in rows} for key, rows in reference.items()
        }
        ranks = len(self.many.ranks)
        own = []
        for rank in range(ranks):
            names = _module_names(self.places[rank])
            step_ = self.many.step(rank, step)
            own.append(rows_of(step_, rank, names, parts_of_rows(whole, step_)))
        partial_inputs, cut_outputs = self._cut_modules()
        for key, rows in sorted(first.items(), key=lambda item: next(iter(item[1].values())).order):
            found: list[tuple[int, Tensor, Tensor, Row, Row]] = []
            values: dict[str, list[tuple[int, Tensor]]] = defaultdict(list)
            for rank in range(ranks):
                for row in own[rank].get(key, ()):
                    there = rows.get(row.key)
                    if there is None:
                        continue
                    mine, theirs = row.tokens, there.tokens
                    if row.at is not None and len(mine) == len(row.at) and int(row.at.max()) < len(theirs):
                        theirs = theirs[row.at]
                    if key[0] in cut_outputs[rank] and row.features.shape != there.features.shape:
                        index = cut_outputs[rank][key[0]]
                        if (
                            row.at is not None
                            or len(index) != len(row.features)
                            or int(index.max()) >= len(there.features)
                        ):
                            continue
                        mine, theirs = row.features, there.features[index]
                    elif row.features.shape != there.features.shape or mine.shape != theirs.shape:
                        continue
                    values[row.key].append((rank, mine))
                    error = relative(mine, theirs, 1e-6)
                    if error > max(10 * ROUNDING.get(there.dtype, 5e-5), 1e-4):
                        found.append((rank, mine, theirs, row, there))
            if not found:
                continue
            if any(key[0] in names for names in partial_inputs):  # each rank's sum over its own features
                sums = all(
                    relative(torch.stack([m for _, m in parts]).sum(0), rows[row_key].tokens) < 1e-3
                    for row_key, parts in values.items()
                )
                if sums:
                    continue
                # a bias that every rank adds is seen in the module around it
                if all(len(parts) == ranks for parts in values.values()):
                    outer = any(other != key and other[0] and key[0].startswith(other[0] + ".") for other in first)
                    if outer:
                        continue
            return self._of_output(step, key[0], found, values)
        return None

    def _cut_modules(self) -> tuple[list[set[str]], list[dict[str, Tensor]]]:
        """List each rank's modules whose weight is cut along its inputs, and those cut along their outputs."""
        inputs: list[set[str]] = []
        outputs: list[dict[str, Tensor]] = []
        for places in self.places:
            cut_inputs, cut_outputs = set(), {}
            for place in places.values():
                module, _, leaf = place.name.rpartition(".")
                if place.index is not None and leaf == "weight":
                    if place.dim == 1:
                        cut_inputs.add(module)
                    elif place.dim == 0:
                        cut_outputs[module] = place.index
            inputs.append(cut_inputs)
            outputs.append(cut_outputs)
        return inputs, outputs

    def _of_output(
        self,
        step: int,
        name: str,
        found: list[tuple[int, Tensor, Tensor, Row, Row]],
        values: dict[str, list[tuple[int, Tensor]]],
    ) -> Finding:
        ranks = tuple(sorted({rank for rank, *_ in found}))
        n = len(self.many.ranks)
        errors = [relative(mine, theirs, 1e-6) for _, mine, theirs, _, _ in found]
        factors = [_factor(mine, theirs) for _, mine, theirs, _, _ in found]
        kind, why = "", ""
        dtypes = {(row.dtype, there.dtype) for _, _, _, row, there in found}
        if any(a != b for a, b in dtypes):
            kind, why = "rounding/dtype", f"{next(iter(dtypes))[0]} for {next(iter(dtypes))[1]}"
        elif all(f is not None for f in factors) and max(factors) - min(factors) < 1e-3 * abs(factors[0]):  # type: ignore[type-var, operator, arg-type]
            kind, why = ("double reduction" if _near(factors[0], n) else "wrong scale"), f"{factors[0]:.6g} times"
        elif n > 1 and all(
            len(parts) > 1 and relative(torch.stack([m for _, m in parts]).sum(0), self._row_of(found, key)) < 1e-3
            for key, parts in values.items()
            if self._row_of(found, key) is not None
        ):
            kind, why = "missing reduction", "each rank has its own part of the sum"
        elif max(errors) < 0.02:
            kind, why = "rounding/dtype", "by as much as a shorter dtype rounds"
        elif _is_position(name):
            kind, why = "position", ""
        elif _is_attention(name):
            profile = torch.stack(
                [(mine - theirs).abs() for _, mine, theirs, _, _ in found if mine.shape == theirs.shape]
            ).mean(0)
            sound = profile < 1e-4 * profile.max()
            kind = "mask" if bool(sound.any()) or profile[0] > 0 else "position"
            why = "early tokens differ" if profile[0] > 1e-4 * profile.max() else "later tokens differ"
        else:
            profile = torch.stack([(mine - theirs).abs() for _, mine, theirs, _, _ in found]).mean(0)
            blocks = [p for p in name.split(".") if p.isdigit()]
            kind = "position" if not blocks or blocks[0] == "0" else "wrong scale"
        sentence = f"step {step + 1} · {name}: outputs differ ({max(errors):.1e}) on {these(ranks)}" + (
            f": {why}" if why else ""
        )
        return Finding("fault", name or ".+", step + 1, ranks, kind, sentence)

    @staticmethod
    def _row_of(found: Iterable[tuple[int, Tensor, Tensor, Row, Row]], key: str) -> Any:
        return next((theirs for _, _, theirs, row, _ in found if row.key == key), None)

    def _of_gradients(self, step: int, off: list[Off]) -> Finding:
        names = list(dict.fromkeys(o.name for o in off))
        whole = self.base["steps"][step]["gradients"]
        alive = [name for name, entry in whole.items() if entry is not None and entry["norm"] > 0]
        everywhere = len(names) >= 0.9 * len(alive)
        ranks = ranks_of(off)
        n = len(self.many.ranks)
        last = self.base["steps"][step - 1]["gradients"] if step else {}
        finite = [o for o in off if o.found is not None and o.whole is not None and o.found.shape == o.whole.shape]
        factors = [_factor(o.found, o.whole) for o in finite]  # type: ignore[arg-type]
        kind, why = "", ""
        known = [f for f in factors if f is not None]
        if not finite:
            unchanged = all(self._unchanged(step, o) for o in off)
            kind, why = (
                ("not updated", "no optimizer steps it")
                if unchanged and all(o.found is None for o in off)
                else ("dead path", "no gradient")
            )
        elif all(float(o.found.norm()) < 1e-6 * float(o.whole.norm()) for o in finite):  # type: ignore[union-attr]
            kind, why = "dead path", "the gradient is zero"
        elif len(known) == len(finite) and max(known) - min(known) < 1e-3 * abs(known[0]):
            double = _near(known[0], n) and not everywhere
            kind, why = ("double reduction" if double else "wrong scale"), f"{known[0]:.6g} times"
        elif step and any(self._stale(o, last) for o in finite):
            kind, why = "stale value", "the last step's is in it"
        elif n > 1 and (word := self._unreduced(step, finite)) is not None:
            kind, why = word
        elif (other := self._of_another(step, finite)) is not None:
            kind, why = "wrong order", f"{finite[0].name} has that of {other}"
        elif max(o.error for o in finite) < 0.02:
            kind, why = "rounding/dtype", "by as much as a shorter dtype rounds"
        elif len(known) == len(finite):
            kind, why = "wrong scale", f"{min(known):.4g} to {max(known):.4g} times"
        else:
            kind = "missing reduction" if len(ranks) < n or self._replicas_differ(step, finite) else "wrong scale"
        place = common_name(off) if not everywhere else ".+"
        if len(names) > 2 and not (len(known) == len(finite) and max(known) - min(known) < 1e-3 * abs(known[0])):
            latest = max(names, key=list(whole).index)  # what a forward computes last, a backward reaches first
            of_latest = [_factor(o.found, o.whole) for o in finite if o.name == latest]  # type: ignore[arg-type]
            if kind == "wrong scale" and all(_near(factor, n) for factor in of_latest) and of_latest and n > 1:
                place, kind, why = latest, "double reduction", f"{n} times, and what lies before it too"
            elif kind in ("missing reduction", "wrong scale") and (backward := self._backward(step)) is not None:
                place, ranks = backward
        sentence = (
            f"step {step + 1} · {place}: gradients differ ({max(o.error for o in off):.1e}) on {these(ranks)}"
            + (f": {why}" if why else "")
        )
        return Finding("fault", place, step + 1, ranks, kind, sentence)

    def _backward(self, step: int) -> tuple[str, tuple[int, ...]] | None:
        """Find the module that a backward reaches first whose output's gradient is off by more than a factor."""
        whole = self.base["steps"][step]
        reference = {key: {row.key: row for row in rows} for key, rows in rows_of(whole, 0, {}, {}).items()}
        own = []
        for rank in range(len(self.many.ranks)):
            step_ = self.many.step(rank, step)
            own.append(rows_of(step_, rank, _module_names(self.places[rank]), parts_of_rows(whole, step_)))
        order = sorted(
            reference,
            key=lambda key: min(r.back_order if r.back_order >= 0 else 1 << 30 for r in reference[key].values()),
        )
        scale: dict[tuple[int, str], float] = {}
        for key in order:
            wrong = []
            sums: dict[str, list[tuple[int, Tensor]]] = defaultdict(list)
            for rank, rows in enumerate(own):
                for row in rows.get(key, ()):
                    there = reference[key].get(row.key)
                    if there is None or row.back_tokens is None or there.back_tokens is None:
                        continue
                    theirs, mine = there.back_tokens, row.back_tokens
                    if row.features.shape != there.features.shape:
                        continue
                    if row.at is not None and len(mine) == len(row.at):
                        theirs = theirs[row.at]
                    if mine.shape != theirs.shape or float(theirs.norm()) == 0:
                        continue
                    sums[row.key].append((rank, mine))
                    factor = scale.get((rank, row.key))
                    if factor is None:
                        found = _factor(mine, theirs)
                        if found is not None:
                            scale[rank, row.key] = found
                        continue
                    if relative(mine, theirs * factor) > 1e-3:
                        wrong.append((rank, row.key, theirs))
            if wrong:
                added = all(
                    len(sums[key_]) > 1 and _factor(torch.stack([m for _, m in sums[key_]]).sum(0), theirs) is not None
                    for _, key_, theirs in wrong
                )
                if not added:
                    return key[0] or ".+", tuple(sorted({rank for rank, *_ in wrong}))
        return None

    def _unchanged(self, step: int, off: Off) -> bool:
        own = self.many.step(off.rank, step)
        name = next((n for n, p in self.places[off.rank].items() if p.name == off.name), off.name)
        return name in own["after"] and relative(vector(own["after"][name]), vector(own["before"][name])) < 1e-9

    def _stale(self, off: Off, last: dict[str, Any]) -> bool:
        entry = last.get(off.name)
        if entry is None or off.place is None or off.found is None or off.whole is None:
            return False
        before = part(entry, off.place)
        return relative(off.found, before) < 1e-2 or _factor(off.found - off.whole, before, 5e-2) is not None

    def _replicas_differ(self, step: int, off: Sequence[Off]) -> bool:
        by_name: dict[Any, list[Tensor]] = defaultdict(list)
        for o in off:
            if o.found is not None and o.place is not None:
                by_name[o.name, o.place.key].append(o.found)
        return any(relative(t, parts[0]) > 1e-4 for parts in by_name.values() for t in parts[1:])

    def _unreduced(self, step: int, off: Sequence[Off]) -> tuple[str, str] | None:
        """Recognise gradients that are some ranks' parts of a sum."""
        own: dict[Any, dict[int, Tensor]] = defaultdict(dict)
        wholes: dict[Any, Tensor] = {}
        for rank in range(len(self.many.ranks)):
            for name, entry in self.many.step(rank, step)["gradients"].items():
                place = self.places[rank].get(name)
                if place is not None and entry is not None and place.offset is None:
                    own[place.name, place.key][rank] = own_part(entry, place)
        for o in off:
            if o.place is not None and o.whole is not None:
                wholes[o.name, o.place.key] = o.whole
        words = set()
        for key, whole in wholes.items():
            parts = own[key]
            if len(parts) < 2:
                words.add("")
                continue
            distinct: list[Tensor] = []
            for t in parts.values():
                if all(relative(t, other) > 1e-4 for other in distinct):
                    distinct.append(t)
            if len(distinct) < 2:
                words.add("")
                continue
            total = torch.stack(distinct).sum(0)
            factor = _factor(total, whole)
            words.add("" if factor is None else "group" if 1 < len(distinct) < len(parts) else "sum")
        if words == {"sum"}:
            return "missing reduction", "each rank has its own part of the sum"
        if words and words <= {"sum", "group"}:
            return "wrong group", "groups of ranks have their own parts of the sum"
        return None

    def _of_another(self, step: int, off: Sequence[Off]) -> str | None:
        whole = self.base["steps"][step]["gradients"]
        for o in off[:4]:
            for name, entry in whole.items():
                if name == o.name or entry is None or o.found is None or not entry["norm"]:
                    continue
                if relative(o.found, vector(entry)) < 1e-3:
                    return name
        return None

    def _of_updates(self, step: int, off: list[Off]) -> Finding:
        ranks, place = ranks_of(off), common_name(off)
        alive = self.base["steps"][step]["after"]
        everywhere = len({o.name for o in off}) >= 0.9 * len(alive)
        if all(self._unchanged(step, o) for o in off):
            kind, why = "not updated", "the step leaves it as it was"
        else:
            states = [s for o in off for s in self._states(step, o)]
            if states:
                kind, why = "not restored", f"its {states[0]} differs"
            elif len(ranks) < len(self.many.ranks):
                kind, why = "stale value", "replicas differ"
            else:
                kind, why = "wrong scale", "the gradient is right and the step is not"
        if everywhere and kind in ("wrong scale", "not restored"):
            place = ".+"
        return Finding(
            "fault",
            place,
            step + 1,
            ranks,
            kind,
            f"step {step + 1} · {place}: the update differs on {these(ranks)}: {why}",
        )

    def _states(self, step: int, off: Off) -> list[str]:
        name = next((n for n, p in self.places[off.rank].items() if p.name == off.name), None)
        own = self.many.step(off.rank, step)["state"].get(name, {})
        whole = self.base["steps"][step]["state"].get(off.name, {})
        found = []
        for key, entry in whole.items():
            if key not in own or off.place is None:
                continue
            same = len(entry["shape"]) == len(self.base["steps"][step]["before"][off.name]["shape"]) and entry["shape"]
            mine = own_part(own[key], off.place) if same else vector(own[key])
            theirs = part(entry, off.place) if same else vector(entry)
            if relative(mine, theirs) > 1e-3:
                found.append(key)
        return found


# --- helpers


def _row_counts(step: dict[str, Any]) -> dict[str, int]:
    counted: dict[str, int] = defaultdict(int)
    seen = set()
    for call in step["calls"]:
        for given in call["inputs"].values():
            if given["ids"] is not None:
                if call["module"] in seen and not call["known"]:
                    continue
                for row in given["rows"]:
                    counted[row] += 1
                break
    return dict(counted)


def _labels(step: dict[str, Any]) -> dict[str, tuple[float, ...]]:
    """Map the hash of a row to the numbers that it is to predict, where rows and targets are as many."""
    calls = [
        next((given for given in call["inputs"].values() if given["ids"] is not None), None) for call in step["calls"]
    ]
    calls = [given for given in calls if given is not None]
    if not calls or len(calls) != len(step["targets"]):
        return {}
    found = {}
    for given, target in zip(calls, step["targets"], strict=True):
        rows, n = len(given["rows"]), len(target["flat"])
        if n % rows or n != torch.Size(target["shape"]).numel():
            return {}
        for number, key in enumerate(given["rows"]):
            found[key] = tuple(target["flat"][number * n // rows : (number + 1) * n // rows])
    return found


def _module_names(places: dict[str, Place]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, place in places.items():
        a, b = name.split(".")[:-1], place.name.split(".")[:-1]
        while a and b:
            found.setdefault(".".join(a), ".".join(b))
            if a[-1] != b[-1]:
                break
            a, b = a[:-1], b[:-1]
    return found


def _factor(found: Tensor, whole: Tensor, bound: float = 1e-3) -> float | None:
    """Return the factor between two tensors, if there is one for all elements."""
    size = float((whole.double() ** 2).sum())
    if found.shape != whole.shape or size == 0:
        return None
    factor = float((found.double() * whole.double()).sum()) / size
    return factor if factor and relative(found, whole * factor) < bound else None


def _near(value: float | None, n: int) -> bool:
    return value is not None and abs(value - n) < 1e-2 * n


def ranks_of(off: Iterable[Off]) -> tuple[int, ...]:
    return tuple(sorted({o.rank for o in off}))


def these(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def common_name(off: Sequence[Off]) -> str:
    """Return the name that differs, or the module that holds all that do."""
    names = list(dict.fromkeys(o.name for o in off))
    if len(names) == 1:
        return names[0]
    parts = [name.split(".") for name in names]
    shared = []
    for words in zip(*parts, strict=False):
        if len(set(words)) > 1:
            break
        shared.append(words[0])
    return ".".join(shared) or max(off, key=lambda o: o.error if o.error < float("inf") else 0.0).name


def _is_attention(name: str) -> bool:
    return any(word in part for part in name.lower().split(".")[-2:] for word in ("attn", "attention", "sdpa"))


def _is_position(name: str) -> bool:
    return any(word in name.lower() for word in ("pos", "rope", "rotary", "wpe"))
