"""Frozen weights in 4 bits against plain ones: bytes at rest, bytes gathered, and CPU time of a step, in paired rounds.

A Llama with adapters beside every linear layer of its blocks is trained on gloo, once with frozen weights in the master
dtype and once with ``quantize_frozen = "nf4"``, in the same processes by turns. Bytes at rest are what the parameters
hold, and what the plan says; the ratio of CPU times is that of the busier rank, whole steps.

The exit status is 1 where a weight takes more than 1.02 × 4.5 bits, or the plan's bytes are not those held.

    OMP_NUM_THREADS=1 python benchmarks/quantized.py [--rounds 10] [--dim 512] [--seq 128]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any

BITS = 4.5
"""Bits of a weight: 4, and a float32 scale for each 64."""
LORA = {"adapters": {"rank": 16, "alpha": 32.0}}
KINDS: dict[str, dict[str, Any]] = {"plain": LORA, "nf4": LORA | {"quantize_frozen": "nf4"}}


def config_of(dim: int) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=512,
        hidden_size=dim,
        intermediate_size=3 * dim,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        use_cache=False,
    )


def measure(dim: int, seq: int, rounds: int, sizes: dict[str, int]) -> dict[str, Any]:
    """Return this rank's bytes and, for each round, seconds of CPU time of a step with plain weights and with nf4."""
    import torch

    from meshwright import Layout, parallelize
    from meshwright.planning.memory import plan_memory

    found: dict[str, Any] = {"seconds": []}
    models = {kind: parallelize(config_of(dim), Layout(**sizes), techniques=asked) for kind, asked in KINDS.items()}
    for kind, model in models.items():
        blocks = [unit for unit in model.plan.units if unit.name]
        local = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
        packed = [here for here in local if here.dtype == torch.uint8]
        found[kind] = {
            "held": sum(here.numel() * here.element_size() for here in local),
            "planned": plan_memory(model.plan).parameters,
            "gathered": sum(unit.bytes_gathered for unit in blocks),
            "bits": 8 * sum(map(torch.numel, packed)) / max(1, sum(here.numel() // 36 * 64 for here in packed)),
        }
    optimizers = {
        kind: torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]) for kind, model in models.items()
    }
    tokens = torch.randint(0, 512, (2, seq), generator=torch.Generator().manual_seed(0))
    for number in range(rounds + 2):
        spent = []
        for kind, model in models.items():
            begun = time.process_time()
            model.forward_backward({"tokens": tokens, "labels": tokens})
            model.optimizer_step(optimizers[kind], 1.0)
            spent.append(time.process_time() - begun)
        if number >= 2:
            found["seconds"].append(spent)
    return found


def main() -> int:
    from meshwright.distributed.process.workers import WorkerPool

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--dim", type=int, default=512, help="features between the blocks; a multiple of 512")
    parser.add_argument("--seq", type=int, default=128)
    asked = parser.parse_args()
    wrong = 0
    with WorkerPool(2, threads=1) as pool:
        for name, sizes in {"FSDP 2": {"dp_shard": 2}, "tp 2": {"dp_shard": 1, "tp": 2}}.items():
            ranks = pool.run(measure, asked.dim, asked.seq, asked.rounds, sizes, timeout=600.0)
            pairs = zip(*(rank["seconds"] for rank in ranks), strict=True)
            busier = [[max(times) for times in zip(*pair, strict=True)] for pair in pairs]
            ratio = statistics.median(nf4 / plain for plain, nf4 in busier)
            plain, nf4 = ranks[0]["plain"], ranks[0]["nf4"]
            print(
                f"{name:8} bits a weight {nf4['bits']:.3f}; at rest {nf4['held']:,} bytes (planned {nf4['planned']:,})"
                f" of {plain['held']:,}; blocks gathered {nf4['gathered']:,} of {plain['gathered']:,};"
                f" CPU time of a step {ratio:.2f} ×"
            )
            wrong += nf4["bits"] > 1.02 * BITS or any(rank["nf4"]["held"] != rank["nf4"]["planned"] for rank in ranks)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
