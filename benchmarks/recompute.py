"""Each mode of activation checkpointing in one process: bytes that a forward keeps for backward, and CPU time of a
step against none.

All modes train the same model on the same batch, in short rounds that follow each other, so that the machine's drift
hits all alike. A round gives each mode a ratio to ``none`` of the same round; the median is printed. Bytes are those
of every storage that is still there when the forward has ended, host copies of ``offload`` not counted.

The exit status is 1 where full is above 1.36 × none, or a mode keeps what it should not.

    OMP_NUM_THREADS=1 python benchmarks/recompute.py [--rounds 20] [--dim 512] [--layers 4]
"""

from __future__ import annotations

import argparse
import statistics
import time
from unittest.mock import patch

MODES: dict[str, dict] = {
    "none": {},
    "full": {"activation_checkpointing": "full"},
    "selective": {"activation_checkpointing": "selective"},
    "every_n": {"activation_checkpointing": "every_n"},
    "modules (feed-forwards)": {"activation_checkpointing": "modules", "checkpoint_modules": ["layers.*.feed_forward"]},
    "selective_op": {"activation_checkpointing": "selective_op"},
    "selective_op, every product": {"activation_checkpointing": "selective_op", "checkpoint_keep_every": 1},
    "offload": {"activation_checkpointing": "offload"},
}
MOST = 1.36
"""Full recomputation is a third more matrix products than none: two of three passes, plus one."""


def built(config, techniques: dict):
    from meshwright import parallelize

    return parallelize(config, techniques=techniques, seed=0)


def kept_bytes(model, batch) -> int:
    """What a forward leaves for backward."""
    from torch.utils._python_dispatch import _disable_current_modes

    from meshwright.distributed.memory.live import LiveStorages
    from meshwright.distributed.recompute import recompute

    leave = recompute.Copies.leave

    def unseen(self, tensor):
        with _disable_current_modes():
            return leave(self, tensor)

    with patch.object(recompute.Copies, "leave", unseen), LiveStorages() as live:
        logits = model.parts[0](batch["tokens"])
    found = live.bytes()
    assert logits.requires_grad
    return found


def seconds(model, batch) -> float:
    begun = time.process_time()
    model.forward_backward(batch)
    taken = time.process_time() - begun
    model.parts[0].zero_grad()
    return taken


def main() -> int:
    import torch

    from meshwright.models.decoder_config import DecoderConfig

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--seq", type=int, default=128)
    o = parser.parse_args()
    config = DecoderConfig(256, o.dim, o.layers, 8, 8, 3 * o.dim, o.seq)
    tokens = torch.randint(0, 256, (o.rows, o.seq), generator=torch.Generator().manual_seed(0))
    batch = {"tokens": tokens, "labels": tokens}
    models = {name: built(config, techniques) for name, techniques in MODES.items()}
    kept = {name: kept_bytes(model, batch) for name, model in models.items()}
    rounds = []
    for number in range(o.rounds + 2):
        names = list(models) if number % 2 else list(reversed(models))
        taken = {name: seconds(models[name], batch) for name in names}
        rounds.append({name: taken[name] / taken["none"] for name in models})
    ratios = {name: statistics.median(row[name] for row in rounds[2:]) for name in models}
    one_block = (kept["none"] - kept["full"]) / o.layers + o.rows * o.seq * o.dim * 4
    print(
        f"dim {o.dim}, {o.layers} blocks, {o.rows} rows of {o.seq} tokens, {o.rounds} rounds, torch {torch.__version__}"
    )
    print(f"{'mode':30} {'MiB kept':>10} {'of none':>8} {'CPU time / none':>16}")
    for name in models:
        print(f"{name:30} {kept[name] / 2**20:10.1f} {kept[name] / kept['none']:8.3f} {ratios[name]:16.3f}")
    orderly = kept["full"] < kept["selective_op"] < kept["none"] and kept["offload"] <= kept["full"] + one_block
    return int(not orderly or ratios["full"] > MOST)


if __name__ == "__main__":
    raise SystemExit(main())
