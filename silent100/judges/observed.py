"""Judge by ``meshwright observe`` and ``meshwright blame``, the commands of a user who changes nothing."""

from __future__ import annotations

import json
import os
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from forks import ended, forked, run, serve


def meshwright(*words: str) -> None:
    """Run ``python -m meshwright``, whose commands become forks."""
    os.chdir(Path(words[1]).parents[1])
    subprocess.run = run  # type: ignore[assignment]
    sys.argv = ["meshwright", *words]
    runpy.run_module("meshwright", run_name="__main__", alter_sys=True)


def asked(one: str, many: str, keep: str) -> dict[str, Any]:
    """Answer a question of the scorer."""
    trace, noisy, other = (os.path.join(keep, name) for name in ("one", "noisy", "many"))

    def watched(place: str, command: str, *flags: str) -> int:
        words = [place, "--steps", "12", *flags, "--", *shlex.split(command)]
        return forked(lambda: meshwright("observe", *words), Path(f"{place}.txt"))

    running = [watched(other, many)]
    if not os.path.exists(noisy):
        running.append(watched(trace, one, "--noisy", noisy))
    ended(running)
    said = Path(keep, "said.txt")
    ended([forked(lambda: meshwright("blame", trace, other, "--noisy", noisy, "--json"), said)])
    text = said.read_text(errors="replace")
    try:
        found = json.loads(text.splitlines()[-1])
    except (IndexError, ValueError):
        return {"error": "\n".join(Path(f"{place}.txt").read_text()[-500:] for place in (trace, other)) + text[-300:]}
    return {key: found[key] for key in ("verdict", "place", "step", "kind", "ranks", "words")}


if __name__ == "__main__":
    serve(asked)
