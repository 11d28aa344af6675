"""``meshwright blame ONE MANY [--noisy TRACE] [--bisect WAYS] [--json]``: say where a run first differs from another.

ONE and MANY are traces that 'meshwright observe' wrote, of the same script with the same data and seeds: ONE of one
process, MANY of any layout. The answer is the first step and place that differ beyond rounding, the ranks, and the
kind of fault. With --bisect the command of a run is run again, up to that step, and the module there in other ways.
Exit status 0: equal; 1: a fault.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from meshwright.core.config import take_flags
from meshwright.core.errors import ConfigError
from meshwright.core.names import around

from .arguments import refuse_rest

if TYPE_CHECKING:
    from meshwright.observation.diagnosis import Finding
    from meshwright.observation.traces import Run

SWITCHES = {
    "recompute": "it gives something else each time it runs",
    "compile": "without the compiler it is right",
    "fused": "with torch's plain attention it is right",
    "dtype": "float64 gives something else",
}
EPS = 2.0**-23
"""How far numbers of float32 are apart."""
WAYS = {"ran": "as it ran", "again": "without the compiler", "plain": "with plain attention too"}


@dataclass(frozen=True)
class BlameOptions:
    noisy: str = ""
    """Trace that observe --noisy wrote beside ONE: how far rounding goes in this model."""
    bisect: str = ""
    """Which of these may make the difference: compile,recompute,fused,dtype. The module at the place runs again from
    what it was given, in float64 and with each switched off."""
    json: bool = False
    """The finding as one JSON object, for programs."""


def run(argv: list[str]) -> int:
    """Print the finding; return 0 if the runs are equal, else 1."""
    options, rest = take_flags(BlameOptions, argv)
    places = [word for word in rest if not word.startswith("-")]
    refuse_rest([word for word in rest if word.startswith("-")] + places[2:], "meshwright blame", BlameOptions)
    if len(places) != 2:
        raise ConfigError("blame takes two traces, that of one process first: meshwright blame one.trace many.trace")
    asked = options.bisect.split(",") if options.bisect else []
    if unknown := set(asked) - SWITCHES.keys():
        raise ConfigError(f"--bisect {options.bisect}: {min(unknown)} is none of {','.join(SWITCHES)}")
    gc.disable()  # among what torch creates there is nothing to collect
    from meshwright.observation.blame import Blame
    from meshwright.observation.traces import Run

    one, many = (Run.read(place) for place in places)
    finding = Blame(one, many, [Run.read(options.noisy)] if options.noisy else []).judge()
    found = asdict(finding)
    if asked and finding.verdict == "fault":
        switch, words = bisect(finding, (many, one), asked)
        found |= {"switch": switch, "words": f"{finding.words}\n{words}"}
    print(json.dumps(found) if options.json else found["words"])
    return 0 if finding.verdict == "sound" else 1


def bisect(finding: Finding, runs: Iterable[Run], asked: list[str]) -> tuple[str, str]:
    """Observe each run's command again, the modules around the place in other ways; return the switch, and words."""
    said = f"bisect: {finding.place} is no module whose outputs were recorded"
    for run in runs:
        steps = (trace["steps"][finding.step - 1 :][:1] for trace in run.ranks)
        known = {event["module"] for step in steps for taken in step for event in taken["forward"]}
        names, command = [name for name in around(finding.place) if name in known], run.ranks[0]["command"]
        if not names or not command:
            continue
        with TemporaryDirectory() as folder:
            flags = [f"{folder}/again", "--again", ",".join(names), "--steps", str(finding.step), "--stop"]
            words = [sys.executable, "-m", "meshwright", "observe", *flags, "--", *command]
            subprocess.run(words, stdout=subprocess.DEVNULL, check=False)
            again = run.read(f"{folder}/again")
        found = [(n, again.step(n, finding.step - 1)["again"]) for n in range(len(again.ranks))]
        for name, rank, errors in ((name, rank, by_name.get(name)) for name in names for rank, by_name in found):
            if errors is None or "problem" in errors:
                said = f"bisect: {name} cannot run again: {errors['problem'] if errors else 'it was not called'}"
                continue
            switch = switch_of(errors, asked)
            far = ", ".join(f"{way} {errors[key]:.1e}" for key, way in WAYS.items())
            said = f"bisect: {name} on rank {rank} of {run.folder}, from float64: {far}"
            if switch:
                return switch, f"{said}: {switch} makes the difference: {SWITCHES[switch]}"
            said += f": none of {', '.join(asked)} does"
    return "", said


def switch_of(errors: dict[str, float], asked: list[str]) -> str:
    """Return the switch that makes the difference, of those asked about; "" if none does.

    Args:
        errors: relative errors against float64, by way of running; "twice": between two runs alike.
    """
    rounding = 10 * max(errors["plain"], EPS)
    is_so = {
        "recompute": errors["twice"] > 10 * EPS,
        "compile": errors["ran"] > max(rounding, 10 * errors["again"]),
        "fused": errors["again"] > rounding,
        "dtype": errors["plain"] > 1e-4,
    }
    return next((switch for switch in SWITCHES if switch in asked and is_so[switch]), "")
