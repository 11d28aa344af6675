"""A LoRA step against peft under bare FSDP2: CPU time in paired rounds, and bytes on the wire.

Both train the same Llama of transformers, in float32 on 2 gloo ranks, with adapters of rank 16 beside every linear
layer of its blocks. Theirs is ``get_peft_model``, ``fully_shard`` of each block and of the model, a mean of tokens,
``clip_grad_norm_`` and AdamW; ours is ``parallelize`` with ``techniques={"adapters": …}``, ``forward_backward`` and
``optimizer_step``. Steps alternate in the same processes; a round's ratio is that of the busier rank. Bytes are those
that collectives of one step receive, counted below both.

The exit status is 1 where the median ratio is above 1.05, or ours sends more bytes than theirs by more than 1 %.

    OMP_NUM_THREADS=1 python benchmarks/lora.py [--rounds 20] [--dim 512] [--seq 128] [--rows 2]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any

GOAL = 1.05
RANK, ALPHA = 16, 32.0


def config_of(dim: int) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=1024,
        hidden_size=dim,
        intermediate_size=3 * dim,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        use_cache=False,
    )


def theirs_of(dim: int) -> tuple[Any, Any]:
    """Return (step, model) of peft under FSDP2 by hand."""
    import torch
    from peft import LoraConfig, get_peft_model
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn import functional as F
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    chosen = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear")
    model: Any = get_peft_model(LlamaForCausalLM(config_of(dim)), chosen)
    mesh = init_device_mesh("cpu", (2,))
    for block in model.base_model.model.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])

    def step(tokens: Any) -> None:
        logits = model(input_ids=tokens).logits
        F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step, model


def ours_of(dim: int) -> tuple[Any, Any]:
    """Return (step, model) of this library."""
    import torch

    from meshwright import Layout, parallelize

    model = parallelize(
        config_of(dim), Layout(dp_shard=2), techniques={"adapters": {"rank": RANK, "alpha": ALPHA}}, seed=0
    )
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])

    def step(tokens: Any) -> None:
        model.forward_backward({"tokens": tokens, "labels": tokens})
        model.optimizer_step(optimizer, 1.0)

    return step, model


def measure(dim: int, seq: int, rows: int, rounds: int) -> tuple[list[list[float]], list[int]]:
    """Return this rank's seconds of CPU time by round, of (their step, our step), and the bytes of one step of each."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Received(TorchDispatchMode):
        """Counts the bytes of collectives' results."""

        total = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
            if func.namespace == "c10d":
                sent = [x for x in torch.utils._pytree.tree_leaves(args) if isinstance(x, torch.Tensor)]
                self.total += max((tensor.nbytes for tensor in sent), default=0)
            return func(*args, **(kwargs or {}))

    ours, theirs = ours_of(dim)[0], theirs_of(dim)[0]
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 1024, (rows, seq), generator=generator)
    seconds: list[list[float]] = []
    for number in range(rounds + 3):
        spent = []
        for step in (theirs, ours):
            begun = time.process_time()
            step(tokens)
            spent.append(time.process_time() - begun)
        if number >= 3:
            seconds.append(spent)
    moved = []
    for step in (theirs, ours):
        with Received() as counted:
            step(tokens)
        moved.append(counted.total)
    return seconds, moved


def main() -> int:
    from meshwright.distributed.process.workers import WorkerPool

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--dim", type=int, default=512, help="features between the blocks; a multiple of 8")
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--rows", type=int, default=2)
    asked = parser.parse_args()
    with WorkerPool(2, threads=1) as pool:
        ranks = pool.run(measure, asked.dim, asked.seq, asked.rows, asked.rounds, timeout=600.0)
    pairs = zip(*(seconds for seconds, _ in ranks), strict=True)
    busier = [[max(times) for times in zip(*pair, strict=True)] for pair in pairs]
    ratios = sorted(ours / theirs for theirs, ours in busier)
    ratio = statistics.median(ratios)
    theirs, ours = ranks[0][1]
    print(
        f"dim {asked.dim}, {asked.rows} × {asked.seq} tokens a rank: CPU time of a step {ratio:.3f} × of peft under"
        f" FSDP2 (of {len(ratios)} rounds, {ratios[0]:.2f} to {ratios[-1]:.2f}); bytes {ours:,} against {theirs:,}"
    )
    return int(ratio > GOAL or ours > 1.01 * theirs)


if __name__ == "__main__":
    sys.exit(main())
