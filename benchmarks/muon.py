"""Muon on 2 ranks against one process's share: CPU time of a step, in paired rounds.

One process's is Muon by hand in plain torch, on whole tensors: momentum, Newton–Schulz, decay, update. Its share is
half of that. Ours is ``Muon.step`` of each of 2 gloo ranks, on matrices cut by FSDP2 or copied. Both step the hidden
matrices of 4 blocks alone, in float32, with one thread, in the same processes by turns. Each round gives two ratios of
the busier rank: of Newton–Schulz alone, and of the whole step, where ours has messages and their copies too.

The exit status is 1 where the median of Newton–Schulz's is above 1.05.

    OMP_NUM_THREADS=1 python benchmarks/muon.py [--rounds 20] [--dims 256 512]
"""

from __future__ import annotations

import argparse
import statistics
import time


def shapes_of(dim: int) -> list[tuple[int, int]]:
    """The matrices of 4 blocks with as many key heads as heads, and 3 times as many hidden features."""
    return [*[(dim, dim)] * 4, (3 * dim, dim), (3 * dim, dim), (dim, 3 * dim)] * 4


def by_hand(weights, gradients, means):
    """A step in one process; returns seconds of CPU time of Newton–Schulz."""
    import torch

    spent = 0.0
    for w, g, m in zip(weights, gradients, means, strict=True):
        m.lerp_(g, 0.05)
        x = g.lerp(m, 0.95)
        begun = time.process_time()
        stands = x.shape[0] > x.shape[1]
        x = x.T if stands else x
        x = x / x.norm().clamp(min=1e-7)
        for _ in range(5):
            gram = x @ x.T
            x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=-4.775, alpha=2.0315), x, beta=3.4445)
        x = x.T if stands else x
        spent += time.process_time() - begun
        w.mul_(1 - 1e-3 * 0.1)
        w.add_(x, alpha=-1e-3 * 0.2 * max(w.shape) ** 0.5)
    return spent


def measure(dim: int, rounds: int, layout: str):
    """On each rank and for each round: seconds of CPU time of (Newton–Schulz, step) in one process and by ours."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.tensor import Shard, distribute_tensor

    from meshwright import Layout
    from meshwright.distributed.optimizer import muon
    from meshwright.distributed.setup import init_distributed

    sizes = {"FSDP2": Layout(dp_shard=2), "replicas": Layout(dp_replicate=2, dp_shard=1)}[layout]
    mesh = init_distributed(sizes, 0)
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(shape, generator=generator) for shape in shapes_of(dim)]
    gradients = [torch.randn(shape, generator=generator) for shape in shapes_of(dim)]
    means = [torch.zeros_like(weight) for weight in weights]

    def laid(tensor):
        if layout == "FSDP2":
            return distribute_tensor(tensor, mesh["dp_shard"], [Shard(0)], src_data_rank=None)
        return tensor.clone()

    parameters = [nn.Parameter(laid(weight)) for weight in weights]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = laid(gradient)
    plain, spent = muon.orthogonalised, []

    def timed(matrix, steps):
        begun = time.process_time()
        found = plain(matrix, steps)
        spent.append(time.process_time() - begun)
        return found

    muon.orthogonalised = timed
    optimizer = muon.Muon([{"params": parameters, "use_muon": True}])
    optimizer.share_out(mesh)

    def ours():
        spent.clear()
        optimizer.step()
        return sum(spent)

    steps = {"one": lambda: by_hand(weights, gradients, means), "ours": ours}
    seconds = []
    for number in range(rounds + 2):
        row = {}
        for name in ("one", "ours") if number % 2 else ("ours", "one"):
            dist.barrier()
            begun = time.process_time()
            inside = steps[name]()
            row[name] = (inside, time.process_time() - begun)
        seconds.append((row["one"], row["ours"]))
    return seconds[2:]


def main() -> int:
    from meshwright.distributed.process.workers import WorkerPool

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--dims", type=int, nargs="+", default=[256, 512])
    options = parser.parse_args()
    missed = 0
    with WorkerPool(2, threads=1) as pool:
        for layout in ("FSDP2", "replicas"):
            for dim in options.dims:
                ranks = pool.run(measure, dim, options.rounds, layout, timeout=600.0)
                found = []
                for part in (0, 1):
                    shares = [sum(rank[i][0][part] for rank in ranks) / len(ranks) / 2 for i in range(options.rounds)]
                    busier = [max(rank[i][1][part] for rank in ranks) / shares[i] for i in range(options.rounds)]
                    found.append((statistics.median(busier), 1000 * statistics.median(shares)))
                missed += found[0][0] > 1.05
                print(
                    f"{layout}, dim {dim}: {options.rounds} paired rounds, CPU time of the busier rank / one process's"
                    f" share: Newton–Schulz {found[0][0]:.3f} ({found[0][1]:.1f} ms), whole step {found[1][0]:.3f}"
                    f" ({found[1][1]:.1f} ms)"
                )
    return int(missed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
