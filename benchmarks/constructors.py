"""Initial weights: time and memory of what a rank makes of a constructor, beside plain torch in one process.

    python benchmarks/constructors.py stream [million parameters]
        share of one of four ranks, carried on through the whole stream
    python benchmarks/constructors.py 8b [world]
        share of one rank of a Llama of 8B, drawn by (seed, name, position)

Every case has a process of its own; the ranks besides the first are torch's fake process group, which sends nothing.
The peak is the largest resident size above that of the process before it had a model.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time

import torch
import torch.distributed as dist

MIB = 2**20


def llama(hidden: int, layers: int, inner: int, heads: int, keys: int, vocabulary: int):
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        intermediate_size=inner,
        num_attention_heads=heads,
        num_key_value_heads=keys,
        vocab_size=vocabulary,
        use_cache=False,
    )
    return lambda: AutoModelForCausalLM.from_config(config)


def of_millions(number: int):
    layers = max(1, number // 12)
    return llama(1024, layers, 2816, 16, 16, 2048)


def resident() -> float:
    """The largest size so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(who: str, build, world: int) -> None:
    from meshwright import Layout, parallelize
    from meshwright.introspection.source import as_module

    module = as_module(build)
    sizes = [p.numel() * p.element_size() / MIB for p in module.parameters()]
    whole, largest = sum(sizes), max(sizes)
    parallelize(
        lambda: torch.nn.Linear(2, 2), Layout(dp_shard=world)
    ) if who == "ours" else build  # what is imported at first use
    before, begin = resident(), time.perf_counter()
    if who == "ours":
        parallelize(build, Layout(dp_shard=world), seed=1, audit=False)
    else:
        torch.manual_seed(1)
        build()
    seconds, peak, share = time.perf_counter() - begin, resident() - before, whole / (world if who == "ours" else 1)
    said = f"share {share:.0f} MiB, largest parameter {largest:.0f} MiB, peak {peak:.0f} MiB"
    print(f"{who:12} {whole / 4:.0f} M parameters, {world} ranks: {seconds:.1f} s, {said}", flush=True)


def main(case: str, size: int) -> None:
    if os.environ.get("CASE") is None:
        for who in ("ours", "plain torch") if case == "stream" else ("ours",):
            subprocess.run([sys.executable, __file__, case, str(size)], env=os.environ | {"CASE": who}, check=True)
        return
    world = 4 if case == "stream" else size
    if os.environ["CASE"] == "ours":
        from torch.testing._internal.distributed.fake_pg import FakeStore

        os.environ |= {"RANK": "0", "WORLD_SIZE": str(world), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    build = of_millions(size) if case == "stream" else llama(4096, 32, 14336, 32, 8, 128256)
    measure(os.environ["CASE"], build, world)


if __name__ == "__main__":
    main(
        sys.argv[1] if len(sys.argv) > 1 else "stream",
        int(sys.argv[2]) if len(sys.argv) > 2 else 300 if "8b" not in sys.argv else 64,
    )
