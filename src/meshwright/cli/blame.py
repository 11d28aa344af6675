"""``meshwright blame ONE MANY [--noisy TRACE] [--bisect WAYS] [--json]``: say where a run first differs from another.

ONE and MANY are traces that 'meshwright observe' wrote, of the same script with the same data and seeds: ONE of one
process, MANY of any layout. The answer is the first step and place that differ beyond rounding, the ranks, and the
kind of fault. With --bisect the command of a run is run again, up to that step, and the module there in other ways.
Exit status 0: equal; 1: a fault.
"""

from __future__ import annotations

import gc
import json
from dataclasses import asdict, dataclass

from meshwright.core.config import take_flags
from meshwright.core.errors import ConfigError

from .arguments import refuse_rest


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
    gc.disable()  # among what torch creates there is nothing to collect
    from meshwright.observation.bisection import SWITCHES, bisect
    from meshwright.observation.blame import Blame
    from meshwright.observation.traces import Run

    asked = options.bisect.split(",") if options.bisect else []
    if unknown := set(asked) - SWITCHES.keys():
        raise ConfigError(f"--bisect {options.bisect}: {min(unknown)} is none of {','.join(SWITCHES)}")
    one, many = (Run.read(place) for place in places)
    finding = Blame(one, many, [Run.read(options.noisy)] if options.noisy else []).judge()
    found = asdict(finding)
    if asked and finding.verdict == "fault":
        switch, words = bisect(finding, (many, one), asked)
        found |= {"switch": switch, "words": f"{finding.words}\n{words}"}
    print(json.dumps(found) if options.json else found["words"])
    return 0 if finding.verdict == "sound" else 1
