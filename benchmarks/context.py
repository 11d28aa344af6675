"""What context parallelism costs and reaches: CPU time, memory, balance, messages.

    OMP_NUM_THREADS=1 python benchmarks/context.py time     [--rounds 20] [--dims 256 512]
    OMP_NUM_THREADS=1 python benchmarks/context.py long     [--tokens 131072] [--ranks 8] [--method ring]
    OMP_NUM_THREADS=1 python benchmarks/context.py held     [--tokens 4096]
    OMP_NUM_THREADS=1 python benchmarks/context.py packed   [--rows 20]
    OMP_NUM_THREADS=1 python benchmarks/context.py families [--only llama gpt2]

``time``: two ranks with rows of 2 T tokens cut, against FSDP over two ranks with rows of T tokens each, whose
attention takes pairs of heads for one head of 2 T tokens: a rank has the same tokens, the same causal attention over
2 T of them, and the same parameters. Both run in the same processes, in rounds that alternate; the median of the
rounds' ratios of CPU time counts. ``long``: one step of a small decoder on one long row; memory of all processes (PSS,
so that shared pages count once). ``held``: the bytes of keys and values that a rank's backward keeps, by method.
``packed``: documents of lognormal lengths, cut over 4, 8 and 16 ranks. ``families``: tiny models of transformers by
every method on threads for ranks, plain, packed and padded; batches whose rehearsal differs from one process are
refused before a step, by all methods alike.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from meshwright.introspection.mixing.arithmetic import Arithmetic

GOAL_TIME, GOAL_GIB, GOAL_WORK = 1.05, 8.0, 1.03


# --- time


def rounds(number: int, dim: int, tokens: int, method: str) -> list[tuple[float, float]]:
    """CPU seconds of a step on cut rows, and of one with whole rows, for each round."""
    import torch
    import torch.nn.functional as F
    from torch import Tensor

    from meshwright import Layout, parallelize
    from meshwright.models.decoder import AttentionCore
    from meshwright.models.decoder_config import DecoderConfig

    def twice_as_long(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = (x.unflatten(1, (-1, 2)).flatten(2, 3) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).unflatten(2, (2, -1)).flatten(1, 2)

    torch.set_num_threads(1)
    config = DecoderConfig(
        1024, dim, 4, n_heads=dim // 64, n_kv_heads=dim // 64, hidden_dim=4 * dim, max_seq_len=2 * tokens
    )
    cut = parallelize(config, Layout(dp_shard=1, cp=2), techniques={"context_parallel_method": method})
    whole = parallelize(config, Layout(dp_shard=2))
    for part in whole.parts:
        for module in part.modules():
            if isinstance(module, AttentionCore):
                module.forward = twice_as_long  # type: ignore[method-assign]
    steps = []
    for model, length in ((cut, 2 * tokens), (whole, tokens)):
        ids = torch.randint(0, 1024, (1, length), generator=torch.Generator().manual_seed(0))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        steps.append(step_of(model, optimizer, {"tokens": ids, "labels": ids}))
    found = []
    for _ in range(number + 1):
        pair = []
        for step in steps:
            begun = time.process_time()
            step()
            pair.append(time.process_time() - begun)
        found.append((pair[0], pair[1]))
    return found[1:]


def step_of(model: Any, optimizer: Any, batch: Any) -> Callable[[], None]:
    def step() -> None:
        model.forward_backward(batch)
        model.optimizer_step(optimizer, 1.0)

    return step


def measure_time(args: argparse.Namespace) -> bool:
    from meshwright.distributed.process.workers import WorkerPool

    fine = True
    with WorkerPool(2) as pool:
        for dim in args.dims:
            found = pool.run(rounds, args.rounds, dim, args.tokens, args.method, timeout=3000)
            ratios = [sum(r[0] for r in ranks) / sum(r[1] for r in ranks) for ranks in zip(*found, strict=True)]
            middle = statistics.median(ratios)
            fine &= middle <= GOAL_TIME
            seconds = statistics.median(r[1] for r in found[0])
            print(
                f"{args.method}, dim {dim}, {args.tokens} tokens per rank: {middle:.3f} x ({min(ratios):.3f} to"
                f" {max(ratios):.3f}, {len(ratios)} rounds; {seconds:.2f} s a rank's step with whole rows)"
            )
    return fine


# --- long rows


def long_step(tokens: int, ranks: int, method: str, recompute: str) -> tuple[float, float]:
    """Loss and seconds of one step."""
    import torch

    from meshwright import Layout, parallelize
    from meshwright.models.decoder_config import DecoderConfig

    torch.set_num_threads(1)
    config = DecoderConfig(256, 64, 2, n_heads=4, n_kv_heads=2, hidden_dim=128, max_seq_len=tokens)
    techniques = {"context_parallel_method": method, "activation_checkpointing": recompute, "loss_chunks": 8}
    model = parallelize(config, Layout(dp_shard=1, cp=ranks), techniques=techniques)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = torch.randint(0, 256, (1, tokens), generator=torch.Generator().manual_seed(0))
    begun = time.monotonic()
    loss = model.forward_backward({"tokens": ids, "labels": ids})
    model.optimizer_step(optimizer, 1.0)
    return float(loss), time.monotonic() - begun


def measure_long(args: argparse.Namespace) -> bool:
    from meshwright.distributed.process.workers import WorkerPool

    with watching_memory() as peak, WorkerPool(args.ranks) as pool:
        found = pool.run(long_step, args.tokens, args.ranks, args.method, args.recompute, timeout=3000)
    loss, seconds = found[0]
    print(
        f"{args.tokens} tokens over {args.ranks} ranks by {args.method}, recompute {args.recompute}: loss {loss:.4f},"
        f" {seconds:.0f} s, at most {peak[0]:.2f} GiB in all processes"
    )
    return peak[0] <= GOAL_GIB


@contextmanager
def watching_memory() -> Iterator[list[float]]:
    """Note the largest sum of this process's and its descendants' memory, in GiB."""
    peak, ended = [0.0], threading.Event()

    def watch() -> None:
        while not ended.wait(0.5):
            peak[0] = max(peak[0], sum(map(proportional_gib, family(os.getpid()))))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        ended.set()
        thread.join()


def family(pid: int) -> Iterator[int]:
    yield pid
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return
    for child in children:
        yield from family(int(child))


def proportional_gib(pid: int) -> float:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 2**20


# --- what is held


def held(tokens: int, ranks: int, kind: str) -> int:
    """Most bytes that one attention keeps for its backward on a rank, with rows of ``tokens``."""
    import torch

    from meshwright.distributed.context.methods import Context, attend
    from meshwright.distributed.context.rows import Reaches, cut_rows
    from meshwright.distributed.exchange import Thread, on_threads
    from meshwright.introspection.mixing.interception import AttentionCall
    from meshwright.introspection.mixing.masks import RowMask, causal
    from meshwright.planning.context.plan import Method

    def job(group: Thread) -> int:
        rows = cut_rows({"tokens": torch.zeros(1, tokens)}, ranks, group.rank)
        q, k, v = (torch.randn(1, heads, len(rows.own[0]), 16, requires_grad=True) for heads in (8, 8, 8))
        reach = Reaches(group).of(RowMask(causal), rows, 1)
        assert reach is not None
        call = AttentionCall(q, k, v, None, True, lambda *given: given[0])
        kept: dict[int, int] = {}

        def note(x: torch.Tensor) -> torch.Tensor:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            out = attend(
                call, Context(group, rows, reach), Arithmetic(), Method(kind, ranks if kind == "ulysses" else 1)
            )
        del out
        return sum(kept.values())

    return max(on_threads(ranks, job))


def measure_held(args: argparse.Namespace) -> bool:
    print("MiB that an attention keeps for its backward, of 8 heads of 16 in fp32, by ranks")
    found = {
        kind: [held(args.tokens, ranks, kind) for ranks in (2, 4, 8)] for kind in ("all_gather", "ring", "ulysses")
    }
    for kind, sizes in found.items():
        print(f"  {kind:10} " + "  ".join(f"{size / 2**20:8.2f}" for size in sizes))
    ring = found["ring"]
    return all(size <= 1.05 * ring[0] / 2**i for i, size in enumerate(ring))


# --- packed rows


def measure_packed(args: argparse.Namespace) -> bool:
    from meshwright.planning.context.documents import cut_documents, work_of
    from meshwright.planning.context.plan import Runs, head_tail

    def held(sizes: list[int], runs: Runs) -> list[list[tuple[int, int]]]:
        """List a rank's runs within each document that it has a part of."""
        ends = pairwise(accumulate(sizes, initial=0))
        every = (
            [(max(a, start) - start, min(b, stop) - start) for a, b in runs if a < stop and start < b]
            for start, stop in ends
        )
        return list(filter(None, every))

    def works(sizes: list[int], cut: tuple[Runs, ...]) -> list[int]:
        return [sum(work_of(*run) for own in held(sizes, runs) for run in own) for runs in cut]

    length, worst_of_all = 2**17, 0.0
    print("documents of lognormal lengths, rows of 131,072 tokens; work: most / mean of the ranks, worst of all rows")
    for ranks in (4, 8, 16):
        for deviation in (1.5, 2.0, 2.5):
            worst, alone, fetched, seconds = 0.0, 0.0, 0, 0.0
            for seed in range(args.rows):
                sizes = lognormal(seed, deviation, length)
                begun = time.process_time()
                cut = cut_documents(sizes, ranks)
                seconds = max(seconds, time.process_time() - begun)
                work, plain = works(sizes, cut), works(sizes, head_tail(length, ranks))
                worst, alone = max(worst, ranks * max(work) / sum(work)), max(alone, ranks * max(plain) / sum(plain))
                # keys before a query of a rank's, in its document, that the rank lacks
                of_ranks = [own for runs in cut for own in held(sizes, runs)]
                fetched += sum(max(b for _, b in own) - sum(b - a for a, b in own) for own in of_ranks)
            worst_of_all = max(worst_of_all, worst)
            share = fetched / args.rows / length / (ranks - 1)
            print(
                f"  {ranks:2} ranks, deviation {deviation}: {worst:.3f} (head and tail alone {alone:.2f}); keys that"
                f" travel {share:.2f} of a gathering's; tokens per rank equal; at most"
                f" {seconds * 1e3:.0f} ms of CPU time a row"
            )
    return worst_of_all <= GOAL_WORK


def lognormal(seed: int, deviation: float, length: int) -> list[int]:
    import math

    draw, sizes = random.Random(seed), []
    median = math.log(draw.choice((512, 768, 1024)))
    while (left := length - sum(sizes)) > 0:
        sizes.append(min(left, max(1, int(draw.lognormvariate(median, deviation)))))
    return sizes


# --- families


def measure_families(args: argparse.Namespace) -> bool:
    import families as tiny

    from meshwright import UnsupportedError
    from meshwright.distributed.context import kernels
    from meshwright.distributed.context.proof import rehearse, rehearsed
    from meshwright.distributed.rehearsal import LARGEST_ERROR
    from meshwright.introspection.mixing.measure import measure_mixing, small_copy
    from meshwright.planning.context.plan import KINDS, plan_methods

    kernels.QUERIES, kernels.KEYS = 5, 4  # rows are short: attention in several blocks
    fine = True
    for family in args.only or tiny.families():
        try:
            model = small_copy(tiny.model_of(family))
            mixing = measure_mixing(model)
        except Exception as error:  # noqa: BLE001  (a family that cannot be made, or is refused)
            print(f"{family:24} refused: {(str(error).splitlines() or [''])[0][:160]}", flush=True)
            continue
        said: list[str] = []
        refused: dict[int, set[str]] = {}
        for kind in ("auto", *KINDS):
            for ranks in (2, 4):
                try:
                    plan = plan_methods(mixing, ranks, 1, kind, "float64")
                    worst = {name: max(rehearse(model, plan, b).values()) for name, b in rehearsed(model).items()}
                except Exception as error:  # noqa: BLE001  (as the rehearsal of a layout does)
                    if not isinstance(error, UnsupportedError) or "context_parallel_method" not in str(error):
                        said.append(f"{kind} {ranks}: refused, {type(error).__name__}: {str(error)[:100]}")
                    continue
                wrong = {name for name, error in worst.items() if not error <= LARGEST_ERROR}
                if wrong != refused.setdefault(ranks, wrong) and any(not name.startswith("padded") for name in wrong):
                    fine = False  # of all methods the rehearsal refuses the same
                right = max((error for name, error in worst.items() if name not in wrong), default=0.0)
                said.append(f"{kind} {ranks}: {right:.0e}" + (f", refused {', '.join(sorted(wrong))}" if wrong else ""))
        print(f"{family:24} {'; '.join(said)}", flush=True)
    return fine


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="what", required=True)
    timed, long, kept, packed, families = map(kinds.add_parser, ("time", "long", "held", "packed", "families"))
    timed.add_argument("--rounds", type=int, default=20)
    timed.add_argument("--dims", type=int, nargs="+", default=[256, 512])
    timed.add_argument("--tokens", type=int, default=1024)
    timed.add_argument("--method", default="auto")
    long.add_argument("--tokens", type=int, default=2**17)
    long.add_argument("--ranks", type=int, default=8)
    long.add_argument("--method", default="ring")
    long.add_argument("--recompute", default="none")
    kept.add_argument("--tokens", type=int, default=4096)
    packed.add_argument("--rows", type=int, default=20)
    families.add_argument("--only", nargs="+")
    args = parser.parse_args()
    measure = {
        "time": measure_time,
        "long": measure_long,
        "held": measure_held,
        "packed": measure_packed,
        "families": measure_families,
    }
    return int(not measure[args.what](args))


if __name__ == "__main__":
    sys.exit(main())
