"""How long does a search of layouts take, and how much memory?

    python benchmarks/layout_search.py

Searches 4,096 H100 for a dense model of 405B parameters and for a mixture of 671B, from their dims alone (without
imports and the model's facts). Exit status 1 where a search takes more than 10 s, or the process more than 2 GiB.
"""

from __future__ import annotations

import resource
import sys
import time

from published.shapes import public_shape

from meshwright.planning.layout import Layout
from meshwright.simulation import search
from meshwright.simulation.cards import machines
from meshwright.simulation.job import Execution, Job

GPUS, MOST_S, MOST_BYTES = 4096, 10.0, 2 << 30
CASES = (("Llama 3.1 405B", 4096, 8192), ("DeepSeekV3", 16_384, 4096))
"""(model, sequences of a step, tokens of a sequence)"""


def main() -> int:
    held = True
    for name, rows, length in CASES:
        model = public_shape(name)
        assert model is not None
        job = Job(model, Layout(dp_shard=GPUS), length, rows, 1, Execution(fused=True), machines("h100", GPUS))
        began = time.perf_counter()
        found = search(job)
        seconds, peak = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        best = found.best[0]
        print(
            f"{name}: {seconds:.1f} s, {found.tried:,} compared, {peak / 1e6:.0f} MB resident at most; the best:"
            f" {best.job.layout}, {best.time.seconds:.2f} s, {best.memory.total / 1e9:.0f} GB"
        )
        held = held and seconds <= MOST_S and peak <= MOST_BYTES
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
