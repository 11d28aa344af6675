"""Every axis over several devices, NCCL between them: parity with plain torch, and tokens per second.

Started alone it starts torchrun over the GPUs of this machine, one run for each layout, and resumes like first contact.
Started by torchrun or srun it is a rank of that world, and tries all layouts in turn:

    PYTHONPATH=src python -m benchmarks.first_contact.cluster [--ranks N] [--dry]
    PYTHONPATH=src srun --ntasks-per-node=8 python -m benchmarks.first_contact.cluster
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from .child import Outcome, judged
from .machine import DRY, SkippedError, hide_packages, machine
from .page import section, summary
from .results import FAILED, PASSED, Result, Results, sources_key, write_atomically
from .runner import ROOT, OutOfTime, Step, run_child, run_steps

AXES = ("dp_shard", "dp_replicate", "tp", "cp", "pp", "ep")
MOST = {"tp": 4, "pp": 4, "ep": 4}
"""Key heads, layers and experts of the small model; the rest of the ranks hold other rows. In a dry run each is 2."""


def sizes_of(axis: str, world: int, most: int) -> dict[str, int]:
    """Return a layout that fills a world with one axis, as far as the model lets it, and shards over the rest.

    Raises:
        SkippedError: the axis would have one rank.
    """
    if axis in ("dp_shard", "dp_replicate", "cp"):
        return {"dp_shard": 1, axis: world}
    size = max(n for n in range(1, most + 1) if world % n == 0)
    if size == 1:
        raise SkippedError(f"{world} ranks have no axis of 2 to {most} in them")
    return {"dp_shard": world if axis == "ep" else world // size, axis: size}


def try_axis(axis: str) -> Outcome:
    """Compare an axis with plain torch on each rank's device, then time a larger model. Collective."""
    from meshwright import Layout
    from meshwright.distributed.process.world import get_world_info

    from .parity import judge
    from .problem import Problem, laid_out, limits

    rank, _, world = get_world_info()
    here = machine()
    sizes = sizes_of(axis, world, 2 if here.is_dry else MOST.get(axis, world))
    problem = Problem(experts=axis == "ep", rows=4 * world)
    found = laid_out(problem, Layout(**sizes))
    reference, bounds = limits(problem)
    figures, lines = judge(found, reference, bounds) if rank == 0 else ({}, [])
    speed, foreseen, peak = timed(sizes, experts=axis == "ep")
    words = f"{speed:,.0f} tokens/s; {peak / 1e9:.1f} GB on rank 0, model states foreseen {foreseen / 1e9:.1f} GB"
    return {**figures, "layout": sizes, "tokens/s": speed, "bytes": peak}, [*lines, f"{sizes}: {words}"]


def timed(sizes: dict[str, int], *, experts: bool) -> tuple[float, int, int]:
    """Return tokens/s of all ranks, and the bytes of model states foreseen and of all that was held."""
    from meshwright import Layout, parallelize
    from meshwright.models.decoder_config import SIZES
    from meshwright.planning.memory.states import plan_memory
    from meshwright.training.memory import read_memory, reset_peak
    from meshwright.training.optimizer import make_optimizer

    from .speed import MIXED, MIXTURE, Setting, batch_of

    here = machine()
    setting = Setting(MIXTURE if experts else SIZES["1B"], {"precision": MIXED}, rows=4, seq=2048).on(here.is_dry)
    model = parallelize(setting.config, Layout(**sizes), techniques=setting.techniques)
    optimizer = make_optimizer(model.make_parameter_groups(), lr=1e-4).optimizer
    batch = batch_of(setting.config, setting.rows, setting.seq, model.device)

    def step() -> float:
        begun = time.perf_counter()
        model.forward_backward(batch)
        model.optimizer_step(optimizer, max_norm=1.0)
        here.finish()
        return time.perf_counter() - begun

    for _ in range(2):
        step()
    reset_peak(model.device)
    seconds = statistics.median(step() for _ in range(setting.steps))
    tokens = setting.rows * setting.seq * model.plan.data_ranks
    return tokens / seconds, plan_memory(model.plan).at_peak, read_memory(model.device).peak


def be_rank(axes: Sequence[str], out: Path | None) -> int:
    """Try axes as a rank of a world; the first rank writes the last one's result, or prints all."""
    from meshwright.distributed import DistributedConfig, destroy_distributed, init_distributed
    from meshwright.distributed.process.world import get_world_info

    here, failed = machine(), False
    rank, _, world = get_world_info()
    backend = {"backend": here.backend} if here.is_dry else {}
    init_distributed(DistributedConfig(dp_shard=world, **backend))
    for axis in axes:
        result = judged(lambda axis=axis: try_axis(axis))
        failed |= result.status == FAILED
        if rank == 0 or result.status == FAILED:
            print(f"rank {rank}, {axis}: {result.status} {'; '.join(result.lines)} {result.why}", flush=True)
        if rank == 0 and out is not None:
            write_atomically(out, json.dumps(vars(result)))
    destroy_distributed()
    return int(failed)


def launch(axis: str, ranks: int) -> Outcome:
    """Try an axis in a world of its own, by torchrun."""
    import subprocess
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command += ["-m", "benchmarks.first_contact.cluster", "--axis", axis, "--out", str(out)]
        done = subprocess.run(command, cwd=ROOT, check=False)
        result = Result(**json.loads(out.read_text())) if out.exists() else None
    if result is None or result.status == FAILED:
        raise RuntimeError(result.why if result else f"torchrun ended with status {done.returncode}: see the log")
    if result.status != PASSED:
        raise SkippedError(result.why)
    assert done.returncode == 0, f"a rank failed: torchrun ended with status {done.returncode}"
    return result.figures, result.lines


def count_devices() -> Outcome:
    here = machine()
    return {"name": here.name, "devices": here.module.device_count()}, []


def start_worlds(asked: argparse.Namespace) -> int:
    """Try each axis over the devices of this machine."""
    import importlib.metadata

    asked.cache.mkdir(parents=True, exist_ok=True)
    found = run_child(Step("devices", "cluster:count_devices"), asked.cache, 120)
    ranks = asked.ranks or (found.figures.get("devices", 0) if found else 0)
    if found is None or found.status != PASSED or ranks < 2:
        print(found.why if found and found.why else "one device alone: make gpu", file=sys.stderr)
        return 2
    folder = asked.cache / re.sub(r"[^A-Za-z0-9.-]+", "-", f"{ranks} {found.figures['name']}")
    results = Results(folder, sources_key(ROOT / "src" / "meshwright", importlib.metadata.version("torch")))
    steps = [Step("facts", "facts:facts")]
    steps += [
        Step(f"cluster/{a}", "cluster:launch", {"axis": a, "ranks": ranks}, 1500 if asked.dry else 300)
        for a in asked.axis or AXES
    ]
    status = 0
    try:
        run_steps(steps, results, again=asked.again, minutes=asked.minutes, say=lambda line: print(line, flush=True))
    except (KeyboardInterrupt, OutOfTime) as stop:
        status = 130 if isinstance(stop, KeyboardInterrupt) else 3
    text = section(results.steps, is_dry=asked.dry)
    write_atomically(folder / "results.md", text)
    print(f"\n{text}\n{summary(results.steps)}; {results.path}")
    return status or int(results.count(FAILED) > 0)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--axis", action="append", choices=AXES, help="this one; by default all")
    parser.add_argument("--ranks", type=int, default=0, help="processes; by default as many as there are GPUs")
    parser.add_argument("--dry", action="store_true", help="on the pretend device, with tiny sizes")
    parser.add_argument("--again", action="append", default=[], metavar="PATTERN", help="repeat these")
    parser.add_argument("--minutes", type=float, default=0.0, help="begin nothing after these; 0: no end")
    parser.add_argument("--cache", type=Path, default=ROOT / ".cache" / "gpu")
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    os.environ |= {DRY: "1"} if asked.dry else {}
    hide_packages()
    if "RANK" in os.environ or "SLURM_PROCID" in os.environ:
        return be_rank(asked.axis or AXES, asked.out)
    return start_worlds(asked)


if __name__ == "__main__":
    raise SystemExit(main())
