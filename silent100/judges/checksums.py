"""Judge by checksums of the final weights, which the script writes with ``--save``.

A tensor's checksum is its sum of squares, so shards add up to the whole; replicas are counted once.
"""

from __future__ import annotations

import functools
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from forks import finish, serve

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from silent100.states import read_states


@functools.cache
def final(command: str, keep: str) -> dict[str, float]:
    """Run a command that saves its state; return checksums by name, over all ranks."""
    folder = tempfile.mkdtemp(dir=keep)
    finish(f"{command} --save {folder}", folder, os.devnull)
    pieces: dict[tuple[str, int], list[float]] = {}
    for state in read_states(Path(folder)):
        for piece, tensor in state.items():
            pieces.setdefault(piece, []).append(float(tensor.double().square().sum()))
    found: dict[str, float] = {}
    for (name, _), copies in pieces.items():
        found[name] = found.get(name, 0.0) + sum(copies) / len(copies)
    return found


def asked(one: str, many: str, keep: str, bound: float = 1e-5) -> dict[str, Any]:
    """Answer with the first parameter whose checksum differs by more than a bound."""
    theirs, mine = final(one, keep), final(many, keep)
    off = [name for name in theirs if name in mine and not abs(mine[name] - theirs[name]) <= bound * theirs[name]]
    return {"verdict": "fault", "place": off[0] if len(off) < len(theirs) else ".+"} if off else {"verdict": "sound"}


if __name__ == "__main__":
    serve(asked)
