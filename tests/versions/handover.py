"""Write checkpoints with one release of torch, and read them with another: equal to the last bit, in any layout.

python tests/versions/handover.py write FOLDER
python tests/versions/handover.py read FOLDER...
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import torch
from torch import nn

from meshwright import Layout, parallelize
from meshwright.checkpoint import load, save
from meshwright.distributed.process.workers import WorkerPool
from meshwright.distributed.weights.shards import whole_on_first
from meshwright.models.decoder import Decoder
from meshwright.models.decoder_config import DecoderConfig, MoEConfig

WRITER = Layout(dp_shard=2, tp=2)
READERS = (Layout(dp_shard=2, tp=2), Layout(dp_shard=1, tp=2), Layout(dp_shard=2), Layout(dp_shard=1))
TOKENS = torch.arange(48).reshape(4, 12) % 37


def fused() -> nn.Module:
    """Queries, keys and values in one weight."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(vocab_size=40, bos_token_id=0, eos_token_id=0, n_embd=32, n_layer=2, n_head=4, n_positions=32)
    )


def sparse() -> nn.Module:
    """Experts, and one key head that both ranks of tp hold."""
    return Decoder(
        DecoderConfig(40, 32, 2, n_heads=4, n_kv_heads=1, hidden_dim=48, max_seq_len=16, moe=MoEConfig(n_experts=4))
    )


MODELS = {"fused": fused, "sparse": sparse}


def made(name: str, layout: Layout, seed: int):
    model = parallelize(MODELS[name], layout, seed=seed)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def stepped(model, optimizer, layout: Layout) -> None:
    rows = TOKENS[: 4 // layout.dp_shard]
    model.forward_backward({"tokens": rows, "labels": rows.roll(-1, 1)})
    model.optimizer_step(optimizer)
    optimizer.zero_grad()


def digests(model, optimizer) -> dict[str, str]:
    """SHA-256 of each whole weight and of both moments, on rank 0."""
    named = dict(model.named_parameters())
    held = named | {
        f"{name}/{key}": optimizer.state[parameter][key]
        for name, parameter in named.items()
        for key in ("exp_avg", "exp_avg_sq")
    }
    wholes = whole_on_first({name: tensor.detach() for name, tensor in held.items()})
    return {name: hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest() for name, tensor in wholes.items()}


def write(name: str, folder: str) -> dict[str, str]:
    model, optimizer = made(name, WRITER, seed=1)
    for _ in range(2):
        stepped(model, optimizer, WRITER)
    save(model, folder, optimizer=optimizer)
    return digests(model, optimizer)


def read(name: str, folder: str, layout: Layout) -> dict[str, str]:
    """What another seed's model and optimizer hold after they read it."""
    model, optimizer = made(name, layout, seed=2)
    load(model, folder, optimizer=optimizer)
    found = digests(model, optimizer)
    stepped(model, optimizer, layout)
    return found


def main() -> int:
    mode, *folders = sys.argv[1:]
    wrong = 0
    with WorkerPool(4, threads=1) as pool:
        for folder in map(Path, folders):
            for name in MODELS:
                digest = folder / f"{name}.json"
                if mode == "write":
                    folder.mkdir(parents=True, exist_ok=True)
                    written = pool.run(write, name, str(folder / name), world=WRITER.resolve(4).world)[0]
                    digest.write_text(json.dumps({"torch": torch.__version__, "tensors": written}), encoding="utf-8")
                    continue
                said = json.loads(digest.read_text(encoding="utf-8"))
                for layout in READERS:
                    found = pool.run(read, name, str(folder / name), layout, world=layout.dp_shard * layout.tp)[0]
                    differ = sorted(key for key in said["tensors"] if found.get(key) != said["tensors"][key])
                    wrong += bool(differ) or found.keys() != said["tensors"].keys()
                    print(
                        f"torch {said['torch']} -> {torch.__version__}, {name}, dp_shard {layout.dp_shard} x tp"
                        f" {layout.tp}: {len(found)} tensors, {len(differ)} differ {differ[:3] or ''}"
                    )
    return wrong


if __name__ == "__main__":
    sys.exit(main())
