"""Say where a run first differs from another: the step, the place, the ranks, and what kind of fault that is.

Whether two runs differ is decided by what an optimizer saw and left: gradients, parameters, states. The outputs of
modules and the gradients that came back to them say where a difference arises; they may differ in a sound run too
(partial sums that are added up later, sums of a loss in place of means).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch import Tensor

from meshwright.core.errors import ConfigError

from .diagnosis import Diagnosis, Finding, Off, is_router
from .passes import ROUNDING, Passes, factor
from .traces import Place, Run, first_step, own_part, part, places_of, relative, vector

MOST_NOISE = 0.1
"""Relative error of an output that noise of the size of rounding cannot make."""
SMALL = 0.1
"""Relative error that a loss which is no sum over rows may have where microbatches are others."""
FLOORS = 12.0
"""Multiple of the error between runs of one process that still counts as rounding."""


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
        self.base = one.ranks[0]
        self.many = many = many.aligned(self.base)
        self.n_steps = min(one.n_steps, many.n_steps)
        self.places = [places_of(self.base, trace) for trace in many.ranks]
        held = [trace["steps"][first_step(trace)]["before"] for trace in many.ranks]
        for rank, (names, placed) in enumerate(zip(held, self.places, strict=True)):
            if not placed:
                if any(0 in entry["shape"] for entry in names.values()):
                    raise ConfigError(
                        f"{many.folder}: rank {rank}'s parameters hold no numbers between the passes of a step,"
                        f" as under DeepSpeed's ZeRO 3: observe it with a lower stage"
                    )
                raise ConfigError(
                    f"{many.folder}: none of the {len(names)} parameters of rank {rank} is one of {one.folder}'s:"
                    f" observe the same script, with the same model and seed, in both"
                )
        whole = self.base["steps"][0]["before"].keys()
        found = {place.name for placed in self.places for place in placed.values()}
        unplaced = {
            name for names, placed in zip(held, self.places, strict=True) for name in names if name not in placed
        }
        self.unknown = tuple(sorted(unplaced | (whole - found))) if whole - found else ()
        self.is_short = any(step["short"] for trace in (self.base, *many.ranks) for step in trace["steps"])
        """Whether some of the model computes in 16 bits."""
        counts = sorted({len(trace["steps"]) for trace in (*many.ranks, self.base)})
        self.counts = f"; not all took as many steps: {counts[0]} to {counts[-1]}" if len(counts) > 1 else ""
        if self.base["others"]:
            self.counts += f"; several models are trained: names of others begin with {', '.join(self.base['others'])}"
        if any(trace["cut"] for trace in (self.base, *many.ranks)):
            self.counts += "; compiled graphs were cut at modules: observe --parameters-alone leaves them whole"
        for run in noisy:
            self._check_again(one, run)
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
        before = self.base["steps"][0]["before"]
        drawn = [
            place.name
            for name, place in places[0].items()
            if relative(own_part(run.step(0, 0)["before"][name], place), part(before[place.name], place)) > 1e-3
        ]
        what = f"{drawn[0]} begins with other values" if drawn else ""
        if not what and passes.wrong_rows() is not None:
            what = "the first step has other rows"
        if not what and output is not None and median(pair.error for pair in output[1]) > MOST_NOISE:
            what = f"outputs of {output[0] or 'the model'} differ in the first step"
        if what:
            raise ConfigError(
                f"{one.folder} and {again.folder} are two runs of one process and not the same: {what}. Seed what the"
                f" script draws, and observe anew"
            )

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
            return Diagnosis(self.base, self.many, self.places, 0).of_beginning(off)
        for step in range(self.n_steps):
            left = [self._parameters(stage, step) for stage in ("after", "left")]
            gradients = self._gradients(step)
            moved = self._between(step) if step and (gradients or left[0]) else []
            if moved:  # without a difference in the step it was noted earlier or later, no more
                return Diagnosis(self.base, self.many, self.places, step).of_beginning(moved)
            if (drawn := self._draws(step)) is not None:
                return drawn
            after = left[1] if self._has_left(step) else left[0]
            if gradients and not after and self._may_differ(step, gradients):
                gradients = []
            if not gradients and not (after and (left[0] or step + 1 == self.n_steps)):
                continue
            diagnosis = Diagnosis(self.base, self.many, self.places, step)
            rows = diagnosis.passes.wrong_rows()
            if rows is not None and not step and (again := self._reads_again()) is not None:
                if again == (self.n_steps, ()):
                    return self._without_twin(step)
                later, ranks = again
                return Diagnosis(self.base, self.many, self.places, later).of_rows(ranks)
            if diagnosis.passes.other_batches() and self._is_small(step, gradients, after):
                continue
            return diagnosis.place(gradients, after)
        n_parameters = len(self.base["steps"][0]["before"])
        counts = (self.n_steps, "step"), (n_parameters, "parameter"), (len(self.many.ranks), "process")
        of = ", ".join(f"{n} {word}" + ("es" if word == "process" else "s") * (n > 1) for n, word in counts)
        return Finding("sound", words=f"equal up to rounding ({of})")

    def _reads_again(self) -> tuple[int, tuple[int, ...]] | None:
        """Find the first step, and the ranks, that read rows more often than one process does in all its steps.

        Returns (number of steps, no ranks) if none does, None if rows are lacking or nobody else's.
        """
        every = [Passes(self.base, self.many, self.places, step).counts() for step in range(self.n_steps)]
        theirs: Counter[str] = sum((whole for whole, _ in every), Counter())
        mine: Counter[str] = Counter()
        whole, first = every[0]
        own = [set(counts) for counts in first if counts]
        if own and all(2 * len(rows - theirs.keys()) > len(rows) for rows in own):  # each run draws others
            again = tuple(rank for rank, counts in enumerate(first) if counts and counts in first[:rank])
            return (0, again) if again and len(set().union(*own)) < len(whole) else (self.n_steps, ())
        for step, (_, ranks) in enumerate(every):
            seen = []
            for rank, counts in enumerate(ranks):
                if counts not in seen:
                    seen.append(counts)
                    mine += counts
                    if any(row not in theirs for row in counts):
                        return None
                    if any(mine[row] > theirs[row] for row in counts):
                        return step, (rank,)
        return (self.n_steps, ()) if theirs == mine else None

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
                return Diagnosis(self.base, self.many, self.places, later).of_replicas(off)
        words = (
            f"rows are others, or in another order, from step {step + 1} on; so ranks were compared with each other:"
            " they agree"
        )
        return Finding("sound", words=words)

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
        factors = [factor(o.found, o.whole) for o in gradients if o.found is not None and o.whole is not None]
        return any(f is None for f in factors)

    def _draws(self, step: int) -> Finding | None:
        ranks = range(len(self.many.ranks))
        if not any(self.many.step(rank, step)["draws"] for rank in ranks):
            return None
        diagnosis = Diagnosis(self.base, self.many, self.places, step)
        earlier = [(self.base["steps"][s], [self.many.step(rank, s) for rank in ranks]) for s in range(step)]
        wrong = diagnosis.passes.wrong_draws(earlier)
        return None if wrong is None else diagnosis.of_draws(*wrong)

    def _has_left(self, step: int) -> bool:
        every = [self.base["steps"][step], *(self.many.step(rank, step) for rank in range(len(self.many.ranks)))]
        return all("left" in one for one in every if one["after"])

    def _may_differ(self, step: int, gradients: list[Off]) -> bool:
        """Return whether equal weights may come of other gradients.

        A rate makes up for a sum in place of a mean; weights are averaged in the place of gradients, which no factor
        makes equal then; or an update by hand reduces and scales what it was given.
        """
        ranks = range(len(self.many.ranks))
        pairs = [(o.found, o.whole) for o in gradients]
        by_hand = not any(rates for rank in ranks for rates in self.many.step(rank, step)["rates"].values())
        averaged = all(f is not None and w is not None and factor(f, w) is None for f, w in pairs)
        return by_hand or averaged or self._rates_differ(step)

    def _rates_differ(self, step: int) -> bool:
        whole = self.base["steps"][step]["rates"]
        return any(
            rates.get("lr") != whole[place.name].get("lr")
            for rank, places in enumerate(self.places)
            for name, rates in self.many.step(rank, step)["rates"].items()
            if (place := places.get(name)) is not None and place.name in whole
        )

    # --- what differs

    def _bound(self, step: int, stage: str, name: str, dtype: str) -> float:
        least = 2 * ROUNDING["bfloat16"] if self.is_short else ROUNDING.get(dtype, 5e-5)
        return max(least, FLOORS * self.floors[step, stage, name])

    def _initial(self) -> list[Off]:
        """List the parameters that differ before the first step, and those that no rank begins with."""
        whole = self.base["steps"][0]["before"]
        off = self._blocks("before", 0, 0.0)
        for rank, trace in enumerate(self.many.ranks):
            for name, entry in trace["steps"][0]["before"].items():
                place = self.places[rank].get(name)
                if place is None or (place.offset is not None and place.dim is None):
                    continue
                mine, theirs = own_part(entry, place), part(whole[place.name], place)
                error = relative(mine, theirs)
                if error > ROUNDING.get(entry["dtype"], 5e-5) and len(mine):
                    off.append(Off(place.name, rank, mine, theirs, error, place))
        return off

    def _entries(self, stage: str, step: int) -> Iterator[tuple[int, Place, dict[str, Any] | None, dict[str, Any]]]:
        """Go through what ranks have and one process has, too: (rank, place, the rank's, one process's)."""
        for rank, places in enumerate(self.places):
            own = self.many.step(rank, step)
            for name, entry in own.get(stage, {}).items():
                place = places.get(name)
                if place is not None and place.name in self.base["steps"][step].get(stage, {}):
                    yield rank, place, entry, self.base["steps"][step][stage][place.name]

    def _gradients(self, step: int) -> list[Off]:
        whole = self.base["steps"][step]["gradients"]
        total = sum(entry["norm"] ** 2 for entry in whole.values() if entry) ** 0.5
        found = self._blocks("gradients", step, total)
        stepped = [self._stepped(rank, step) for rank in range(len(self.many.ranks))]
        partial: dict[Any, list[tuple[int, Place, Tensor, Tensor]]] = defaultdict(list)
        for rank, place, entry, reference in self._entries("gradients", step):
            if place.name not in stepped[rank] or (place.offset is not None and place.dim is None):
                continue
            if entry and reference and any(kind.startswith("P") for kind in entry["placements"]):
                values = own_part(entry, place), part(reference, place)
                partial[place.name, place.key].append((rank, place, *values))
                continue
            if entry is None or reference is None:
                known = entry if entry is not None else reference
                if known is not None and known["norm"] > 1e-7 * total:
                    theirs = None if reference is None else part(reference, place)
                    mine = None if entry is None else own_part(entry, place)
                    if theirs is not None and not len(theirs):
                        continue  # the rank has none of it
                    found.append(Off(place.name, rank, mine, theirs, float("inf"), place))
                continue
            mine, theirs = own_part(entry, place), part(reference, place)
            size = len(theirs) ** 0.5 * total / max(1, sum(map(len, reference["m"]))) ** 0.5
            error = relative(mine, theirs, 1e-6 * size)
            if error > self._bound(step, "gradients", place.name, entry["dtype"]) and len(mine):
                found.append(Off(place.name, rank, mine, theirs, error, place))
        for parts in partial.values():  # DTensors of which ranks have parts of a sum
            mine, theirs = torch.stack([own for _, _, own, _ in parts]).sum(0), parts[0][3]
            error = relative(mine, theirs, 1e-6 * total)
            if error > self._bound(step, "gradients", parts[0][1].name, "float32"):
                found += [Off(place.name, rank, own, theirs, error, place) for rank, place, own, _ in parts]
        return found

    def _stepped(self, rank: int, step: int) -> set[str]:
        """Return what one process calls the parameters that a rank steps."""
        return {
            self.places[rank][name].name for name in self.many.step(rank, step)["rates"] if name in self.places[rank]
        }

    def _is_used(self, rank: int, step: int) -> set[str]:
        """Return the parameters, by a rank's names, that the rank steps, has new gradients of, or calls the modules
        of.
        """
        own = self.many.step(rank, step)
        last = self.many.step(rank, step - 1)["gradients"] if step else {}
        called = {event["module"] for event in own["forward"]}
        return {
            name
            for name in own["before"]
            if name in own["rates"]
            or ((entry := own["gradients"].get(name)) and entry["norm"] != (last.get(name) or {}).get("norm"))
            or name.rpartition(".")[0] in called
        }

    def _parameters(self, stage: str, step: int) -> list[Off]:
        """List the parameters whose change in the step differs."""
        found = self._blocks(stage, step, 0.0)
        used = [
            {placed[name].name for name in self._is_used(rank, step) if name in placed}
            for rank, placed in enumerate(self.places)
        ]
        for rank, place, entry, reference in self._entries(stage, step):
            if place.name not in used[rank] or (place.offset is not None and place.dim is None):
                continue
            assert entry is not None
            before = part(self.base["steps"][step]["before"][place.name], place).double()
            mine, theirs = own_part(entry, place).double(), part(reference, place).double()
            size = float(theirs.norm())
            off = float((mine - theirs).norm()) if mine.shape == theirs.shape else float("inf")
            floor = FLOORS * self.floors[step, stage, place.name] * size
            # Adam divides gradients that are nothing but rounding by their own size
            share = SMALL if self.is_short else 0.02
            least = 2 * ROUNDING[entry["dtype"]] if entry["dtype"] in ("bfloat16", "float16") else 1e-6
            along = not self.is_short and off > max(5e-7 * size, floor)
            if off > max(least * size, floor, share * float((theirs - before).norm())) or (
                along and _is_along(mine - theirs, before, theirs - before)
            ):
                found.append(Off(place.name, rank, mine, theirs, off / max(size, 1e-300), place))
        return found

    def _blocks(self, stage: str, step: int, total: float) -> list[Off]:
        """Compare the tensors whose blocks are cut along several dims: their marginals add up to the whole's."""
        found = []
        blocks: dict[str, dict[tuple[int, ...], list[tuple[int, dict[str, Any]]]]] = defaultdict(
            lambda: defaultdict(list)
        )
        for rank, place, entry, whole in self._entries(stage, step):
            if place.offset is not None and entry is not None and whole is not None:
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
            name = next(name for name, other in self.places[rank].items() if other is place)
            last = self.many.step(rank, step - 1)["after"].get(name)
            one_last = self.base["steps"][step - 1]["after"].get(place.name)
            if last is None or one_last is None or now is None or (place.offset is not None and place.dim is None):
                continue
            mine, theirs = own_part(now, place), part(one_now, place)
            if not len(mine) or len(last["m"]) != len(now["m"]):
                continue
            moved = relative(mine, own_part(last, place)), relative(theirs, part(one_last, place))
            least = max(1e-6, FLOORS * self.floors[step - 1, "left", place.name])
            right = relative(own_part(last, place), part(one_last, place)) <= least
            if max(moved) > 1e-6 and right and relative(mine, theirs) > least:
                off.append(Off(place.name, rank, mine, theirs, relative(mine, theirs), place))
        return off


def _is_along(off: Tensor, *directions: Tensor) -> bool:
    """Return whether a difference is a multiple of one of the directions, and so no rounding."""
    if len(off) < 8:
        return False
    size = float(off.norm())
    return any(abs(float(off @ d)) > 0.95 * size * float(d.norm()) for d in directions if float(d.norm()))
