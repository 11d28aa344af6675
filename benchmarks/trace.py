"""Comparing a run with a trace: what it costs, and how far from their bounds sound runs stay.

Cost: CPU time of the first three steps of `meshwright train` with the comparison against without, 2 gloo ranks. Both
are taken in the same processes, in rounds that alternate, so that the machine's drift hits both alike. Each round
gives a ratio; the median and a 95 % bound (bootstrap of the median) are printed. Bounds: runs of other seeds, depths
and ties, each in float32 and bfloat16 and in two layouts; of each stage the largest error in units of its bound.

The exit status is 1 where the median of a model as wide as models are (dim 512 and more) is above 1.05, or a sound
run is found to differ.

    OMP_NUM_THREADS=1 python benchmarks/trace.py [--rounds 20] [--dims 128 512 1024] [--seeds 16]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from overhead import bound

from meshwright.planning.layout import Layout
from meshwright.training.config import Config

LIMIT = 1.05
WIDE = 512
STEPS = 3


def config_of(dim: int, rows: int, folder: Path) -> Config:
    text = folder / "text.txt"
    text.write_text("".join(f"line {i} of a text that nobody reads, {i * i}\n" for i in range(20_000)))
    return Config.from_dict(
        {
            "steps": 10,
            "model": {"size": "debug", "dim": dim, "n_layers": 4, "n_heads": 4, "n_kv_heads": 4, "hidden_dim": 3 * dim},
            "data": {"source": [str(text)], "seq_len": 128, "cache": str(folder / "cache")},
            "batch": {"global_batch": rows},
            "layout": {"dp_shard": 2},
            "validation": {"every": 0},
            "checkpoint": {"every": 0},
            "sample": {"tokens": 0},
            "logging": {"tensorboard": "off"},
        }
    )


def written(config: Config, path: str, steps: int) -> None:
    from meshwright.training.views.telling import build_progress
    from meshwright.verification.of_config import write_trace

    with build_progress(is_main=False) as progress:
        write_trace(config, Path(path), steps, progress)


def measure(config: Config, rounds: int) -> list[tuple[float, float]]:
    """On each rank: (plain seconds, compared seconds) of CPU time per round."""
    import torch.distributed as dist

    from meshwright.training.build import build_run
    from meshwright.training.stopping import StopRequest
    from meshwright.training.throughput import StartupTimeline
    from meshwright.training.tracing import TraceCheck
    from meshwright.training.views.telling import build_progress

    with StopRequest() as stop, build_progress(is_main=False) as progress:
        run = build_run(config, StartupTimeline(lambda phase: None), stop.breaks(progress), stop)
        batch = run.feed.next_batch()

        def plain() -> None:
            for _ in range(STEPS):
                run.model.forward_backward(batch)
                run.model.optimizer_step(run.optimizer.optimizer, 1.0)

        def compared() -> None:
            check = TraceCheck(run, run.trace)
            for _ in range(STEPS):
                with check.watching(batch):
                    loss = run.model.forward_backward(batch)
                check.compared(loss, run.model.optimizer_step(run.optimizer.optimizer, 1.0))

        plain()
        compared()
        seconds = []
        for number in range(rounds):
            row = {}
            for step in (plain, compared) if number % 2 else (compared, plain):
                dist.barrier()
                begun = time.process_time()
                step()
                row[step.__name__] = time.process_time() - begun
            seconds.append((row["plain"], row["compared"]))
        return seconds


def trained(config: Config) -> None:
    """A run, whole, that says nothing."""
    from meshwright.core.errors import IntegrityError
    from meshwright.training.trainer import Trainer

    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(IntegrityError):
        Trainer(config).run()


def farthest(pool: Any, seeds: int, folder: Path) -> int:
    """Print, per dtype and stage, the largest error of sound runs in units of its bound.

    How many runs were found to differ.
    """
    largest: dict[str, dict[str, float]] = {"float32": {}, "bfloat16": {}}
    different = runs = 0
    for seed in range(seeds):
        base = config_of(64, 8, folder)
        model = replace(base.model, n_layers=(2, 6)[seed % 2], tied_embeddings=bool(seed % 3))
        base = replace(base, seed=seed, model=model, steps=4, data=replace(base.data, seq_len=32))
        path = str(folder / f"seed{seed}.trace")
        pool.run(written, base, path, 3, world=1)
        for dtype, stages in largest.items():
            for layout, microbatch in ((Layout(dp_shard=4), 0), (Layout(dp_replicate=2, dp_shard=1), 1)):
                runs += 1
                run = folder / f"run{runs}"
                techniques = replace(base.techniques, precision=replace(base.techniques.precision, compute=dtype))
                batch = replace(base.batch, microbatch=microbatch)
                config = replace(
                    base, run=str(run), check_trace=path, layout=layout, techniques=techniques, batch=batch
                )
                pool.run(trained, config, world=layout.world)
                found = json.loads((run / "trace_check.json").read_text())
                different += not found["equal"]
                for row in found["differences"]:
                    if row["bound"]:
                        error = float("inf") if row["error"] is None else row["error"] / row["bound"]
                        stages[row["stage"]] = max(stages.get(row["stage"], 0.0), error)
    for dtype, stages in largest.items():
        print(
            f"{dtype}: largest error / bound: " + ", ".join(f"{stage} {value:.2f}" for stage, value in stages.items())
        )
    print(f"{runs} sound runs, {different} found to differ")
    return different


def main() -> int:
    from meshwright.distributed.process.workers import WorkerPool

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--rows", type=int, default=32, help="of the global batch, 128 tokens each")
    parser.add_argument("--dims", type=int, nargs="+", default=[128, 512, 1024])
    parser.add_argument("--seeds", type=int, default=16)
    options = parser.parse_args()
    print(f"{options.rounds} paired rounds of {STEPS} steps, 2 gloo ranks, 4 blocks, {options.rows} rows of 128 tokens")
    missed = 0
    sys.path.insert(0, str(Path(__file__).parent))
    with WorkerPool(4, threads=1) as pool, tempfile.TemporaryDirectory() as temporary:
        for dim in options.dims:
            folder = Path(temporary) / str(dim)
            folder.mkdir()
            config, path = config_of(dim, options.rows, folder), str(folder / "reference.trace")
            pool.run(written, config, path, STEPS, world=1)
            per_rank = pool.run(measure, replace(config, check_trace=path), options.rounds, world=2)
            rounds = [tuple(sum(rank[i][k] for rank in per_rank) for k in (0, 1)) for i in range(options.rounds)]
            ratios = [compared / plain for plain, compared in rounds]
            middle = statistics.median(ratios)
            print(
                f"dim {dim:4d}: CPU time of compared steps / plain ones: median {middle:.4f}, 95 % bound"
                f" {bound(ratios):.4f};"
                f" plain {statistics.median(plain for plain, _ in rounds) * 1e3:.0f} ms"
            )
            missed += dim >= WIDE and middle > LIMIT
        missed += farthest(pool, options.seeds, Path(temporary))
    return int(missed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
