"""The host's own work in a step, by axis and depth: calls of this package's functions and seconds inside them.

Calls are exact. Seconds are those of cProfile, which makes Python functions some two to four times slower, without
those inside torch and inside the model's code. Both are given for a block and a microbatch, between one depth and the
next; equal numbers in a row mean that a step costs the same for each block.

    OMP_NUM_THREADS=1 python benchmarks/host_time.py [--blocks 8 32 128]
"""

from __future__ import annotations

import argparse
import sys
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))  # support


def measure(axis: str, blocks: int) -> tuple[int, float, int]:
    """Return calls, seconds and blocks of a rank, each times its microbatches."""
    from support.host_time import laid_out, own_calls, own_seconds

    step = laid_out(axis, blocks)
    return sum(own_calls(step).values()), min(own_seconds(step, 3) for _ in range(3)), blocks // (1 + (axis == "pp"))


def main() -> int:
    from support.host_time import AXES

    from meshwright.distributed.process.workers import WorkerPool

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, nargs="+", default=[8, 32, 128])
    options = parser.parse_args()
    grown = 0
    for axis in AXES:
        with WorkerPool(2, threads=1) as pool:
            found = [pool.run(measure, axis, blocks, timeout=600)[0] for blocks in options.blocks]
        slopes = [((c - a) / (n - m), (d - b) / (n - m) * 1e6) for (a, b, m), (c, d, n) in pairwise(found)]
        depths = [f"{calls:.0f} calls, {micro:.0f} µs" for calls, micro in slopes]
        print(f"{axis:<9}a block more: {'; '.join(depths)} ({' → '.join(map(str, options.blocks))} blocks)", flush=True)
        grown += slopes[-1][0] > slopes[0][0]
    return int(grown > 0)


if __name__ == "__main__":
    raise SystemExit(main())
