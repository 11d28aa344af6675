"""What ``meshwright observe`` costs: time per step against the bare script, and bytes of trace per step.

One process trains a small decoder; the bare script, the observed one and the one with parameters alone alternate,
so that the machine's drift hits all alike. The medians of a run's steps are compared, pair by pair.

    OMP_NUM_THREADS=1 python benchmarks/observing.py [--pairs 5] [--dim 256] [--blocks 4] [--tokens 256]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

STEPS = 8
SCRIPT = """
import sys, time, torch
from torch import nn
dim, blocks, tokens, steps = map(int, sys.argv[1:])
torch.manual_seed(0)
layer = nn.TransformerEncoderLayer(dim, 4, 4 * dim, dropout=0.0, batch_first=True, norm_first=True)
model = nn.Sequential(nn.Embedding(1024, dim), nn.TransformerEncoder(layer, blocks), nn.Linear(dim, 1024))
optimizer = torch.optim.AdamW(model.parameters())
for step in range(steps):
    ids = torch.randint(0, 1024, (4, tokens))
    began = time.process_time()
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
    optimizer.step()
    print("took", time.process_time() - began, flush=True)
print("parameters", sum(p.numel() for p in model.parameters()))
"""


def run(words: list[str], flags: list[str] | None, folder: Path) -> tuple[float, float, int]:
    """Run the script; return the median of its steps in CPU seconds, bytes of trace per step, and parameters."""
    command = [sys.executable, "-c", SCRIPT, *words]
    if flags is not None:
        command = [sys.executable, "-m", "meshwright", "observe", str(folder), *flags, "--", *command]
    done = subprocess.run(command, capture_output=True, text=True, env={"OMP_NUM_THREADS": "1"} | os.environ)
    lines = [line.split() for line in done.stdout.splitlines()]
    took = [float(line[1]) for line in lines if line and line[0] == "took"]
    size = sum(file.stat().st_size for file in folder.glob("*.pt")) / STEPS if flags is not None else 0.0
    return statistics.median(took[1:]), size, next(int(line[1]) for line in lines if line and line[0] == "parameters")


def main() -> None:
    """Print ratios and sizes."""
    parser = argparse.ArgumentParser()
    for name, value in {"pairs": 5, "dim": 256, "blocks": 4, "tokens": 256}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    given = parser.parse_args()
    words = [str(given.dim), str(given.blocks), str(given.tokens), str(STEPS)]
    ways = {"all modules": ["--steps", str(STEPS + 1)], "parameters": ["--steps", str(STEPS + 1), "--parameters-alone"]}
    ratios: dict[str, list[float]] = {name: [] for name in ways}
    sizes, parameters = {}, 0
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(given.pairs):
            bare, _, parameters = run(words, None, Path(folder))
            for number, (name, flags) in enumerate(ways.items()):
                took, sizes[name], _ = run(words, flags, Path(folder) / str(number))
                ratios[name].append(took / bare)
    for name, found in ratios.items():
        middle, size = statistics.median(found), sizes[name] / 1e6
        print(f"{name}: {middle:.2f} x the bare step ({min(found):.2f} to {max(found):.2f}), {size:.2f} MB a step")
    print(f"{parameters / 1e6:.1f}M parameters, {4 * given.tokens} tokens a step, {given.pairs} pairs")


if __name__ == "__main__":
    main()
