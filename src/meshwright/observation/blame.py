"""Say where a run first differs from another: the step, the place, the ranks, and what kind of fault that is.

Whether two runs differ is decided by what an optimizer saw and left: gradients, parameters, states. The outputs of
modules and the gradients that came back to them say where a difference arises; they may differ in a sound run too
(partial sums that are added up later, sums of a loss in place of means).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from statistics import median
from typing import Any

import torch
from torch import Tensor

from meshwright.core.errors import ConfigError

from .copied import Copied
from .diagnosis import Diagnosis
from .findings import FLOORS, SMALL, Finding, Off, is_router, ranks_of
from .groups import sums_a_copy
from .passes import ROUNDING, Passes, factor, is_one
from .row_kinds import owned_tables
from .settings import other_rates, wrong_draws
from .traces import (
    NOTHING,
    Place,
    Run,
    begins_alike,
    first_step,
    is_along,
    left_to_next_turn,
    of_rounding,
    own_part,
    part,
    places_in,
    places_of,
    relative,
    rows_given,
    steps_away,
    usual,
    vector,
)

MOST_NOISE = 0.1
"""Relative error of an output that noise of the size of rounding cannot make."""
SHARE = 0.25
"""Of a gradient's number, by which rounding in 16 bits may change it, where its sum leaves little."""
MANY = 8
"""Numbers that one process moves and a rank leaves to the bit, where that is no luck of rounding."""

Entry = tuple[int, Place, dict[str, Any] | None, dict[str, Any]]
"""A rank, a place, what the rank has there, what one process has there."""


class Blame:
    """The comparison of a run with one process.

    Args:
        one: the trace of one process.
        many: the run that is judged.
        noisy: traces of one process with noise of the size of rounding.

    Raises:
        ConfigError: ``one`` is a trace of several processes, or a rank of ``many`` has another model.
    """

    def __init__(self, one: Run, many: Run, noisy: Sequence[Run] = ()):
        if len(one.ranks) > 1:
            raise ConfigError(
                f"{one.folder} is a trace of {len(one.ranks)} processes: blame takes that of one process first, then"
                f" the run to be judged"
            )
        self.many = many = many.aligned(one.ranks[0])
        self.base = left_to_next_turn(one.ranks[0], many) if many.turns else one.ranks[0]
        self.n_steps = min(one.n_steps, many.n_steps)
        self.places = [places_of(self.base, trace) for trace in many.ranks]
        self.shapes = [  # of parameters as they were placed
            {name: entry["shape"] for step in reversed(trace["steps"]) for name, entry in step["before"].items()}
            for trace in many.ranks
        ]
        held = [trace["steps"][first_step(trace)]["before"] for trace in many.ranks]
        for rank, (names, placed) in enumerate(zip(held, self.places, strict=True)):
            if not placed:
                why = f"none of the {len(names)} parameters of rank {rank} is one of {one.folder}'s: observe the same"
                why += " script, with the same model and seed, in both"
                if any(0 in entry["shape"] for entry in names.values()):
                    why = f"rank {rank}'s parameters hold no numbers between the passes of a step, as under DeepSpeed's"
                    why += " ZeRO 3: observe it with a lower stage"
                raise ConfigError(f"{many.folder}: {why}")
        whole = self.base["steps"][0]["before"].keys()
        found = {place.name for placed in self.places for place in placed.values()}
        for rank, names in enumerate(held):  # values may be those of another parameter, which this rank lacks
            alone = {
                name: Place(name)
                for name in names.keys() & whole - found
                if names[name]["shape"] == self.base["steps"][0]["before"][name]["shape"]
            }
            self.places[rank] |= alone
        found |= {place.name for placed in self.places for place in placed.values()}
        unplaced = set().union(*(names.keys() - placed for names, placed in zip(held, self.places, strict=True)))
        self.unknown = tuple(sorted(unplaced | (whole - found))) if whole - found else ()
        self.is_short = any(step["short"] for trace in (self.base, *many.ranks) for step in trace["steps"])
        """Whether some of the model computes in 16 bits."""
        counts = sorted({len(trace["steps"]) for trace in (*many.ranks, self.base)})
        self.counts = f"; not all took as many steps: {counts[0]} to {counts[-1]}" if len(counts) > 1 else ""
        if len(many.ranks) < (world := many.ranks[0].get("world", 0)):
            self.counts += f"; of {world} ranks the first {len(many.ranks)} step"
        if self.base["others"]:
            self.counts += f"; several models are trained: names of others begin with {', '.join(self.base['others'])}"
        if any(trace["cut"] for trace in (self.base, *many.ranks)):
            self.counts += "; compiled graphs were cut at modules: observe --parameters-alone leaves them whole"
        for run in noisy:
            self._check_again(one, run)
        self.copied = Copied(self.base, many, self.places, noisy)
        self.floors: dict[tuple[int, str, str], float] = defaultdict(float)
        for run in noisy:
            for step in range(min(self.n_steps, run.n_steps)):
                a, b = self.base["steps"][step], run.step(0, step)
                for stage in ("gradients", "after", "left"):
                    for name, entry in a.get(stage, {}).items():
                        other = b.get(stage, {}).get(name)
                        if entry is not None and other is not None:
                            error = relative(vector(other), vector(entry))
                            self.floors[step, stage, name] = max(error, self.floors[step, stage, name])

    def _check_again(self, one: Run, again: Run) -> None:
        """Refuse a script that does not do the same twice in one process."""
        run = again.aligned(self.base)
        places = [places_of(self.base, run.ranks[0])]
        passes = Passes(self.base, run, places, 0)
        output = passes.first_output()
        before, own = self.base["steps"][0]["before"], run.step(0, 0)["before"]
        drawn = [
            place.name
            for name, place in places[0].items()
            if name in own and relative(own_part(own[name], place), part(before[place.name], place)) > 1e-3
        ]
        what = f"{drawn[0]} begins with other values" if drawn else ""
        if not what and passes.wrong_rows() is not None:
            what = "the first step has other rows"
        if not what and output is not None and median(pair.error for pair in output[1]) > MOST_NOISE:
            what = f"outputs of {output[0] or 'the model'} differ in the first step"
        if what:
            runs = f"{one.folder} and {again.folder} are two runs of one process and not the same"
            raise ConfigError(f"{runs}: {what}. Seed what the script draws, and observe anew")

    def judge(self) -> Finding:
        """Find the first difference."""
        found = self._first()
        words = found.words + self.counts
        if self.unknown:
            names = ", ".join(self.unknown[:4])
            more = f" and {len(self.unknown) - 4} more" if len(self.unknown) > 4 else ""
            words += f"; not compared, since their place in one process is unknown: {names}{more}"
        return replace(found, words=words, unknown=self.unknown)

    def _first(self) -> Finding:
        if off := self._initial():
            return self._at(0).of_beginning(off)
        if (idle := self._never_stepped()) is not None:
            return self._at(0).finding(*idle, "not updated", "no optimizer steps it", "it has gradients")
        for step in range(self.n_steps):
            if alone := self._steps_alone(step):
                names = {place.name for rank in alone for place in self.places[rank].values()}
                return self._at(step).of_missing(names, alone, "it is updated, and others leave the update out")
            if away := self._left_out(step):
                resume = self._at(step).resume
                kind = resume.kind(away, [], ["scale"]) if all(map(resume.reads, away)) else "not updated"
                return self._at(step).finding(".+", away, kind, "", "no step is taken")
            steps = [len(trace["steps"]) for trace in self.many.ranks]
            # weights that a rank is given after it has left are no step's
            leaves = [step + 1 == n < max(steps) for n in steps]
            left = [[o for o in self._parameters(stage, step) if not leaves[o.rank]] for stage in ("after", "left")]
            gradients = self._gradients(step)
            if (gradients or left[0]) and (owned := self.owned[step]):
                *left, gradients = ([o for o in off if o.name not in owned] for off in (*left, gradients))
            moved = self._between(step) if step and (gradients or left[0]) else []
            if moved:  # without a difference in the step it was noted earlier or later, no more
                return self._at(step).of_beginning(moved)
            if any(one["draws"] for one in self.many.at(step)):
                diagnosis = self._at(step)
                earlier = [(self.base["steps"][s], self.many.at(s)) for s in range(step)]
                if (wrong := wrong_draws(diagnosis.passes, earlier)) is not None:
                    place, ranks, why = wrong
                    return diagnosis.finding(place or ".+", ranks, "seed", why, "random numbers differ")
            after = left[1] if self._has_left(step) else left[0]
            if gradients and not after and self._may_differ(step, gradients):
                gradients = []
            if not gradients and not (after and (left[0] or step + 1 == self.n_steps)):
                if self.is_short and (shorter := self._at(step).passes.first_shorter()) is not None:
                    return self._at(step).of_output(*shorter)  # in 16 bits where one process is not
                if copied := self.copied.off(step):
                    seen = min(step + self.copied.is_read(step, copied), self.n_steps - 1)
                    return self.copied.finding(self._at(seen), step, copied)
                continue
            if step and (copied := self.copied.off(step - 1, everywhere=False)):
                return self.copied.finding(self._at(step - 1), step - 1, copied)
            diagnosis = self._at(step)
            if (whole := self.base["steps"][step])["unseen"] and not whole["calls"]:
                raise ConfigError(
                    f"step {step + 1} differs in {len({o.name for o in (*gradients, *after)})} parameters, but its"
                    f" passes run inside torch.func, where neither rows nor noise of single ranks are seen: no verdict"
                )
            if not step and diagnosis.passes.wrong_rows() and (again := self._reads_again()) is not None:
                if again == (self.n_steps, ()):
                    return self._without_twin(step)
                return self._at(again[0]).finding(".+", again[1], "wrong rows", "rows are read again")
            is_others = diagnosis.passes.other_batches() and not sums_a_copy(diagnosis.passes, "forward")
            if is_others and self._is_small(step, gradients, after):
                continue
            found = diagnosis.place([] if self._is_in_update(step, gradients, after) else gradients, after)
            is_drawn = any(self._drawn(rank, step, "drawn") for rank in range(len(self.many.ranks)))
            return self._without_twin(step) if diagnosis.is_vague and is_drawn else found
        n = len(self.base["steps"][0]["before"])
        counts = (self.n_steps, "step"), (n, "parameter"), (len(self.many.ranks), "process")
        of = ", ".join(f"{n} {word}" + ("es" if word == "process" else "s") * (n > 1) for n, word in counts)
        return Finding("sound", words=f"equal up to rounding ({of})")

    def _never_stepped(self) -> tuple[str, list[int]] | None:
        """Find a parameter that has gradients and no optimizer, where one process has none: its name, the ranks."""

        def left_out(step: dict[str, Any]) -> list[str]:
            entries = step["gradients"].items() if step["rates"] else ()
            return [name for name, entry in entries if entry and entry["norm"] and name not in step["rates"]]

        found = defaultdict(list)
        for rank, placed in enumerate(self.places):
            every = [self.many.step(rank, step)["before"] for step in range(self.n_steps)]
            for name in left_out(self.many.step(rank, 0)):
                values = [before[name] for before in every if name in before]
                if name not in placed and all(torch.equal(vector(v), vector(values[0])) for v in values):
                    found[name].append(rank)
        if not found or left_out(self.base["steps"][0]) or self.n_steps < 2:
            return None
        return list(found.items())[-1]

    def _reads_again(self) -> tuple[int, tuple[int, ...]] | None:
        """Find the first step, and the ranks, that read rows more often than one process does in all its steps.

        Returns (number of steps, no ranks) if none does, None if rows are lacking or nobody else's.
        """
        every = [Passes(self.base, self.many, self.places, step).counts() for step in range(self.n_steps)]
        theirs: Counter[str] = sum((whole for whole, _ in every), Counter())
        mine: Counter[str] = Counter()
        whole, first = every[0]
        own = [set(counts) for counts in first if counts]
        are_others = own and all(2 * len(rows - theirs.keys()) > len(rows) for rows in own)
        if are_others or self._draw_rows(whole, first, theirs):
            again = tuple(rank for rank, counts in enumerate(first) if counts and counts in first[:rank])
            return (0, again) if again and len(set().union(*own)) < len(whole) else (self.n_steps, ())
        for step, (_, ranks) in enumerate(every):
            found = []
            for rank, counts in enumerate(ranks):
                mine += counts if counts not in ranks[:rank] else Counter()
                if counts.keys() - theirs.keys():
                    return None
                found += [rank] if any(mine[row] > theirs[row] for row in counts) else []
            if found:
                return step, tuple(found)
        return (self.n_steps, ()) if theirs == mine else None

    def _draw_rows(self, whole: Counter[str], own: list[Counter[str]], known: Counter[str]) -> bool:
        """Return whether ranks that share the first step's rows out have others because they draw other numbers."""
        strange = [rank for rank, counts in enumerate(own) if counts.keys() - whole.keys()]
        are_new = not any(own[rank].keys() & (known.keys() - whole.keys()) for rank in strange)  # and not shuffled
        kinds = ("drawn", "chosen") if are_new else ("drawn",)
        are_drawn = bool(strange) and all(self._drawn(rank, 0, *kinds) for rank in strange)
        return are_drawn and sum(own, Counter()).total() == whole.total()

    def _drawn(self, rank: int, step: int, *kinds: str) -> set[str]:
        """Return the states from which a rank drew numbers outside of models up to a step, and one process did not."""
        runs = self.base["steps"][: step + 1], [self.many.step(rank, n) for n in range(step + 1)]
        whole, own = ({state for one in steps for kind in kinds for state in one[kind]} for steps in runs)
        return own - whole

    def _without_twin(self, step: int) -> Finding:
        """Compare ranks with each other, where their steps have rows that no step of one process has."""
        for later in range(step, self.n_steps):
            held: dict[Any, list[tuple[int, Place, Tensor]]] = defaultdict(list)
            for rank, place, entry, _ in self._entries("left" if self._has_left(later) else "after", later):
                if entry is not None:
                    held[place.name, place.key].append((rank, place, own_part(entry, place)))
            off = [
                Off(place.name, rank, mine, replicas[0][2], relative(mine, replicas[0][2]), place)
                for replicas in held.values()
                if any(relative(mine, replicas[0][2]) > 1e-5 for _, _, mine in replicas)
                for rank, place, mine in replicas
            ]
            if off:
                return self._at(later).of_missing({o.name for o in off}, ranks_of(off), "ranks have different copies")
            first, *rest = (one.get("buffers", {}) for one in self.many.at(later))
            for name, entry in first.items():
                errors = [relative(vector(other[name]), vector(entry), 1e-6) for other in rest if name in other]
                if "running_" not in name and max(errors, default=0.0) > 1e-3:
                    ranks = range(len(self.many.ranks))
                    return self._at(later).finding(name, ranks, "missing reduction", "", "ranks have different buffers")
        words = f"rows, or random numbers, are others from step {step + 1} on; so ranks were compared with each other"
        return Finding("sound", words=f"{words}: they agree")

    def _is_small(self, step: int, gradients: list[Off], after: list[Off]) -> bool:
        """Return whether differences are as small as other batches make in a loss that is no sum over rows."""
        if any(o.error > (3 * SMALL if is_router(o.name) else SMALL) for o in gradients):
            return False
        for o in after:
            assert o.place is not None and o.whole is not None and o.found is not None
            moved = o.whole - part(self.base["steps"][step]["before"][o.name], o.place)
            share = 3 * SMALL if is_router(o.name) else SMALL
            if float((o.found - o.whole).norm()) > share * float(moved.norm()):
                return False
        worst = max(gradients, key=lambda o: o.error, default=None)
        if worst is None or not is_router(worst.name):
            return False
        return None in [factor(o.found, o.whole) for o in gradients if o.found is not None and o.whole is not None]

    def _steps_alone(self, step: int) -> list[int]:
        """List the ranks that step where one process and other ranks leave the update out and go on to other rows."""
        now, later = map(rows_given, [*self.base["steps"], NOTHING][step : step + 2])
        found = [rank for rank, one in enumerate(self.many.at(step + 1)) if rows_given(one) & now - later]
        n_calls = [len(one["calls"]) for one in self.many.at(step)]
        most = max((n_calls[rank] for rank in found), default=0)
        rest = [n for rank, n in enumerate(n_calls) if rank not in found]
        return found if rest and min(rest) > most else []

    def _left_out(self, step: int) -> list[int]:
        """List the ranks that take no step here and go on later, from other parameters than the rest."""
        found = []
        for rank, trace in enumerate(self.many.ranks):
            if self.many.turns or step not in steps_away(trace["steps"]):
                continue
            back = next(n for n in range(step, len(trace["steps"])) if trace["steps"][n] is not NOTHING)
            there = zip(self.many.at(step), self.many.at(back), strict=True)
            others = [later for one, later in there if one["after"]]
            if not any(begins_alike(trace["steps"][back], other) for other in (self.base["steps"][back], *others)):
                found.append(rank)
        return found

    def _has_left(self, step: int) -> bool:
        return all("left" in one for one in (self.base["steps"][step], *self.many.at(step)) if one["after"])

    def _may_differ(self, step: int, gradients: list[Off]) -> bool:
        """Return whether equal weights may come of other gradients.

        A rate makes up for a sum in place of a mean; weights are averaged in the place of gradients, which no factor
        makes equal then; or an update by hand reduces and scales what it was given.
        """
        rates, _ = other_rates(Passes(self.base, self.many, self.places, step), range(len(self.many.ranks)))
        pairs = [(o.found, o.whole) for o in gradients if o.whole is None or len(o.whole) > 1]
        averaged = bool(pairs) and all(f is not None and w is not None and factor(f, w) is None for f, w in pairs)
        return self._by_hand(step) or averaged or bool(rates)

    @cached_property
    def owned(self) -> list[set[str]]:
        """By step, the tables of which each rank steps rows of its own."""
        every = [Passes(self.base, self.many, self.places, step) for step in range(self.n_steps)]
        stages = "gradients", "before", "after"
        return owned_tables(every, lambda n: [[e for e in self._entries(stage, n) if e[2]] for stage in stages])

    def _by_hand(self, step: int) -> bool:
        return not any(rates for one in self.many.at(step) for rates in one["rates"].values())

    def _is_in_update(self, step: int, gradients: list[Off], after: list[Off]) -> bool:
        """Return whether an update by hand, which may reduce and scale what it is given, differs beyond that.

        Gradients differed in the last step, too, and weights did not; or a parameter whose gradient differs is updated
        as in one process; or one factor lies between all of them, and neither that nor none between updates.
        """
        if not self._by_hand(step) or not after:
            return False
        differ = {o.name for o in gradients} - {o.name for o in after}
        for _, place, entry, whole in self._entries("after", step):
            if place.name in differ and entry is not None:
                begun = part(self.base["steps"][step]["before"][place.name], place)
                if relative(own_part(entry, place) - begun, part(whole, place) - begun) < 2 * SMALL:
                    return True
        if step and self._gradients(step - 1):
            return True
        scales = [factor(o.found, o.whole) if o.found is not None and o.whole is not None else None for o in gradients]
        before = [part(self.base["steps"][step]["before"][o.name], o.place) for o in after if o.place]
        moves = [(o.found - was, o.whole - was) for o, was in zip(after, before, strict=True)]  # type: ignore[operator]
        likely = (1.0, scales[0] if is_one(scales) else 1.0)
        return is_one(scales) and any(min(relative(a, w * f) for f in likely) > 2 * SMALL for a, w in moves)  # type: ignore[operator]

    # --- what differs

    def _bound(self, step: int, stage: str, name: str, dtype: str) -> float:
        least = 2 * ROUNDING["bfloat16"] if self.is_short else ROUNDING.get(dtype, 5e-5)
        return max(least, FLOORS * self.floors[step, stage, name])

    def _initial(self) -> list[Off]:
        """List the parameters that differ before the first step.

        Those that begin at a multiple of their values are left out, if all modules give the same for all that.
        """
        off = self._blocks("before", 0, 0.0)
        for rank, place, entry, whole in self._entries("before", 0):
            assert entry is not None
            mine, theirs = own_part(entry, place), part(whole, place)
            error = relative(mine, theirs)
            if error > ROUNDING.get(entry["dtype"], 5e-5) and len(mine):
                off.append(Off(place.name, rank, mine, theirs, error, place))
        if not off or any(o.found is None or o.whole is None or not factor(o.found, o.whole) for o in off):
            return off
        passes, names = Passes(self.base, self.many, self.places, 0), {o.name for o in off}
        roots = {pair.rank for pair in passes.pairs(("", 1))}
        others = [{key: p for key, p in held.items() if p.name not in names} for held in self.places]
        if len(roots) < len(others) or not all(others) or passes.first_output() is not None:
            return off
        self.unknown, self.places = tuple(sorted({*self.unknown, *names})), others
        return []

    def _at(self, step: int) -> Diagnosis:
        return Diagnosis(self.base, self.many, self.places, step)

    def _entries(self, stage: str, step: int, in_blocks: bool = False) -> Iterator[Entry]:
        """Go through what ranks have and one process has, too: parts that are a run along one dim, or the others."""
        whole = self.base["steps"][step].get(stage, {})
        for rank, places in enumerate(self.places):
            for name, entry in self.many.step(rank, step).get(stage, {}).items():
                if (place := places.get(name)) is None or place.name not in whole:
                    continue
                now = "left" if stage == "left" else "before"
                held = self.many.step(rank, step)[now].get(name, entry)
                if held is not None and held["shape"] != self.shapes[rank].get(name):  # cut anew since
                    place = places_in({name: held}, self.base["steps"][step][now]).get(name)
                    if place is None or place.name not in whole:
                        continue
                if place.offset is not None if in_blocks else place.offset is None or place.dim is not None:
                    yield rank, place, entry, whole[place.name]

    def _gradients(self, step: int) -> list[Off]:
        whole = self.base["steps"][step]["gradients"]
        total = sum(entry["norm"] ** 2 for entry in whole.values() if entry) ** 0.5
        found = self._blocks("gradients", step, total)
        stepped = [
            {placed[name].name for name in self.many.step(rank, step)["rates"] if name in placed}
            for rank, placed in enumerate(self.places)
        ]
        partial: dict[Any, list[tuple[int, Place, Tensor, Tensor]]] = defaultdict(list)
        for rank, place, entry, reference in self._entries("gradients", step):
            if place.name not in stepped[rank]:
                continue
            if entry and reference and any(kind.startswith("P") for kind in entry["placements"]):
                values = own_part(entry, place), part(reference, place)
                partial[place.name, place.key].append((rank, place, *values))
                continue
            if entry is None or reference is None:
                known, mine = entry or reference, own_part(entry, place) if entry else None
                theirs = part(reference, place) if reference else None
                has_some = theirs is None or len(theirs)
                if has_some and known and known["norm"] > 1e-7 * total:
                    found.append(Off(place.name, rank, mine, theirs, float("inf"), place))
                continue
            mine, theirs = own_part(entry, place), part(reference, place)
            share = (len(theirs) / max(1, sum(map(len, reference["m"])))) ** 0.5
            every = [known["norm"] for one in self.base["steps"] if (known := one["gradients"].get(place.name))]
            error = relative(mine, theirs, share * max(1e-6 * total, 0.1 * usual(every)))  # less is what cancelled
            if error > self._bound(step, "gradients", place.name, entry["dtype"]) and len(mine):
                found.append(Off(place.name, rank, mine, theirs, error, place))
        for parts in partial.values():  # DTensors of which ranks have parts of a sum
            mine, theirs = torch.stack([own for _, _, own, _ in parts]).sum(0), parts[0][3]
            error = relative(mine, theirs, 1e-6 * total)
            if error > self._bound(step, "gradients", parts[0][1].name, "float32"):
                found += [Off(place.name, rank, own, theirs, error, place) for rank, place, own, _ in parts]
        return found

    def _even(self, rank: int, step: int, place: Place) -> Tensor | None:
        """Return where a parameter's gradients have agreed so far: Adam makes a step's size of what is rounding."""
        name = next((own for own, other in self.places[rank].items() if other == place), "")
        even = None
        for number in range(step + 1):
            own = self.many.step(rank, number)["gradients"].get(name)
            whole = self.base["steps"][number]["gradients"].get(place.name)
            if own is None or whole is None:
                return None
            mine, theirs = own_part(own, place), part(whole, place)
            if relative(mine, theirs) > self._bound(number, "gradients", place.name, own["dtype"]):
                return None  # it is no rounding
            now = (mine - theirs).abs() <= SHARE * theirs.abs()
            even = now if even is None or len(even) != len(now) else even & now
        return even if even is not None and bool(even.any()) else None

    def _parameters(self, stage: str, step: int) -> list[Off]:
        """List the parameters whose change in the step differs."""
        found = self._blocks(stage, step, 0.0)
        used: list[set[str]] = []  # those that a rank steps, has new gradients of, or calls the modules of
        for rank, placed in enumerate(self.places):
            own = self.many.step(rank, step)
            last = self.many.step(rank, step - 1)["gradients"] if step else {}
            called = {event["module"] for event in own["forward"]}
            used.append(
                {
                    placed[name].name
                    for name in own["before"].keys() & placed.keys()
                    if name in own["rates"]
                    or ((entry := own["gradients"].get(name)) and entry["norm"] != (last.get(name) or {}).get("norm"))
                    or name.rpartition(".")[0] in called
                }
            )
        begun = {
            (rank, place.name, place.key): own_part(entry, place)
            for rank, place, entry, _ in self._entries("before", 0)
            if entry is not None
        }
        noise = of_rounding(self.base["steps"][: step + 1])
        for rank, place, entry, reference in self._entries(stage, step):
            if place.name not in used[rank]:
                continue
            assert entry is not None
            before = part(self.base["steps"][step]["before"][place.name], place).double()
            mine, theirs = own_part(entry, place).double(), part(reference, place).double()
            size = float(theirs.norm())
            off = float((mine - theirs).norm()) if mine.shape == theirs.shape else float("inf")
            moved = float((theirs - before).norm())
            if place.name in noise and off <= 4 * (step + 1) * moved:
                continue
            if self.is_short and off < float("inf") and (even := self._even(rank, step, place)) is not None:
                off, moved = float((mine - theirs)[even].norm()), float((theirs - before)[even].norm())
            floor = FLOORS * self.floors[step, stage, place.name] * size
            # Adam divides gradients that are nothing but rounding by their own size
            share = SMALL if self.is_short else 0.02
            least = 2 * ROUNDING[entry["dtype"]] if entry["dtype"] in ("bfloat16", "float16") else 1e-6
            along = not self.is_short and off > max(5e-7 * size, floor)
            stood = begun.get((rank, place.name, place.key))
            is_idle = self.is_short and stood is not None and torch.equal(stood.double(), mine)
            if is_idle:  # no rounding leaves every number where it was and moves many of one process's
                first = part(self.base["steps"][0]["before"][place.name], place).double()
                is_idle = int((first != theirs).sum()) >= MANY * len(reference["m"]) and 4 * moved > floor
            if (
                off > max(least * size, floor, share * moved)
                or (along and is_along(mine - theirs, before, theirs - before))
                or is_idle
            ):
                found.append(Off(place.name, rank, mine, theirs, off / max(size, 1e-300), place))
        return found

    def _blocks(self, stage: str, step: int, total: float) -> list[Off]:
        """Compare the tensors whose blocks are cut along several dims: their marginals add up to the whole's."""
        found = []
        blocks: dict[str, dict[Any, list[tuple[int, dict[str, Any]]]]] = defaultdict(lambda: defaultdict(list))
        for rank, place, entry, whole in self._entries(stage, step, in_blocks=True):
            if entry is not None and whole is not None:
                blocks[place.name][place.offset].append((rank, entry))
        for name, parts in blocks.items():
            whole = self.base["steps"][step][stage][name]
            for replica in range(max(map(len, parts.values()))):
                sums = [torch.zeros_like(m, dtype=torch.float64) for m in whole["m"]]
                chosen = {offset: entries[min(replica, len(entries) - 1)] for offset, entries in parts.items()}
                for offset, (_, entry) in chosen.items():
                    for dim, m in enumerate(entry["m"]):
                        at = 0 if "part" in entry else offset[dim]
                        sums[dim][at : at + len(m)] += m.double()
                mine, theirs = torch.cat(sums), vector(whole).double()
                error = relative(mine, theirs, 1e-6 * total)
                bound = self._bound(step, stage, name, whole["dtype"])
                if stage in ("after", "left"):
                    moved = float((theirs - vector(self.base["steps"][step]["before"][name]).double()).norm())
                    size = max(float(theirs.norm()), 1e-300)
                    share = SMALL if self.is_short else 0.02
                    bound = max(1e-6, FLOORS * self.floors[step, stage, name], share * moved / size)
                if error > bound:
                    found += [Off(name, rank, mine, theirs, error, Place(name)) for rank, _ in chosen.values()]
        return found

    def _between(self, step: int) -> list[Off]:
        """List the parameters that changed between two steps, without an optimizer."""
        off = []
        for rank, place, now, one_now in self._entries("before", step):
            name = next((name for name, other in self.places[rank].items() if other is place), "")
            last = self.many.step(rank, step - 1)["after"]
            one_last = self.base["steps"][step - 1]["after"].get(place.name)
            if one_last is None or now is None:
                continue
            mine, theirs = own_part(now, place), part(one_now, place)
            if not last and relative(mine, theirs) > max(1e-3, self._bound(step - 1, "left", place.name, now["dtype"])):
                off.append(Off(place.name, rank, mine, theirs, relative(mine, theirs), place))  # the rank joins
            if (last := last.get(name)) is None or not len(mine) or len(last["m"]) != len(now["m"]):
                continue
            moved = relative(mine, own_part(last, place)), relative(theirs, part(one_last, place))
            least = max(1e-6, FLOORS * self.floors[step - 1, "left", place.name])
            right = relative(own_part(last, place), part(one_last, place)) <= least
            if max(moved) > 1e-6 and right and relative(mine, theirs) > least:
                off.append(Off(place.name, rank, mine, theirs, relative(mine, theirs), place))
        return off
