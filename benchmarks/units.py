"""Blocks per all-gather unit: CPU time of a step of both ranks, beside units of one block; two gloo ranks.

Models with 1, 2, … blocks a unit train on the same rows in the same processes, in short rounds that alternate, so that
the machine's drift hits all alike. A round gives a ratio to one block a unit; the median and its 95 % bound are
printed, beside the bytes that a unit gathers and the plan's memory at the peak of a step.

    OMP_NUM_THREADS=1 python benchmarks/units.py [--shapes 24x64 8x512] [--stages 2 3] [--units 1 4 6 24] [--rounds 15]

A shape is blocks x width; --units 0 is the number that the plan chooses.
"""

from __future__ import annotations

import argparse
import statistics
import time

from overhead import bound


def measure(blocks: int, dim: int, stage: int, units: list[int], rounds: int, steps: int, rows: int):
    """On each rank, for each number of blocks: CPU seconds of each round, the loss, and (blocks, bytes, peak)."""
    import os

    import torch
    import torch.distributed as dist

    from meshwright import Layout, parallelize
    from meshwright.models.decoder_config import DecoderConfig
    from meshwright.planning.memory import plan_memory

    config = DecoderConfig(256, dim, blocks, 4, 4, 3 * dim, 256)
    generator = torch.Generator().manual_seed(int(os.environ["RANK"]))
    tokens = torch.randint(0, 256, (rows, 129), generator=generator)
    batch = {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}
    loops, found, losses = {}, {}, {}
    for number in units:
        techniques = {"zero_stage": stage, "blocks_per_unit": number, "precision": {"compute": "float32"}}
        model = parallelize(config, Layout(dp_shard=2), techniques=techniques, seed=0)
        optimizer = torch.optim.AdamW(model.make_parameter_groups(), lr=1e-3, fused=True)
        loops[number] = model, optimizer
        gathered = max(unit.bytes_gathered for unit in model.plan.units if unit.blocks)
        most = max(len(unit.blocks) for unit in model.plan.units)
        found[number] = most, gathered, plan_memory(model.plan).at_peak
        for _ in range(3):
            losses[number] = float(model.forward_backward(batch))
            model.optimizer_step(optimizer, max_norm=1.0)
    seconds: dict[int, list[float]] = {number: [] for number in units}
    for turn in range(rounds):
        for number in units if turn % 2 else reversed(units):
            model, optimizer = loops[number]
            dist.barrier()
            begun = time.process_time()
            for _ in range(steps):
                model.forward_backward(batch)
                model.optimizer_step(optimizer, max_norm=1.0)
            seconds[number].append(time.process_time() - begun)
    return seconds, losses, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shapes", nargs="+", default=["24x64", "8x512"])
    parser.add_argument("--stages", nargs="+", type=int, default=[2, 3])
    parser.add_argument("--units", nargs="+", type=int, default=[1, 4, 6, 24])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--rows", type=int, default=2, help="of a rank, 128 tokens each")
    asked = parser.parse_args()

    from meshwright.core.dtypes import bytes_text
    from meshwright.distributed.process.workers import WorkerPool

    with WorkerPool(2, threads=1) as pool:
        for shape in asked.shapes:
            blocks, dim = map(int, shape.split("x"))
            units = list(dict.fromkeys([1, *(min(number, blocks) for number in asked.units)]))
            for stage in asked.stages:
                ranks = pool.run(measure, blocks, dim, stage, units, asked.rounds, asked.steps, asked.rows)
                seconds = {n: [sum(each) for each in zip(*(rank[0][n] for rank in ranks), strict=True)] for n in units}
                _, losses, found = ranks[0]
                assert len({round(loss, 5) for loss in losses.values()}) == 1, losses
                for n in units:
                    ratios = [mine / one for mine, one in zip(seconds[n], seconds[1], strict=True)]
                    most, gathered, peak = found[n]
                    print(
                        f"{shape} ZeRO-{stage}, {most} blocks a unit{' (chosen)' * (n == 0)}:"
                        f" {bytes_text(gathered)} a unit, {bytes_text(peak)} at the peak;"
                        f" {statistics.median(ratios):.3f} × (below {bound(ratios):.3f}),"
                        f" {statistics.median(seconds[n]) / asked.steps * 1e3:.1f} ms CPU a step of both ranks",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
