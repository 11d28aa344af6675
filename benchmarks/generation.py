"""Times texts that a small model writes: to the first token, and 200 of them, on idle and on busy cores.

    python -m benchmarks.generation [RUN|FOLDER] [--threads 1,2] [--tokens 200] [--rounds 3]

Without a folder, the decoder of ``model.size=demo`` with drawn weights, whose speed is that of a trained one. Busy: two
processes that compute without end beside it. Medians of the rounds are printed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time

import torch

from meshwright import Layout, parallelize
from meshwright.cli.arguments import open_model
from meshwright.distributed.parallel_model import ParallelModel
from meshwright.models.decoder_config import SIZES
from meshwright.training.run.opened import threads_for

PROMPT = list(b"def ")
BUSY = 2


def busy() -> None:
    while True:
        sum(range(10_000))


def timed(model: ParallelModel, tokens: int, threads: int) -> tuple[float, float]:
    """(seconds to the first token, to the last)"""
    torch.set_num_threads(threads)
    begun, heard = time.perf_counter(), []
    model.generate(PROMPT, tokens, temperature=0.8, heard=lambda new: heard.append(time.perf_counter()))
    return heard[0] - begun, heard[-1] - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?")
    parser.add_argument("--threads", default="")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = open_model(options.folder).model() if options.folder else parallelize(SIZES["demo"], Layout(dp_shard=1))
    chosen = threads_for(model.facts.numel)
    numbers = [int(word) for word in options.threads.split(",") if word] or [chosen]
    print(f"{model.facts.numel:,} parameters; 'generate' takes {chosen} thread(s)")
    found: dict[tuple[int, bool], list[tuple[float, float]]] = {}
    for is_busy in (False, True):
        others = [multiprocessing.Process(target=busy, daemon=True) for _ in range(BUSY * is_busy)]
        for other in others:
            other.start()
        for _ in range(options.rounds):
            for threads in numbers:
                found.setdefault((threads, is_busy), []).append(timed(model, options.tokens, threads))
        for other in others:
            other.terminate()
    for (threads, is_busy), times in found.items():
        first, last = (statistics.median(column) for column in zip(*times, strict=True))
        beside = f"beside {BUSY} busy processes" if is_busy else "alone"
        print(f"{threads} thread(s), {beside:<24} first token {first:.3f} s, {options.tokens} tokens {last:.2f} s")


if __name__ == "__main__":
    main()
