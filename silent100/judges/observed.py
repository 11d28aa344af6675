"""Judge by ``meshwright observe`` and ``meshwright blame``, the commands of a user who changes nothing."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

MESHWRIGHT = [sys.executable, "-m", "meshwright"]


def observing(folder: Path, command: str, *flags: str) -> subprocess.Popen[str]:
    """Start a command under observation."""
    words = [*MESHWRIGHT, "observe", str(folder), "--steps", "12", *flags, "--", *shlex.split(command)]
    environment = {"OMP_NUM_THREADS": "1"} | os.environ
    return subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def main() -> None:
    """Print the finding of ``meshwright blame``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--one")
    parser.add_argument("--many")
    parser.add_argument("--keep", type=Path)
    given = parser.parse_args()
    one, noisy, many = (given.keep / name for name in ("one", "noisy", "many"))
    running = [observing(many, given.many)]
    if not noisy.exists():
        running = [observing(one, given.one, "--noisy", str(noisy)), *running]
    printed = [process.communicate()[0] for process in running]
    words = [*MESHWRIGHT, "blame", str(one), str(many), "--noisy", str(noisy), "--json"]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode not in (0, 1) or not done.stdout.strip():
        sys.exit("\n".join(text[-500:] for text in printed) + done.stderr[-1000:])
    found = json.loads(done.stdout.splitlines()[-1])
    print(json.dumps({key: found[key] for key in ("verdict", "place", "step", "kind", "ranks", "words")}))


if __name__ == "__main__":
    main()
