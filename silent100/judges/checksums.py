"""Judge by checksums of the final weights, which the script writes with ``--save``.

A tensor's checksum is its sum of squares, so shards add up to the whole; replicas are counted once.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from silent100.states import read_states


def final(command: str) -> dict[str, float]:
    """Run a command that saves its state; return checksums by name, over all ranks."""
    with tempfile.TemporaryDirectory() as folder:
        words = [*shlex.split(command), "--save", folder]
        subprocess.run(words, capture_output=True, env={"OMP_NUM_THREADS": "1"} | os.environ)
        pieces: dict[tuple[str, int], list[float]] = {}
        for state in read_states(Path(folder)):
            for piece, tensor in state.items():
                pieces.setdefault(piece, []).append(float(tensor.double().square().sum()))
    found: dict[str, float] = {}
    for (name, _), copies in pieces.items():
        found[name] = found.get(name, 0.0) + sum(copies) / len(copies)
    return found


def main() -> None:
    """Print the first parameter whose checksum differs by more than a bound."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--one")
    parser.add_argument("--many")
    parser.add_argument("--keep")
    parser.add_argument("--bound", type=float, default=1e-5)
    given = parser.parse_args()
    one, many = final(given.one), final(given.many)
    off = [name for name in one if name in many and not abs(many[name] - one[name]) <= given.bound * one[name]]
    answer = {"verdict": "fault", "place": off[0] if len(off) < len(one) else ".+"} if off else {"verdict": "sound"}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
