"""Find the switch that makes a module differ, by running the module again in other ways."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

from meshwright.core.names import around

from .findings import Finding
from .traces import Run

SWITCHES = {
    "recompute": "it gives something else each time it runs",
    "compile": "without the compiler it is right",
    "fused": "with torch's plain attention it is right",
    "dtype": "float64 gives something else",
}
EPS = 2.0**-23
"""How far numbers of float32 are apart."""
WAYS = {"ran": "as it ran", "again": "without the compiler", "plain": "with plain attention too"}


def bisect(finding: Finding, runs: Iterable[Run], asked: list[str]) -> tuple[str, str]:
    """Observe each run's command again, the modules around the place in other ways; return the switch, and words."""
    said = f"bisect: {finding.place} is no module whose outputs were recorded; --parameters-alone records none"
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
            if not any(Path(folder, "again").glob("rank-*.pt")):
                said = f"bisect: in this folder '{' '.join(command)}' takes no step when it runs again"
                continue
            again = run.read(f"{folder}/again")
        found = [(n, again.step(n, finding.step - 1)["again"]) for n in range(len(again.ranks))]
        for name, rank, errors in ((name, rank, by_name.get(name)) for name in names for rank, by_name in found):
            if errors is None or "problem" in errors:
                said = f"bisect: {name} cannot run again: {errors['problem'] if errors else 'it was not called'}"
                continue
            rounding = 10 * max(errors["plain"], EPS)
            is_so = {
                "recompute": errors["twice"] > 10 * EPS,
                "compile": errors["ran"] > max(rounding, 10 * errors["again"]),
                "fused": errors["again"] > rounding,
                "dtype": errors["plain"] > 1e-4,
            }
            switch = next((switch for switch in SWITCHES if switch in asked and is_so[switch]), "")
            far = ", ".join(f"{way} {errors[key]:.1e}" for key, way in WAYS.items())
            said = f"bisect: {name} on rank {rank} of {run.folder}, from float64: {far}"
            if switch:
                return switch, f"{said}: {switch} makes the difference: {SWITCHES[switch]}"
            said += f": none of {', '.join(asked)} does"
    return "", said
