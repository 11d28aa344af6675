"""Run one step in this process, and write its result: ``child '{"target": …, "arguments": …}' OUT``."""

from __future__ import annotations

import importlib
import json
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .machine import NotHereError, SkippedError, hide_packages
from .results import FAILED, NOT_HERE, PASSED, SKIPPED, Result, write_atomically
from .runner import TAIL

OWN = ("meshwright", "benchmarks")
Outcome = tuple[dict[str, Any], list[str]]


def judged(work: Callable[[], Outcome]) -> Result:
    """Run a step's function, and say how it ended; an error is a result too."""
    try:
        figures, lines = work()
    except NotHereError as reason:
        return Result(NOT_HERE, why=str(reason))
    except SkippedError as reason:
        return Result(SKIPPED, why=str(reason))
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in OWN:
            return _failed()
        return Result(SKIPPED, why=f"the package {error.name} is not installed")
    except Exception:  # noqa: BLE001  (the next step goes on)
        return _failed()
    return Result(PASSED, figures=figures, lines=lines)


def _failed() -> Result:
    said = traceback.format_exc().strip()
    print(said, file=sys.stderr)  # the log has all of it
    return Result(FAILED, why="\n".join(said.splitlines()[-TAIL:]))


def call(target: str, arguments: dict[str, Any]) -> Outcome:
    module, _, function = target.partition(":")
    return getattr(importlib.import_module(f"benchmarks.first_contact.{module}"), function)(**arguments)


def main() -> int:
    hide_packages()
    asked, out = json.loads(sys.argv[1]), Path(sys.argv[2])
    result = judged(lambda: call(asked["target"], asked["arguments"]))
    write_atomically(out, json.dumps(asdict(result)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
