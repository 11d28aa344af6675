"""Fit the efficiency of each card and dtype to measured steps, and score groups of rows that a fit did not see."""

from __future__ import annotations

import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from meshwright.simulation.job import Job
from meshwright.simulation.step_time import step_time

from .rows import Row

LOW, HIGH, ROUNDS = 0.2, 1.0, 12
"""The range in which efficiencies are searched, and in how many halvings."""
ENOUGH = 5
"""Rows to which an efficiency is fitted at least, where some are left out."""
BITS = {"bfloat16": 16, "float16": 16, "float8": 8, "mxfp8": 8, "8 bits": 8, "nvfp4": 4}
SHARED = ("bfloat16", "float16", "float8", "mxfp8")
"""Dtypes with one efficiency, on cards with MXFP8."""
Unit = tuple[str, str]
"""(card, dtype), for which one efficiency is fitted."""


@dataclass(frozen=True)
class Measured:
    """A measured step.

    Attributes:
        kind: class of the row, by which errors are reported.
    """

    row: Row
    job: Job
    seconds: float
    kind: str

    @property
    def unit(self) -> Unit:
        """The card and dtype whose efficiency the row has; cards with MXFP8 have one for half precision and 8 bits."""
        device, dtype = self.job.machines.device, self.job.execution.products
        shared = "mxfp8" in device.flops and BITS[dtype] >= 8
        return device.name, "8 bits" if shared else dtype

    @property
    def fits(self) -> bool:
        """Whether the row's efficiency is fitted to it: half precision takes that of 8 bits where they share one."""
        return self.unit[1] != "8 bits" or BITS[self.job.execution.products] == 8

    @property
    def source(self) -> str:
        return self.row["source"]

    @property
    def release(self) -> str:
        """Source, with the release of its software where the row names one."""
        found = re.search(r"\d\d\.\d\d", self.row["where"]) if "container" in self.row["where"].lower() else None
        return f"{self.source}, {found[0]}" if found else self.source

    @property
    def model(self) -> str:
        return self.row["model"].split(" (")[0]

    def error(self, efficiency: float) -> float:
        machines, dtype = self.job.machines, self.job.execution.products
        of = machines.device
        for one in SHARED if self.unit[1] == "8 bits" else (dtype,):
            of = replace(of, efficiency={**of.efficiency, one: efficiency})
        return step_time(replace(self.job, machines=replace(machines, device=of))).seconds / self.seconds - 1


def fitted(rows: Iterable[Measured]) -> dict[Unit, float]:
    """Return for each card and dtype the efficiency at which the median signed error is zero."""
    units: dict[Unit, list[Measured]] = defaultdict(list)
    for row in rows:
        if row.fits:
            units[row.unit].append(row)
    return {unit: _fit(members) for unit, members in sorted(units.items())}


def _fit(members: Sequence[Measured]) -> float:
    low, high = LOW, HIGH
    for _ in range(ROUNDS):
        middle = (low + high) / 2
        too_slow = statistics.median(row.error(middle) for row in members) > 0
        low, high = (middle, high) if too_slow else (low, middle)
    return low


def held_out(rows: Sequence[Measured], by: str) -> dict[str, list[float]]:
    """Return the errors of each group's rows by class, with efficiencies that the other groups' rows were fitted to.

    Of a card and dtype with fewer than ``ENOUGH`` rows elsewhere, the median of those in as many bits is taken.

    Args:
        by: "source", "release" or "model".
    """
    everyone = fitted(rows)
    found: dict[str, list[float]] = defaultdict(list)
    for group in sorted({getattr(row, by) for row in rows}):
        inside = [row for row in rows if getattr(row, by) == group]
        rest = [row for row in rows if getattr(row, by) != group]
        known = {unit for unit, count in Counter(row.unit for row in rest if row.fits).items() if count >= ENOUGH}
        changed = known & {row.unit for row in inside}
        fits = {unit: everyone[unit] for unit in known} | fitted(row for row in rest if row.unit in changed)
        for row in inside:
            found[row.kind].append(row.error(_of(row.unit, fits)))
    return found


def _of(unit: Unit, fits: Mapping[Unit, float]) -> float:
    if unit in fits:
        return fits[unit]
    alike = [value for (_, dtype), value in fits.items() if BITS[dtype] == BITS[unit[1]]]
    return statistics.median(alike or fits.values())
