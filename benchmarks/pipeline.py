"""Does a pipeline take as long as its schedule says?

Executed time against the order of actions, played through with the run's own times.

Blocks sleep a while in forward, input gradient and weight gradient, so that ranks overlap on a machine with few
cores. Each schedule runs a few steps; of each, the time from the first action to the last on any rank is divided by
the makespan of the simulation in which every action lasts as long as its kind did on its stage, on average. Exit
status 1 where the median of a schedule is above 1.05.

    python benchmarks/pipeline.py [--ranks 4] [--microbatches 8] [--sleep 0.02] [--steps 5]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any

import torch
from torch import Tensor, nn

from meshwright import Layout, parallelize
from meshwright.distributed.pipeline.run import Pipeline
from meshwright.distributed.process.workers import WorkerPool
from meshwright.distributed.step.deferred import DeferredGradients
from meshwright.models.decoder_config import DecoderConfig
from meshwright.planning.pipeline.orders import KINDS
from meshwright.planning.pipeline.schedule import Action, simulate

GOAL = 1.05
Times = list[tuple[Action, float, float]]


class Padding(torch.autograd.Function):
    """Passes on what it is given, late."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float, deferred: DeferredGradients) -> Tensor:
        ctx.seconds, ctx.deferred = seconds, deferred
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor):
        time.sleep(ctx.seconds)
        if ctx.deferred.is_open:
            ctx.deferred.put_off(lambda: time.sleep(ctx.seconds))
        else:
            time.sleep(ctx.seconds)
        return gradients[0], None, None


def pad(block: nn.Module, seconds: float, deferred: DeferredGradients) -> None:
    forward = block.forward
    block.forward = lambda x, *args: Padding.apply(forward(x, *args), seconds, deferred)


def steps_of(schedule: str, ranks: int, microbatches: int, seconds: float, steps: int) -> list[tuple[int, Times]]:
    """What this rank did and when, step by step."""
    config = DecoderConfig(64, 16, 2 * ranks, n_heads=2, n_kv_heads=1, hidden_dim=24, max_seq_len=16)
    model = parallelize(
        config, Layout(pp=ranks, dp_shard=1), techniques={"pipeline_schedule": schedule}, microbatch_rows=1
    )
    runner = model._runner
    assert isinstance(runner, Pipeline)
    for stage, part in runner.parts.items():
        for block in runner.pipeline.stages[stage].blocks:
            pad(part.module.get_submodule(block), seconds, runner._deferred[stage])
    tokens = torch.zeros((microbatches, 8), dtype=torch.int64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    found = []
    for _ in range(steps):
        model.forward_backward({"tokens": tokens, "labels": tokens})
        said = model.action_times()
        assert said is not None
        found.append(said)
        model.optimizer_step(optimizer)
    return found[1:]


def ratios(by_rank: list[list[tuple[int, Times]]], schedule: str, ranks: int, microbatches: int) -> list[float]:
    """Executed over simulated, step by step."""
    kind = KINDS[schedule]
    order = kind.build(ranks, microbatches, kind.per_rank(2 * ranks, ranks))
    found = []
    for step in zip(*by_rank, strict=True):
        spans = [span for _, times in step for span in times]
        lasted: dict[tuple[int, str], list[float]] = {}
        for action, begin, end in spans:
            lasted.setdefault((action.stage, action.work), []).append(end - begin)
        means = {key: statistics.mean(times) for key, times in lasted.items()}
        simulated = simulate(order, lambda action, means=means: means[action.stage, action.work]).makespan
        found.append((max(end for *_, end in spans) - min(begin for _, begin, _ in spans)) / simulated)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--sleep", type=float, default=0.02)
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    worst = 0.0
    with WorkerPool(options.ranks, threads=1) as pool:
        for schedule in KINDS:
            arguments = (schedule, options.ranks, options.microbatches, options.sleep, options.steps)
            by_rank = pool.run(steps_of, *arguments, world=options.ranks, timeout=300)
            found = ratios(by_rank, schedule, options.ranks, options.microbatches)
            worst = max(worst, median := statistics.median(found))
            print(
                f"{schedule:<24} executed / simulated: median {median:.3f}, from {min(found):.3f} to {max(found):.3f}",
                flush=True,
            )
    return int(worst > GOAL)


if __name__ == "__main__":
    sys.exit(main())
