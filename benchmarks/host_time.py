"""The host's own work in a step, by axis and depth: calls of this package's functions and seconds inside them.

Calls are exact. Seconds are those of cProfile, which makes Python functions some two to four times slower, without
those inside torch and inside the model's code. Both are given for a block and a microbatch, between one depth and the
next; equal numbers in a row mean that a step costs the same for each block.

With ``--torch`` all Python calls, operators and messages of a step, beside those of a step by torch alone: FSDP2 and
DDP, parallelize_module, its pipeline schedule, a ring written by hand. The exit status is 1 where ours makes more calls
than tests/support/step_counts allows.

    OMP_NUM_THREADS=1 python benchmarks/host_time.py [--blocks 8 32 128] [--torch]
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


def beside_torch(depths: list[int]) -> int:
    from support.step_counts import WAYS, counted, largest

    from meshwright.distributed.process.workers import WorkerPool

    missed = 0
    with WorkerPool(2, threads=1) as pool:
        for name, way in WAYS.items():
            for blocks in depths:
                sides = (pool.run(counted, name, is_ours, blocks, world=2, timeout=600) for is_ours in (True, False))
                (ours, *mine, _), (bare, *theirs, _) = map(largest, sides)
                counts = f"{ours} / {bare} calls, {mine[0]} / {theirs[0]} operators, {mine[1]} / {theirs[1]} messages"
                print(f"{name:<16}{blocks} blocks: {ours / bare:.3f} (≤ {way.share}): {counts}", flush=True)
                missed += ours > way.share * bare
    return int(missed > 0)


def main() -> int:
    from support.host_time import AXES

    from meshwright.distributed.process.workers import WorkerPool

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, nargs="+", default=[8, 32, 128])
    parser.add_argument("--torch", action="store_true")
    options = parser.parse_args()
    if options.torch:
        return beside_torch(options.blocks)
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
