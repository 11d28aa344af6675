"""Measure the CPU time that a rank spends on a layout before any process group exists: facts, plan, rehearsal.

Our 8B decoder on tp = 8 × dp_shard = 8, planned for 64 ranks. Each run is a fresh process, since imports count once:
the time of ``import torch`` is not in the figures. ``python -m benchmarks.planning [RUNS] [SOURCES …]`` takes the
smallest of RUNS (default 5) runs in turn for each folder of sources, so that two states of the code are compared
under the same load. The exit status is 1 where the last of several takes more than half of the first.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parents[1] / "src"
MEASURED = """
import json, time
import torch
from meshwright import Layout, plan
from meshwright.distributed import parallelize as laying_out
from meshwright.introspection.cluster import Cluster
from meshwright.introspection.facts import model_facts
from meshwright.introspection.source import as_module
from meshwright.models.decoder_config import SIZES
from meshwright.distributed.tensor.parallel import prove
begin = time.process_time()
facts = model_facts(as_module(SIZES["8B"]))
known = time.process_time()
made = plan(facts, Layout(dp_shard=8, tp=8), cluster=Cluster(64, 8, "cpu"))
planned = time.process_time()
prove(facts, made.tensor)
proven = time.process_time()
print(json.dumps([known - begin, planned - known, proven - planned]))
"""


def seconds(sources: Path) -> list[float]:
    """Run once; CPU seconds of facts, plan and rehearsal."""
    environment = {**os.environ, "PYTHONPATH": str(sources), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", MEASURED], env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main(runs: int, folders: list[Path]) -> int:
    found: dict[Path, list[list[float]]] = {folder: [] for folder in folders}
    for _ in range(runs):
        for folder in folders:
            found[folder].append(seconds(folder))
    first = min(map(sum, found[folders[0]]))
    for folder, times in found.items():
        best = min(times, key=sum)
        parts = ", ".join(f"{name} {part:.2f}" for name, part in zip(("facts", "plan", "rehearsal"), best, strict=True))
        print(f"{folder}: {sum(best):.2f} s of CPU time ({parts}); {sum(best) / first:.2f} of the first")
    last = min(map(sum, found[folders[-1]]))
    return int(len(folders) > 1 and last > first / 2)


if __name__ == "__main__":
    arguments = sys.argv[1:]
    times = int(arguments.pop(0)) if arguments and arguments[0].isdigit() else 5
    sys.exit(main(times, [Path(path).resolve() for path in arguments] or [HERE]))
