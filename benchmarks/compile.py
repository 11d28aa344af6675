"""Does the first step of a compiled model depend on its depth? Equal blocks share one compilation.

    python benchmarks/compile.py [--blocks 4 24] [--rounds 3] [--backend inductor]

Each depth is trained for one step in a process of its own, with an empty compiler cache, in turns. CPU seconds of
that first step are printed, and how many graphs were made. What the blocks compute is a small part of it: dim 64, 2
rows of 16 tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from statistics import median


def measure(blocks: int, backend: str) -> dict[str, float]:
    """In this process: CPU seconds of the first step, and graphs that were made."""
    import torch
    from torch._dynamo.utils import counters

    from meshwright import Layout, parallelize
    from meshwright.models.decoder_config import DecoderConfig

    model = DecoderConfig(257, 64, blocks, n_heads=4, n_kv_heads=2, hidden_dim=128, max_seq_len=16)
    laid = parallelize(model, Layout(dp_shard=1), techniques={"compile": True, "compile_backend": backend})
    tokens = torch.randint(0, 257, (2, 16))
    begun = time.process_time() + sum(os.times()[2:4])
    laid.forward_backward({"tokens": tokens, "labels": tokens})
    return {"seconds": time.process_time() + sum(os.times()[2:4]) - begun, "graphs": counters["stats"]["unique_graphs"]}


def apart(blocks: int, backend: str) -> dict[str, float]:
    """The same in a process of its own, with an empty cache."""
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {
            "TORCHINDUCTOR_CACHE_DIR": cache,
            "TORCHINDUCTOR_FX_GRAPH_CACHE": "0",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
        }
        said = subprocess.run(
            [sys.executable, __file__, "--only", str(blocks), "--backend", backend],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
    return json.loads(said.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, nargs=2, default=(4, 24))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--only", type=int, default=0, help=argparse.SUPPRESS)
    o = parser.parse_args()
    if o.only:
        print(json.dumps(measure(o.only, o.backend)))
        return
    few, many = o.blocks
    pairs = [(apart(few, o.backend), apart(many, o.backend)) for _ in range(o.rounds)]
    ratios = [deep["seconds"] / flat["seconds"] for flat, deep in pairs]
    for name, found in ((few, [flat for flat, _ in pairs]), (many, [deep for _, deep in pairs])):
        print(
            f"{name:3d} blocks: {median(one['seconds'] for one in found):6.2f} CPU s, {found[0]['graphs']:.0f} graphs"
        )
    print(f"ratio {median(ratios):.3f} (median of {o.rounds} pairs: {', '.join(f'{ratio:.3f}' for ratio in ratios)})")


if __name__ == "__main__":
    main()
