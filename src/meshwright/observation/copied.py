"""Compare what scripts keep of a model's parameters beside them: a teacher, an average, weights of full precision."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from .diagnosis import Diagnosis
from .findings import FLOORS, SMALL, Finding, Off, ranks_of
from .traces import Place, Run, own_part, part, places_of, relative, vector

Held = dict[str, dict[str, Any]]
"""Name of a parameter -> what describes its numbers."""
Copy = dict[str, Any]
"""``owner``: how the script reaches it, "" where that is unknown; ``held``: its numbers."""
NOTHING: Copy = {"owner": "", "held": {}}
Key = tuple[int, int, str]
"""A step, a copy's number and a parameter."""


class Copied:
    """The copies of one process and of many ranks. A copy has no name: it is the one that is nearest.

    Args:
        base: the trace of one process.
        many: the run that is compared with it, aligned.
        places: by rank, where its parameters are.
        noisy: runs of one process with noise.
    """

    def __init__(self, base: dict[str, Any], many: Run, places: Sequence[Mapping[str, Place]], noisy: Sequence[Run]):
        self.many, self.places = many, places
        self.whole: list[list[Copy]] = []
        """By step, one process's copies; one has the same number in all steps."""
        for step in base["steps"]:
            self.whole.append(_in_order(step["copies"], self.whole[-1] if self.whole else [], _apart))
        self.first = base["steps"][0]["before"]
        self.noise: dict[Key, float] = defaultdict(float)
        for run in noisy:
            at = places_of(base, run.ranks[0])
            for step, whole in enumerate(self.whole):
                for n, copy in enumerate(_of_rank(run.step(0, step)["copies"], whole, at)):
                    for name, place in _shared(copy, whole[n], at):
                        error = relative(vector(copy["held"][name]), vector(whole[n]["held"][place.name]))
                        self.noise[step, n, place.name] = max(error, self.noise[step, n, place.name])

    def off(self, step: int, everywhere: bool = True) -> list[tuple[Off, int]]:
        """List the parts of copies, and the copies' numbers, that differ.

        Args:
            everywhere: whether no rank that holds the part has it right, since one rank may keep a copy for all.
        """
        found: dict[Any, list[tuple[Off, int]]] = defaultdict(list)
        whole = self.whole[step] if step < len(self.whole) else []
        for rank, places in enumerate(self.places):
            for n, copy in enumerate(_of_rank(self.many.step(rank, step)["copies"], whole, places)):
                last, whole_now = self._last(step, n), whole[n]["held"]
                for name, place in _shared(copy, whole[n], places):
                    if place.name not in last or last[place.name]["shape"] != whole_now[place.name]["shape"]:
                        continue  # a teacher may have a student's names and be wider
                    mine, theirs = own_part(copy["held"][name], place), part(whole_now[place.name], place)
                    moved, size = float((theirs - part(last[place.name], place)).norm()), float(theirs.norm())
                    error = float((mine - theirs).norm()) if mine.shape == theirs.shape else float("inf")
                    least = max(1e-6, FLOORS * self.noise[step, n, place.name]) * size
                    is_off = len(mine) and moved > 0 and error > max(least, SMALL * moved)
                    off = Off(place.name, rank, mine, theirs, error / max(size, 1e-300) if is_off else 0.0, place)
                    found[n, place.name, place.key].append((off, n))
        wanted = all if everywhere else any
        if everywhere and len(self.many.ranks) < self.many.ranks[0].get("world", 0):
            return []  # that of a rank which never steps may be right
        differing = [replicas for replicas in found.values() if wanted(o.error for o, _ in replicas)]
        return [(o, n) for replicas in differing for o, n in replicas if o.error]

    def is_read(self, step: int, off: Sequence[tuple[Off, int]]) -> bool:
        """Return whether a file was read before the copies were seen, as the next step began."""
        return any("after" in self.many.step(o.rank, step)["loaded"] for o, _ in off)

    def finding(self, diagnosis: Diagnosis, step: int, off: Sequence[tuple[Off, int]]) -> Finding:
        """Describe the parts that differ.

        Args:
            diagnosis: of the step, or of the next one if a file was read between them.
        """
        names, number, ranks = {o.name for o, _ in off}, off[-1][1], ranks_of(o for o, _ in off)
        copy = self.whole[step][number]
        whole = copy["held"]
        owners, are_short = [], []  # by rank; whether numbers are those of 16 bits where one process's are not
        for rank in ranks:
            own = _of_rank(self.many.step(rank, step)["copies"], self.whole[step], self.places[rank])[number]
            pairs = [(own["held"][name], whole[at.name]) for name, at in _shared(own, copy, self.places[rank])]
            owners.append(own["owner"])
            are_short.append(any(not b["fits"] for _, b in pairs) and all(a["fits"] or b["fits"] for a, b in pairs))
        owner = owners[0] or copy["owner"]
        place = ".".join(filter(None, [owner, off[-1][0].name if len(names) < 0.8 * len(whole) else ""])) or ".+"
        kind, why = "wrong scale", ""
        if any(map(diagnosis.resume.reads, ranks)):
            worst = max((o for o, _ in off), key=lambda o: o.error)
            kind = diagnosis.resume.kind(ranks, [whole[worst.name]["norm"]])
            why = "it was right before the run was resumed"
        elif any(are_short):
            kind, why = "rounding/dtype", "its numbers are those of 16 bits"
        elif all(relative(o.found, part(self._last(step, n)[o.name], o.place)) < 1e-6 for o, n in off):  # type: ignore[arg-type]
            is_late = step and len(ranks) == sum(bool(one["after"]) for one in self.many.at(step))
            kind, why = ("stale value" if is_late else "not updated"), "it is what one process had after the last step"
        return diagnosis.finding(place, ranks, kind, why, "what is kept of the parameters, such as an average, differs")

    def _last(self, step: int, number: int) -> Held:
        """Return what a copy of one process was after the step before; the first parameters where there was none."""
        last = self.whole[step - 1] if step else []
        return last[number]["held"] if number < len(last) and last[number]["held"] else self.first


def _of_rank(copies: Sequence[Copy], whole: Sequence[Copy], places: Mapping[str, Place]) -> list[Copy]:
    """Put a rank's copies in the order of one process's; an empty one where there is none."""

    def apart(own: Copy, other: Copy) -> float:
        shared = list(_shared(own, other, places))
        pairs = [(own_part(own["held"][name], at), part(other["held"][at.name], at)) for name, at in shared]
        return sum(float((a - b).norm()) ** 2 for a, b in pairs) if pairs else float("inf")

    return _in_order(copies, whole, apart)[: len(whole)]


def _apart(one: Copy, other: Copy) -> float:
    a, b = one["held"], other["held"]
    return sum(float((vector(a[n]) - vector(b[n])).norm()) ** 2 for n in a) if a.keys() == b.keys() else float("inf")


def _in_order(copies: Sequence[Copy], others: Sequence[Copy], apart: Callable[[Copy, Copy], float]) -> list[Copy]:
    """Put each copy where the one is that it is nearest to, and those that are nearest to none at the end."""
    pairs = sorted((apart(a, b), n, m) for (n, a), (m, b) in product(enumerate(copies), enumerate(others)))
    at: dict[int, int] = {}
    for distance, n, m in pairs:
        if distance < float("inf") and n not in at.values() and m not in at:
            at[m] = n
    found = [copies[at[m]] if m in at else NOTHING for m in range(len(others))]
    return found + [copy for n, copy in enumerate(copies) if n not in at.values()]


def _shared(own: Copy, whole: Copy, places: Mapping[str, Place]) -> Iterator[tuple[str, Place]]:
    """Go through the names in a rank's copy whose parts are in one process's."""
    for name, entry in own["held"].items():
        place = places.get(name)
        if place is None or place.name not in whole["held"] or (place.offset is not None and place.dim is None):
            continue
        size = whole["held"][place.name]["shape"] if place.dim is None else [len(place.index)]  # type: ignore[arg-type]
        if size == (entry["shape"] if place.dim is None else [entry["shape"][place.dim]]):
            yield name, place  # else such as a whole one beside shards
