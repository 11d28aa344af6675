"""A step of direct preference optimisation in long rows against one in short rows: time in paired rounds.

Both runs train the built-in decoder in one process on the same pairs, whose answers have 64 tokens; one has a
``data.seq_len`` of 64, the other of 2,048. Rows end where the longest of their microbatch ends, so both compute the
same. Steps alternate in this process.

The exit status is 1 where the median ratio is above 1.1, or the losses differ by more than 1e-6.

    OMP_NUM_THREADS=1 python benchmarks/preference.py [--rounds 20] [--dim 128] [--rows 8]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

GOAL, EQUAL = 1.1, 1e-6
SHORT, LONG = 64, 2048


def run_of(seq_len: int, folder: Path, args: argparse.Namespace) -> Any:
    """Build the run with rows of at most ``seq_len`` tokens."""
    from meshwright.core.config import from_dict
    from meshwright.training.build import build_run
    from meshwright.training.config import Config
    from meshwright.training.preference import pretend_references
    from meshwright.training.stopping import StopRequest
    from meshwright.training.throughput import StartupTimeline
    from meshwright.training.views.progress import Progress

    told = {
        "steps": 100,
        "model": {"dim": args.dim, "n_layers": 4, "n_heads": 4, "max_seq_len": LONG},
        "data": {"source": [str(folder / "pairs.jsonl")], "seq_len": seq_len, "cache": str(folder)},
        "batch": {"global_batch": args.rows},
    }
    run = build_run(from_dict(Config, told), StartupTimeline(lambda phase: None), Progress(), StopRequest())
    pretend_references(run.config, run.feed)
    return run


def step(run: Any) -> tuple[float, float]:
    """Take a step; return its seconds and its loss."""
    began = time.perf_counter()
    loss = float(run.model.forward_backward(run.feed.next_batch()))
    run.model.optimizer_step(run.optimizer.optimizer, 1.0)
    return time.perf_counter() - began, loss


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--rows", type=int, default=8)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = [{"prompt": "", "chosen": f"{i:063d}", "rejected": f"{i:x}".rjust(63, "-")} for i in range(64)]
        (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        short, long = (run_of(seq_len, folder, args) for seq_len in (SHORT, LONG))
        for run in (short, long):
            step(run)
        ratios, apart, seconds = [], 0.0, []
        for number in range(args.rounds):
            pair = {id(run): step(run) for run in ((short, long) if number % 2 else (long, short))}
            (one, loss), (other, same) = pair[id(short)], pair[id(long)]
            ratios.append(other / one)
            seconds.append(one)
            apart = max(apart, abs(loss - same) / abs(loss))
        for run in (short, long):
            run.feed.loader.close()
    ratio = statistics.median(ratios)
    print(
        f"DPO, answers of {SHORT} tokens: a step at data.seq_len = {LONG} takes {ratio:.3f} x one at {SHORT}"
        f" ({statistics.median(seconds):.3f} s; {args.rounds} rounds; goal {GOAL}); losses apart by {apart:.1e}"
    )
    return int(ratio > GOAL or apart > EQUAL)


if __name__ == "__main__":
    sys.exit(main())
