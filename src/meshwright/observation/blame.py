"""Say where a run first differs from another: the step, the place, the ranks, and what kind of fault that is.

Whether two runs differ is decided by what an optimizer saw and left: gradients, parameters, states. The outputs of
modules and the gradients that came back to them say where a difference arises; they may differ in a sound run too
(partial sums that are added up later, sums of a loss in place of means).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from meshwright.core.errors import ConfigError

from .diagnosis import ROUNDING, Diagnosis, Finding, Off, common_name, ranks_of, these
from .traces import Place, Run, own_part, part, places_of, relative, vector

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
        self.many, self.base = many, one.ranks[0]
        self.n_steps = min(one.n_steps, many.n_steps)
        self.places = [places_of(self.base, trace) for trace in many.ranks]
        held = [trace["steps"][0]["before"] for trace in many.ranks]
        for rank, (names, placed) in enumerate(zip(held, self.places, strict=True)):
            if not placed:
                raise ConfigError(
                    f"{many.folder}: none of the {len(names)} parameters of rank {rank} is one of {one.folder}'s:"
                    f" observe the same script, with the same model and seed, in both"
                )
        whole = self.base["steps"][0]["before"].keys()
        found = {place.name for placed in self.places for place in placed.values()}
        unplaced = {
            name for names, placed in zip(held, self.places, strict=True) for name in names if name not in placed
        }
        self.unknown = tuple(sorted(unplaced | (whole - found)))
        self.floors: dict[tuple[int, str, str], float] = defaultdict(float)
        for run in noisy:
            for step in range(min(self.n_steps, run.n_steps)):
                a, b = self.base["steps"][step], run.step(0, step)
                for stage in ("gradients", "after"):
                    for name, entry in a[stage].items():
                        other = b[stage].get(name)
                        if entry is not None and other is not None:
                            error = relative(vector(other), vector(entry))
                            self.floors[step, stage, name] = max(error, self.floors[step, stage, name])

    def judge(self) -> Finding:
        """Find the first difference."""
        found = self._first()
        if not self.unknown:
            return found
        names = ", ".join(self.unknown[:4]) + (f" and {len(self.unknown) - 4} more" if len(self.unknown) > 4 else "")
        words = f"{found.words}; not compared, since their place in one process is unknown: {names}"
        return replace(found, words=words, unknown=self.unknown)

    def _first(self) -> Finding:
        if (found := self._initial()) is not None:
            return found
        for step in range(self.n_steps):
            gradients = self._gradients(step)
            after = self._parameters("after", step)
            if not gradients and not after:
                if step and (moved := self._between(step)) is not None:
                    return moved
                continue
            return Diagnosis(self.base, self.many, self.places).place(step, gradients, after)
        n_parameters = len(self.base["steps"][0]["before"])
        of = f"{self.n_steps} steps, {n_parameters} parameters, {len(self.many.ranks)} processes"
        return Finding("sound", words=f"equal up to rounding ({of})")

    # --- what differs

    def _bound(self, step: int, stage: str, name: str, dtype: str) -> float:
        return max(ROUNDING.get(dtype, 5e-5), FLOORS * self.floors[step, stage, name])

    def _initial(self) -> Finding | None:
        off = []
        for rank, trace in enumerate(self.many.ranks):
            for name, entry in trace["steps"][0]["before"].items():
                place = self.places[rank].get(name)
                if place is None or place.offset is not None:
                    continue
                whole = part(self.base["steps"][0]["before"][place.name], place)
                error = relative(own_part(entry, place), whole)
                if error > ROUNDING.get(entry["dtype"], 5e-5):
                    off.append(Off(place.name, rank, own_part(entry, place), whole, error, place))
        if not off:
            return None
        ranks = ranks_of(off)
        return Finding(
            "fault",
            common_name(off),
            1,
            ranks,
            "seed" if len(ranks) < len(self.many.ranks) else "not restored",
            f"{common_name(off)} differs before the first step, on {these(ranks)}",
        )

    def _gradients(self, step: int) -> list[Off]:
        whole = self.base["steps"][step]["gradients"]
        total = sum(entry["norm"] ** 2 for entry in whole.values() if entry) ** 0.5
        found = self._blocks("gradients", step, total)
        for rank in range(len(self.many.ranks)):
            for name, entry in self.many.step(rank, step)["gradients"].items():
                place = self.places[rank].get(name)
                if place is None or place.name not in whole or place.offset is not None:
                    continue
                reference = whole[place.name]
                if reference is None and entry is None:
                    continue
                if entry is None or reference is None:
                    known = entry if entry is not None else reference
                    if known is not None and known["norm"] > 1e-7 * total:
                        theirs = None if reference is None else part(reference, place)
                        mine = None if entry is None else own_part(entry, place)
                        found.append(Off(place.name, rank, mine, theirs, float("inf"), place))
                    continue
                mine, theirs = own_part(entry, place), part(reference, place)
                size = len(theirs) ** 0.5 * total / max(1, sum(map(len, reference["m"]))) ** 0.5
                error = relative(mine, theirs, 1e-6 * size)
                if error > self._bound(step, "gradients", place.name, entry["dtype"]):
                    found.append(Off(place.name, rank, mine, theirs, error, place))
            if self._splits_states():
                continue
            held = {place.name for place in self.places[rank].values()}
            stepped = {p.name for n, p in self.places[rank].items() if n in self.many.step(rank, step)["gradients"]}
            for name, entry in whole.items():
                if name in held - stepped and entry is not None and entry["norm"] > 1e-7 * total:
                    found.append(Off(name, rank, None, vector(entry), float("inf"), Place(name)))
        return found

    def _splits_states(self) -> bool:
        """Return whether ranks step different parameters of those that they hold (optimizer states are shared out)."""
        seen = [frozenset(trace["steps"][0]["gradients"]) for trace in self.many.ranks]
        held = [frozenset(trace["steps"][0]["before"]) for trace in self.many.ranks]
        return len(set(held)) == 1 and len(set(seen)) > 1

    def _parameters(self, stage: str, step: int) -> list[Off]:
        """List the parameters whose change in the step differs."""
        whole = self.base["steps"][step]
        found = self._blocks(stage, step, 0.0)
        for rank in range(len(self.many.ranks)):
            own = self.many.step(rank, step)
            for name, entry in own[stage].items():
                place = self.places[rank].get(name)
                if place is None or place.name not in whole[stage] or place.offset is not None:
                    continue
                before = part(self.base["steps"][step]["before"][place.name], place)
                mine, theirs = own_part(entry, place), part(whole[stage][place.name], place)
                moved = float((theirs.double() - before.double()).norm())
                size = float(theirs.double().norm())
                off = float((mine.double() - theirs.double()).norm()) if mine.shape == theirs.shape else float("inf")
                floor = self.floors[step, stage, place.name] * size
                # Adam divides gradients that are nothing but rounding by their own size
                least = max(1e-6 * size, FLOORS * floor, 0.02 * moved)
                if off > least:
                    found.append(Off(place.name, rank, mine, theirs, off / max(size, 1e-300), place))
        return found

    def _blocks(self, stage: str, step: int, total: float) -> list[Off]:
        """Compare the tensors whose blocks are cut along several dims: their marginals add up to the whole's."""
        found = []
        blocks: dict[str, dict[tuple[int, ...], tuple[int, dict[str, Any]]]] = defaultdict(dict)
        for rank in range(len(self.many.ranks)):
            for name, entry in self.many.step(rank, step)[stage].items():
                place = self.places[rank].get(name)
                if place is not None and place.offset is not None and entry is not None:
                    blocks[place.name].setdefault(place.offset, (rank, entry))
        for name, parts in blocks.items():
            whole = self.base["steps"][step][stage].get(name)
            if whole is None:
                continue
            sums = [torch.zeros_like(m, dtype=torch.float64) for m in whole["m"]]
            for offset, (_, entry) in parts.items():
                for dim, m in enumerate(entry["m"]):
                    sums[dim][offset[dim] : offset[dim] + len(m)] += m.double()
            mine, theirs = torch.cat(sums), vector(whole)
            error = relative(mine, theirs, 1e-6 * total)
            if error > self._bound(step, stage, name, whole["dtype"]):
                found += [Off(name, rank, mine, theirs, error, Place(name)) for rank, _ in parts.values()]
        return found

    def _between(self, step: int) -> Finding | None:
        """Find parameters that changed between two steps, without an optimizer."""
        off = []
        for rank in range(len(self.many.ranks)):
            last, now = self.many.step(rank, step - 1)["after"], self.many.step(rank, step)["before"]
            one_last, one_now = self.base["steps"][step - 1]["after"], self.base["steps"][step]["before"]
            for name, place in self.places[rank].items():
                if name not in last or name not in now or place.name not in one_last or place.name not in one_now:
                    continue
                theirs = relative(vector(one_now[place.name]), vector(one_last[place.name]))
                if theirs <= 1e-6 < relative(vector(now[name]), vector(last[name])):
                    off.append(Off(place.name, rank, vector(now[name]), vector(last[name]), 1.0, place))
        if not off:
            return None
        place = common_name(off)
        words = f"step {step + 1} · {place}: it changed after the last step, without an optimizer"
        return Finding("fault", place, step + 1, ranks_of(off), "not restored", words)
