"""How fast samples are read from a warm cache by one worker, and how long a seek takes.

    python benchmarks/data.py [--tokens 50000000] [--seq-len 2048] [--rows 8] [--seconds 3]

Writes a corpus of random documents into a temporary cache, then reads batches with ``data.workers = 1`` and counts
tokens per second (labels, positions and document ids are made too). The seek is to sample 10**9 of a mixture of five
sources with a curriculum. Below 50 M tokens per second, or with a seek above 10 ms, the exit status is 1.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from meshwright.data import Interleave, Loader, Samples, SourceOptions, Stage, Whole, open_corpus, prepare
from meshwright.data.tokenizers import IdTokenizer


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=50_000_000)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=3.0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        corpus = open_corpus(make(Path(folder), args.tokens))
        samples = Samples.of([corpus.training], args.seq_len, seed=0)
        rates = [tokens_per_second(samples, args) for _ in range(5)]
        talks = Samples.of([conversations(args.tokens // 10)], args.seq_len, seed=0)
        talk_rates = [tokens_per_second(talks, args) for _ in range(5)]
        stages = [Stage(0, (5.0, 1.0, 2.0, 0.3, 0.01)), Stage(10**8, (1.0, 1.0, 0.0, 1.0, 1.0))]
        five = Samples.of([corpus.training] * 5, args.seq_len, 0, list("abcde"), Interleave(stages))
        seeks = [seek(five, 10**9 + i * 10**6, args.rows) for i in range(20)]
    figures = {
        "tokens per second": round(statistics.median(rates)),
        "slowest of 5": round(min(rates)),
        "of conversations, tokens per second": round(statistics.median(talk_rates)),
        "seek ms": round(1e3 * statistics.median(seeks), 3),
        "slowest seek ms": round(1e3 * max(seeks), 3),
    }
    print(json.dumps(figures | vars(args), indent=1))
    return int(figures["tokens per second"] < 50e6 or figures["seek ms"] > 10)


def make(folder: Path, n_tokens: int) -> Path:
    """A corpus of documents of 50 to 4,000 ids."""
    draw = np.random.default_rng(0)
    ids = draw.integers(1, 50_000, size=n_tokens).astype(np.uint16)
    ids[np.cumsum(draw.integers(50, 4000, size=n_tokens // 2000)) % n_tokens] = 0
    np.save(folder / "ids.npy", ids)
    return prepare(
        SourceOptions((str(folder / "ids.npy"),)), IdTokenizer(50_000, 0), 0.0, folder / "cache", lambda line: None
    ).folder


def conversations(n_tokens: int) -> Whole:
    """Conversations of 30 to 600 ids, half of which are learnt, in memory."""
    draw = np.random.default_rng(0)
    offsets = np.concatenate([[0], np.cumsum(draw.integers(30, 600, size=n_tokens // 315))])
    ids = draw.integers(0, 50_000, size=offsets[-1]).astype(np.uint16)
    return Whole("training", ids, offsets, draw.integers(0, 2, size=len(ids)).astype(np.uint8))


def tokens_per_second(samples: Samples, args: argparse.Namespace) -> float:
    with Loader(samples, args.rows, workers=1) as loader:
        next(loader)
        begun, batches = time.perf_counter(), 0
        while time.perf_counter() - begun < args.seconds:
            next(loader)
            batches += 1
        return batches * args.rows * args.seq_len / (time.perf_counter() - begun)


def seek(samples: Samples, index: int, rows: int) -> float:
    """Seconds from the call to a batch in hand, by a loader that was elsewhere."""
    loader = Loader(samples, rows)
    next(loader)
    begun = time.perf_counter()
    loader.seek(index)
    next(loader)
    return time.perf_counter() - begun


if __name__ == "__main__":
    raise SystemExit(main())
