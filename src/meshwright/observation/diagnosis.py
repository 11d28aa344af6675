"""Say where in a step a difference arises, and what kind of fault it is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch import Tensor

from meshwright.core.names import is_within

from .findings import Finding, Off, is_position, is_router, is_small, near, ranks_of
from .groups import (
    adds_up_around,
    counted_again,
    listed,
    meets_strangers,
    sent,
    sums_a_copy,
    sums_copies,
    sums_strangers,
    sums_twice,
    unreduced,
)
from .passes import Pair, Passes, factor, is_one, is_permuted
from .resumes import Resume
from .row_kinds import of_rows, of_shares
from .settings import changes_alone, has_no_decay, other_rates
from .sketches import INPUT
from .traces import Place, Run, own_part, part, relative, rows_given, vector

SCALED = ("missing reduction", "wrong scale", "double reduction")


class Diagnosis:
    """The place and kind of a difference in a step.

    Args:
        base: the trace of one process.
        places: by rank, the place of each parameter in one process's.
        step: 0 the first.
    """

    def __init__(self, base: dict[str, Any], many: Run, places: list[dict[str, Place]], step: int):
        self.base, self.many, self.places, self.number = base, many, places, step
        self.n = len(many.ranks)
        self.passes = Passes(base, many, places, step)
        self.whole, self.own = self.passes.whole, self.passes.own
        self.resume = Resume(many, step)
        self.is_vague = False
        """Whether no more is known than that gradients differ."""
        self.bound = 5e-2 if self.whole["short"] else 1e-3
        """Relative error by which two tensors are the same, up to a factor."""

    def place(self, gradients: list[Off], after: list[Off]) -> Finding:
        """Find where in the step the difference of gradients, or of parameters after it, arises."""
        if (rows := self.passes.wrong_rows() or self.passes.wrong_labels()) is not None:
            theirs, mine = self.passes.counts()
            if self.number and (lacking := set(theirs).difference(*mine)):
                last = [rows_given(one) for one in self.many.at(self.number - 1)]
                if lacking <= set().union(*last) - rows_given(self.base["steps"][self.number - 1]):
                    early = [rank for rank, given in enumerate(last) if given & lacking]
                    return self.finding(".+", early, "stale value", "rows went forward before the last update")
            if self._takes_one_more():
                return self.finding(".+", range(self.n), "missing reduction", "they take a step that one process skips")
            return self.finding(".+", rows[0], "wrong rows", rows[1])
        if gradients:
            for step in range(self.number):  # a buffer that differed before anything else did
                for name, off in self._other_buffers(step).items():
                    after_it = Diagnosis(self.base, self.many, self.places, step + 1)
                    if any(map(after_it.resume.reads, off)):  # what is left behind was read from a file
                        kind = after_it.resume.kind(off, [], [name])
                        return after_it.finding(name, off, kind, "", "the buffer differs")
                    found = self.finding(name, range(self.n), "missing reduction", "", "the buffer differs")
                    return replace(found, step=step + 1)
            modules = {o.name.rpartition(".")[0] for o in gradients}
            output = self.passes.first_output() or self.passes.first_output(modules)
            if output is not None:
                return self.of_output(*output)
            return self._of_gradients(gradients)
        return self._of_updates(after)

    def finding(self, place: str, ranks: Iterable[int], kind: str, why: str, what: str = "") -> Finding:
        """Say what differs and why, with the step's number."""
        ranks = tuple(sorted(set(ranks)))
        where = "everything" if place == ".+" else place
        words = f"step {self.number + 1} · {where}: {what or 'it differs'} on {listed(ranks)}{': ' * bool(why)}{why}"
        words += f" · {through}" if ranks and (through := sent(self.passes, place, ranks[0])) else ""
        return Finding("fault", place, self.number + 1, ranks, kind, words)

    def _takes_one_more(self) -> bool:
        """Return whether ranks have rows of no other step, and in the next one those of this step that they lack."""
        n_steps = len(self.base["steps"])
        if not 0 < self.number < n_steps - 1 or any(map(self.resume.reads, range(self.n))):
            return False
        every = [Passes(self.base, self.many, self.places, step).counts() for step in range(n_steps)]
        own = [set().union(*mine) for _, mine in every]
        lacking = every[self.number][0].keys() - own[self.number]
        others = [rows for step, (rows, _) in enumerate(every) if step != self.number]
        is_new = own[self.number].isdisjoint(set().union(*others, *own[: self.number]))
        return bool(lacking) and lacking == own[self.number + 1] and is_new

    # --- before the step

    def of_beginning(self, off: list[Off]) -> Finding:
        """Describe parameters that differ before the step."""
        place = ".+" if len({o.name for o in off}) >= 0.9 * len(self.whole["before"]) else off[0].name
        ranks = ranks_of(off)
        if not self.number:
            if self.passes.begins_alike():
                kind = "missing reduction" if self._replicas_differ(off) else "wrong scale"
                return self.finding(place, ranks, kind, "it was right in the first forward", "it was moved")
            loaded = any("before" in self.own[rank]["loaded"] for rank in ranks)
            kind, why = "not restored" if loaded else "seed", "before the first step"
            factors = [factor(o.found, o.whole) for o in off if o.found is not None and o.whole is not None]
            if len(factors) == len(off) and None not in factors and not loaded:
                kind, why = "wrong scale", f"{factors[0]:.6g} times, before the first step"
            return self.finding(place, ranks, kind, why)
        if any(self.resume.reads(rank) for rank in ranks):
            last = [self.many.step(o.rank, self.number - 1)["after"].get(self._own_name(o)) for o in off]
            norms = [entry["norm"] for entry in last if entry]
            if all(self.resume.is_older(o.rank, self._own_name(o)) for o in off):
                return self.finding(place, ranks, "stale value", "it is what an earlier step left")
            # the ranks' shards hold together what they should, each something of another's
            pairs = [[o for o in off if o.name == name and o.found is not None] for name in {o.name for o in off}]
            if all(
                pair and is_permuted(torch.cat([o.found for o in pair]), torch.cat([o.whole for o in pair]))  # type: ignore[misc]
                for pair in pairs
            ):
                return self.finding(place, ranks, "wrong order", "what the last step left is there in another order")
            return self.finding(place, ranks, self.resume.kind(ranks, norms), "it is not what the last step left")
        return replace(
            self.finding(place, ranks, "stale value", "it changed after the optimizer's step"), step=self.number
        )

    def of_missing(self, names: set[str], ranks: Iterable[int], why: str) -> Finding:
        """Describe parameters on which ranks did not agree."""
        order = list(self.whole["before"])
        place = ".+" if len(names) >= 0.9 * len(order) else max(names, key=order.index)
        return self.finding(place, ranks, "missing reduction", why)

    def _other_buffers(self, step: int) -> dict[str, list[int]]:
        """Find the buffers that differ after a step, and the ranks."""
        whole, found = self.base["steps"][step].get("buffers", {}), defaultdict(list)
        for rank in range(self.n):
            for name, own in self.many.step(rank, step).get("buffers", {}).items():
                there = whole.get(self.passes.names[rank].get(name, name))
                if there is None or there["shape"] != own["shape"] or "running_" in name:
                    continue
                if relative(vector(own), vector(there), 1e-6) > 1e-3:
                    found[name].append(rank)
        return found

    # --- outputs

    def of_output(self, name: str, off: list[Pair], every: list[Pair]) -> Finding:
        ranks = {pair.rank for pair in off}
        errors = [pair.error for pair in off]
        source, inputs = self.passes.first_input(name)
        inputs = [pair for pair in inputs if pair.differs]
        sights, attends = self.passes.sights(), self.passes.attends(name)
        differences = [(pair.found - pair.whole).abs() for pair in off if pair.found.shape == pair.whole.shape]
        rights = [d < (0.05 if self.whole["short"] else 1e-4) * d.max() for d in differences if len(d) > 1]
        right, was_right = max((int(r.sum()) for r in rights), default=0), False
        if self.number:
            first = Passes(self.base, self.many, self.places, 0)
            pairs = [pair for key in first.reference if key[0] == name for pair in first.pairs(key)]
            was_right = bool(pairs) and not any(pair.differs for pair in pairs)
        buffers = self.whole.get("buffers", {})
        kind, why, what = "wrong scale", "", "outputs differ"
        dtypes = next((pair.dtypes for pair in off if pair.dtypes[0] != pair.dtypes[1]), None)
        if dtypes is not None:
            kind, why = "rounding/dtype", f"{dtypes[0]} for {dtypes[1]}"
        elif (beside := self.passes.other_inputs()) is not None:
            kind, why = beside[2], f"input {beside[0]} is another"
        elif attends and sights.masked:
            kind, why, ranks = "mask", "queries see more or fewer keys", sights.masked
        elif attends and sights.scaled:
            kind, why, ranks = "wrong scale", "scores are scaled otherwise", sights.scaled
        elif met := meets_strangers(self.passes, name):
            kind, why = "wrong group", met
        elif (found := of_rows(self.passes, inputs, inputs)) is not None:
            (kind, why), name, what = found, source, "what becomes of its output differs"
            if max(pair.error for pair in inputs) < 1e-2 and was_right:
                kind, why = "stale value", "the first step was right, and this one nearly is"
        elif (found := of_rows(self.passes, off, every)) is not None:
            is_table = is_position(name) or all(pair.row == "table" for pair in off)
            kind, why = ("position", "") if is_table and found[0] == "wrong order" else found
        elif self.passes.are_elsewhere(off, name):
            kind, why = "position", "it is read at other places"
        elif (other := self.passes.are_other_rows(off, name)) is not None:
            kind, why = other, "it is another row's"
        elif inner := self.passes.added_again(name, off):
            kind, why = "double reduction", f"{inner}'s output is in it {self.n} times"
        elif any(
            key.startswith(f"{name}." * bool(name)) and entry["fits"] and not buffers[key]["fits"]
            for one in self.own
            for key, entry in one.get("buffers", {}).items()
            if key in buffers
        ):
            kind, why = "rounding/dtype", "a buffer of it went through a shorter dtype"
        elif is_position(name):
            kind = "position"
        elif any(
            key.startswith(f"{name}.") and ("running_" in key or key in self._other_buffers(self.number))
            for key in buffers
        ):
            kind, why = "missing reduction", "its statistics are those of fewer rows"
        elif (max(errors) < 0.02 or (not right and median(errors) < 0.01)) and not (was_right and max(errors) > 0.1):
            kind, why = "rounding/dtype", "by as much as a shorter dtype rounds"
        elif was_right:
            kind, why = "stale value", "the first step was right"
            if any(map(self.resume.reads, ranks)):
                lost = self._other_buffers(self.number)
                kind = self.resume.kind(sorted(ranks), [], [*lost])
                why = f"{min(lost, default='something of it')} was lost when the run was resumed"
        elif right and not attends and adds_up_around(self.passes, name):
            kind, why = "missing reduction", f"{right} tokens of a row are right"
        elif right and (attends or inputs or not sights.is_known):
            is_first = right == 1 and all(bool(r[0]) or not bool(r.any()) for r in rights)
            kind, why = ("position" if is_first or sights.is_known else "mask"), f"{right} tokens of a row are right"
        elif attends:
            is_order = len(ranks) == self.n > 1 and (sights.is_causal or not sights.is_known)
            kind, why = "wrong order" if is_order else "position" if sights.is_known else "mask", "all tokens differ"
        elif name in self.passes.cut_inputs:
            kind, why = "double reduction", "more than the sum"
        elif any(p.index is not None and p.name.startswith(name + ".") for cut in self.places for p in cut.values()):
            kind = "wrong order"
        elif any(self.passes.lengths):
            kind, why = "missing reduction", "each rank has some tokens of a row"
        elif (inputs or not name) and not any(p.isdigit() and p != "0" for p in name.split(".")):
            kind = "position"
        return self.finding(name or ".+", ranks, kind, why, f"{what} ({max(errors):.1e})")

    # --- gradients

    def _of_gradients(self, off: list[Off]) -> Finding:
        reached: dict[str, int] = {}
        for number, event in enumerate(self.whole["forward"]):
            if not event["module"].endswith(INPUT):
                reached.setdefault(event["module"], number)
        at, last = {}, 0  # by parameter, when a forward reaches its module; those may be declared in another order
        for name in self.whole["gradients"]:
            module = name.rpartition(".")[0]
            inside = [n for m, n in reached.items() if m == module or m.startswith(f"{module}." if module else "")]
            last = at[name] = min(inside, default=last)
        order = sorted(at, key=lambda name: at[name])
        alive = [name for name, entry in self.whole["gradients"].items() if entry is not None and entry["norm"] > 0]
        names = sorted({o.name for o in off}, key=order.index)
        everywhere = len(names) >= 0.9 * len(alive)
        latest = names[-1]  # what a forward computes last, a backward reaches first
        finite = [o for o in off if o.found is not None and o.whole is not None and o.found.shape == o.whole.shape]
        factors = {(o.rank, o.name): factor(o.found, o.whole, self.bound) for o in finite}  # type: ignore[arg-type]
        kind, why, ranks = self._kind_of_gradients(off, finite, factors, everywhere)
        uniform = is_one(factors.values(), self.bound)
        is_frozen = any(self.whole["gradients"].get(name) is None for name in self.whole["before"])
        place = ".+" if everywhere and not is_frozen else latest
        scales = [f for (_, name), f in factors.items() if name == latest]
        of_latest = [o for o in finite if o.name == latest]
        if self.n > 1 and scales and not uniform and kind in SCALED and all(near(f, self.n) for f in scales):
            place, kind, why = latest, "double reduction", f"{self.n} times, and what lies before it too"
        elif of_latest and not everywhere and kind != "stale value" and all(map(is_small, of_latest)):
            kind, why = "dead path", "its gradient is zero"
        elif is_router(place) and (met := sums_a_copy(self.passes, "forward")):
            kind, why = "wrong group", met
        elif (
            of_latest
            and not uniform
            and is_router(place)
            and all(is_small(o, 0.5) for o in of_latest)
            and len(ranks) == self.n
        ):
            kind, why = "dead path", "most of its gradient lacks"
        if kind == "tie broken" and (tied := self._copies_of_one(finite)):
            place = tied[0]
        error = max(o.error for o in off)
        return self.finding(place, ranks, kind, why, f"gradients differ ({error:.1e})")

    def _kind_of_gradients(
        self, off: list[Off], finite: list[Off], factors: dict[tuple[int, str], float | None], everywhere: bool
    ) -> tuple[str, str, tuple[int, ...]]:
        """Return the kind, why, and the ranks."""
        ranks = ranks_of(off)
        if not finite:
            backs = [(event["module"], event["back"]) for one in self.own for event in one["forward"]]
            returned = {n for n, back in backs if back and not any(m != n and is_within(m, n) for m, _ in backs)}
            if any(o.name.rpartition(".")[0] in returned for o in off) and all(map(self._unchanged, off)):
                return "not updated", "no optimizer steps it", ranks
            return "dead path", "no gradient", ranks
        if all(map(is_small, finite)):
            later = self._later(finite, "gradients")
            if len(later) == len(finite) and all(factor(mine, o.whole, 0.1) is not None for o, mine in later):  # type: ignore[arg-type]
                return "stale value", "the gradient comes a step later", ranks
            return "dead path", "the gradient is zero", ranks
        known = [f for f in factors.values() if f is not None]
        if len(known) == len(finite) and max(abs(f - 1) for f in known) > self.bound:
            if is_one(known, self.bound):
                # n times a gradient is a second reduction where ranks have the same rows, or of one parameter
                names = {o.name for o in finite}
                alike = not everywhere and (len(names) == 1 or self._have_the_same_rows())
                double = near(known[0], self.n) and (alike or sums_twice(self.passes, names))
                if everywhere and self._is_clipped() and known[0] > self.n:  # than a part of the norm would scale it
                    return "dead path", f"it is not clipped: {known[0]:.6g} times", ranks
                if everywhere and self._is_clipped():
                    kind = "missing reduction" if known[0] > 1 else "double reduction"
                    return kind, "the norm that clips is another", ranks
                if everywhere and (again := counted_again(self.passes, known[0])):
                    return "wrong group", again, ranks
                return ("double reduction" if double else "wrong scale"), f"{known[0]:.6g} times", ranks
            by_rank = [[f for (rank, _), f in factors.items() if rank == own] for own in ranks]
            if (everywhere or self._is_clipped()) and all(is_one(fs, 2 * self.bound) for fs in by_rank):
                return "missing reduction", "each rank scales by a number of its own", ranks
        met = (everywhere and sums_a_copy(self.passes, "")) or sums_strangers(self.passes, {o.name for o in finite})
        if met:
            return "wrong group", met, ranks
        if tied := self._copies_of_one(finite):
            return "tie broken", f"{tied[1]} are one parameter in one process", ranks
        if everywhere and self.number and all(map(self.resume.reads, ranks)):
            return "not saved", "parameters are right, and something else was lost when the run was resumed", ranks
        if self.number and any(map(self._stale, finite)):
            return "stale value", "the last step's is in it", ranks
        if (word := unreduced(self.passes, finite, self.bound)) is not None:
            return *word, ranks
        alive = [(name, vector(entry)) for name, entry in self.whole["gradients"].items() if entry and entry["norm"]]
        if others := [n for o in finite[:4] for n, g in alive if n != o.name and relative(o.found, g) < 1e-3]:  # type: ignore[arg-type]
            return "wrong order", f"{finite[0].name} has that of {others[0]}", ranks
        if max(o.error for o in finite) < 0.02:
            return "rounding/dtype", "by as much as a shorter dtype rounds", ranks
        if len(known) == len(finite):
            return "wrong scale", f"{min(known):.4g} to {max(known):.4g} times", ranks
        holders = [sum(o.name in {p.name for p in placed.values()} for placed in self.places) for o in finite]
        scales = self.passes.loss_scales()
        is_one_loss = None in scales and self._have_the_same_rows()
        shares = bool(scales) and not is_one_loss and not is_one(scales)
        if max(holders) == 1 < self.n:  # stages of a pipeline: there is nothing to reduce
            if everywhere:
                why = "rows count by other shares of the loss" if shares else "not by one factor"
                return "wrong scale", why, ranks
            if (wrong := self.passes.given_back(ranks)) is not None:
                return wrong
            if any(map(is_small, finite)):
                return "dead path", "the gradient of some is zero", ranks
            if any(o.name.endswith("bias") for o in finite):  # it does not depend on what a forward kept
                return "dead path", "what came back to its output is right, and another way to it lacks", ranks
            return "stale value", "what came back to its output is right", ranks
        if len(ranks) < self.n or self._replicas_differ(finite):
            return "missing reduction", "replicas differ", ranks
        if not everywhere and all(is_position(o.name) for o in finite):
            return "position", "", ranks
        if not everywhere:
            return "missing reduction", "", ranks
        self.is_vague = True
        if is_one_loss or (scales and not any(scales)):
            return "missing reduction", "each rank takes the loss of what it has alone", ranks
        if shares:
            return *of_shares(scales, self.n), ranks
        bigger = sum(float(o.found.norm()) for o in finite) > sum(float(o.whole.norm()) for o in finite)  # type: ignore[union-attr]
        kind, why = ("double", "some of it counts again") if bigger else ("missing", "some of it lacks")
        return f"{kind} reduction", why, ranks

    def _is_clipped(self) -> bool:
        """Return whether one process's gradients have the same norm at every step."""
        every = [step["gradients"].values() for step in self.base["steps"]]
        norms = [sum(entry["norm"] ** 2 for entry in entries if entry) ** 0.5 for entries in every]
        return len(norms) > 1 and max(norms) - min(norms) < 1e-4 * max(norms)

    def _later(self, off: list[Off], stage: str) -> list[tuple[Off, Tensor]]:
        """List what the next step has of the parameters, as far as it has them."""
        entries = [self.many.step(o.rank, self.number + 1)[stage].get(self._own_name(o)) for o in off]
        return [(o, own_part(entry, o.place)) for o, entry in zip(off, entries, strict=True) if entry and o.place]

    def _have_the_same_rows(self) -> bool:
        rows = [set(counts) for counts in self.passes.counts()[1]]
        return all(other == rows[0] for other in rows)

    def _own_name(self, off: Off) -> str:
        return next((name for name, place in self.places[off.rank].items() if place.name == off.name), off.name)

    def _unchanged(self, off: Off) -> bool:
        own, name = self.own[off.rank], self._own_name(off)
        after = own["left"].get(name) or own["after"].get(name)
        return after is not None and relative(vector(after), vector(own["before"][name])) < 1e-9

    def _is_shorter(self, off: Off) -> bool:
        """Return whether a parameter's numbers are those of 16 bits, and one process's are not."""
        own, whole = self.own[off.rank]["left"].get(self._own_name(off)), self.whole["left"].get(off.name)
        return bool(own and whole and own["fits"] and not whole["fits"])

    def _stale(self, off: Off) -> bool:
        entry = self.base["steps"][self.number - 1]["gradients"].get(off.name)
        if entry is None or off.place is None or off.found is None or off.whole is None:
            return False
        before = part(entry, off.place)
        return relative(off.found, before) < 1e-2 or factor(off.found - off.whole, before, 5e-2) is not None

    def _replicas_differ(self, off: Sequence[Off]) -> bool:
        by_name: dict[Any, list[Tensor]] = defaultdict(list)
        for o in off:
            if o.found is not None and o.place is not None:
                by_name[o.name, o.place.key].append(o.found)
        return any(relative(t, parts[0]) > 1e-4 for parts in by_name.values() for t in parts[1:])

    def _copies_of_one(self, off: Sequence[Off]) -> tuple[str, str] | None:
        """Name a parameter of one process that is two on a rank, and those, if its gradient is another."""
        names = {o.name for o in off}
        for own, placed in zip(self.own, self.places, strict=True):
            homes: dict[Any, str] = {}
            for name, place in placed.items():
                if place.name in names and own["gradients"].get(name) is not None:
                    other = homes.setdefault((place.name, place.key), name)
                    if other != name:
                        return place.name, f"{other} and {name}"
        return None

    # --- updates

    def _of_updates(self, off: list[Off]) -> Finding:
        ranks = ranks_of(off)
        order = list(self.whole["after"])
        names = sorted({o.name for o in off}, key=order.index)
        moved = [n for n in order if relative(vector(self.whole["after"][n]), vector(self.whole["before"][n])) > 1e-9]
        everywhere = len(names) >= 0.8 * len(moved)
        place = ".+" if everywhere else names[-1]
        if all(self._unchanged(o) for o in off):
            kind, why = "not updated", "the step leaves it as it was"
            later = self._later(off, "after")
            if len(later) == len(off) and all(
                relative(mine - self._before(o), o.whole - self._before(o)) < 0.25  # type: ignore[operator]
                for o, mine in later
            ):
                kind, why = "stale value", "the update comes a step later"
            elif self.number and all(map(self._stands_at_first, off)):
                kind, why = "rounding/dtype", "updates of one process add up, and are lost here in 16 bits"
            return self.finding(place, ranks, kind, why, "the update differs")
        holders = [o for o in off if self._state(o)]
        ranks = ranks_of(holders or off)  # of the others, some only receive what these have updated
        resumed = any(self.resume.reads(rank) for rank in ranks)
        rates, alike = other_rates(self.passes, ranks)
        place = names[-1] if rates and alike else place  # those of one group, however many they are
        kind, why = "wrong scale", "the gradient is right and the step is not"
        states = [found for o in off for found in self._states(o)]
        if rates:
            kind, why = (
                ("dead path" if has_no_decay(self.passes, ranks) else "wrong scale"),
                f"{', '.join(rates)} differs",
            )
            steps = [self.many.step(rank, s) for rank in range(self.n) for s in range(self.number)]
            earlier = {rate["lr"] for step in steps for rate in step["rates"].values()}
            now = {rate["lr"] for rank in ranks for rate in self.own[rank]["rates"].values()}
            if resumed and (rates != ["lr"] or now & earlier):  # it has a rate that the run had before
                kind = self.resume.kind(ranks, [], ["last_epoch"] if "lr" in rates else [])
            elif self.number:
                before = Passes(self.base, self.many, self.places, self.number - 1)
                if changes_alone(self.passes, before, ranks):
                    kind, why = "missing reduction", f"{why}: these ranks alone changed it"
        elif met := sums_copies(self.passes, place):
            kind, why = "wrong group", met
        elif states:
            lost = []
            for o in off if self.number else ():
                last = self.many.step(o.rank, self.number - 1)["state"].get(self._own_name(o), {})
                lost += [last[key]["norm"] for key, _ in self._states(o) if key in last]
            kind = self.resume.kind(ranks, lost) if resumed else "not restored" if self.number else "wrong scale"
            if any(s[1] for s in states):
                kind = "rounding/dtype"
            elif resumed and all(self.resume.has_anothers(o.rank, self._own_name(o)) for o in holders):
                kind = "wrong order"
            elif not resumed and all(o.place and o.place.dim is not None and self._sums(o) for o in holders):
                kind = "missing reduction"
            why = f"its {states[0][0]} differs"
        elif all(map(self._is_shorter, off)):
            kind, why = "rounding/dtype", "its numbers are those of 16 bits"
        elif resumed and any(self.resume.saved(only_files=False)):
            lacking = {key for o in off for key in self.whole["state"].get(o.name, {}).keys() - self._state(o).keys()}
            kind, why = self.resume.kind(ranks, [], [*lacking]), "it was right before the run was resumed"
        elif len(ranks) < self.n or self._replicas_differ(off):
            is_stale = len(ranks) < self.n and any(self.own[ranks[0]]["rates"].values())  # else by hand
            kind, why = "stale value" if is_stale else "missing reduction", "replicas differ"
        elif not all(
            is_one(
                [factor(o.found - self._before(o), o.whole - self._before(o), 5e-2) for o in off if o.name == name],  # type: ignore[operator]
                5e-2,
            )
            for name in names
        ):
            kind, why = "missing reduction", "no one factor lies between it and that of one process"
            if self.number and not all(o.place and o.place.dim is not None for o in off):  # not of the own parts alone
                kind, why = "stale value", f"{why}, and those before were right"
        return self.finding(place, ranks, kind, why, "the update differs")

    def _stands_at_first(self, off: Off) -> bool:
        """Return whether the first step of one process left a parameter of 16 bits as it was."""
        first = self.base["steps"][0]
        entry, before = first["after"].get(off.name), first["before"].get(off.name)
        return bool(entry and before and "float16" in entry["dtype"]) and torch.equal(vector(entry), vector(before))

    def _before(self, off: Off) -> Tensor:
        assert off.place is not None
        return part(self.whole["before"][off.name], off.place)

    def _state(self, off: Off) -> dict[str, Any]:
        return self.own[off.rank]["state"].get(self._own_name(off), {})

    def _sums(self, off: Off) -> bool:
        """Return whether a state that differs is a statistic of the parameter's rows or columns."""
        n_dims, state = len(self.whole["before"][off.name]["shape"]), self.whole["state"][off.name]
        return any(0 < len(state[key]["shape"]) < n_dims or 1 in state[key]["shape"] for key, _ in self._states(off))

    def _states(self, off: Off) -> list[tuple[str, bool]]:
        """List the entries of a parameter's optimizer state that differ, and whether in dtype."""
        own = self._state(off)
        whole = self.whole["state"].get(off.name, {})
        found = []
        for key, entry in whole.items():
            if key not in own or off.place is None:
                continue
            same = len(entry["shape"]) == len(self.whole["before"][off.name]["shape"]) and entry["shape"]
            mine = own_part(own[key], off.place) if same else vector(own[key])
            theirs = part(entry, off.place) if same else vector(entry)
            shorter = own[key]["dtype"] != entry["dtype"] or (own[key]["fits"] and not entry["fits"])
            if relative(mine, theirs) > 1e-3 or shorter:
                found.append((key, shorter))
        return found
