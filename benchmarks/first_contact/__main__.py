"""First contact with a GPU, in one command; docs/gpu.md says what it does and how it resumes.

    PYTHONPATH=src python -m benchmarks.first_contact [--dry] [--only PATTERN] [--again STEP] [--minutes 25]

The exit status is 1 if a step failed, 2 where there is no GPU, 3 if the minutes are over before the last step, and 130
after Ctrl-C.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import re
import sys
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

from .machine import DRY, WITHOUT, hide_packages
from .page import section, summary
from .results import FAILED, PASSED, Result, Results, sources_key, write_atomically
from .runner import ROOT, OutOfTime, Step, run_child, run_steps

CACHE = ROOT / ".cache" / "gpu"


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="on the pretend device, with tiny sizes")
    parser.add_argument("--only", action="append", default=[], metavar="PATTERN", help="steps by name: parity/*")
    parser.add_argument(
        "--again", action="append", default=[], metavar="PATTERN", help="repeat these; failed: all such"
    )
    parser.add_argument("--minutes", type=float, default=25.0, help="begin no step after these; 0: no end")
    parser.add_argument("--without", default="", metavar="PACKAGES", help="hide packages, as on a bare machine: a,b")
    parser.add_argument("--cache", type=Path, default=CACHE, help="folder of the results (.cache/gpu)")
    parser.add_argument("--list", action="store_true", help="name the steps and end")
    return parser.parse_args(arguments)


def find_device(folder: Path) -> Result:
    """Ask a process of its own for the device's name, so that this one never starts CUDA."""
    folder.mkdir(parents=True, exist_ok=True)
    found = run_child(Step("name", "facts:name"), folder, 120)
    return found or Result(FAILED, why="torch did not find the device within 120 s")


def main(arguments: Sequence[str] | None = None) -> int:
    asked = options(arguments)
    os.environ |= {DRY: "1"} if asked.dry else {}
    os.environ |= {WITHOUT: asked.without} if asked.without else {}
    hide_packages()
    from .plan import steps

    chosen = [
        step
        for step in steps(asked.cache)
        if not asked.only or any(fnmatch(step.name, pattern) for pattern in asked.only)
    ]
    if asked.list or not chosen:
        print("\n".join(step.name for step in chosen) or f"no step is named {' or '.join(asked.only)}: --list")
        return 0 if chosen else 2
    found = find_device(asked.cache)
    if found.status != PASSED:
        print(found.why, file=sys.stderr)
        return 2
    return run(asked, found.figures["name"])


def run(asked: argparse.Namespace, device: str) -> int:
    """Run the steps on a device, write the results, and return the exit status."""
    from .plan import steps

    folder = asked.cache / re.sub(r"[^A-Za-z0-9.-]+", "-", device).strip("-")
    results = Results(folder, sources_key(ROOT / "src" / "meshwright", importlib.metadata.version("torch")))
    if results.set_aside is not None:
        print(f"meshwright's sources or torch have changed: the results before are stale, kept in {results.set_aside}")
    patience = 5.0 if asked.dry else 1.0  # a dry run may share its cores with others
    chosen = [
        s
        for s in steps(folder, patience=patience)
        if not asked.only or any(fnmatch(s.name, pattern) for pattern in asked.only)
    ]
    print(f"{len(chosen)} steps on {device}; results in {results.path}", flush=True)
    status = 0
    try:
        run_steps(chosen, results, again=asked.again, minutes=asked.minutes, say=lambda line: print(line, flush=True))
    except KeyboardInterrupt:
        status = 130
    except OutOfTime:
        status = 3
    text = section(results.steps, is_dry=asked.dry)
    write_atomically(folder / "results.md", text)
    print(f"\n{text}\n{summary(results.steps)}; {results.path}, {folder / 'results.md'}")
    if status:
        print("stopped" if status == 130 else f"{asked.minutes:g} minutes are over", "- the same command goes on here")
    return status or int(results.count(FAILED) > 0)


if __name__ == "__main__":
    raise SystemExit(main())
