"""Train with accelerate: ``torchrun --nproc-per-node 2`` this script."""

from __future__ import annotations

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import DistributedType
from torch.utils.data import DataLoader
from yours import padded, your_model, your_rows


def train(rows: int = 4, steps: int = 20) -> list[float]:
    """Return the mean loss of each step."""
    blocks = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["LlamaDecoderLayer"]}
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **blocks)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    # on a CPU accelerate 1.15 passes the plugin over without a word, and would train with DDP
    accelerator.state.distributed_type, accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin
    loader = DataLoader(your_rows(shortest=12, longest=12), batch_size=rows, collate_fn=padded)
    model = your_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses: list[float] = []
    while len(losses) < steps:
        for batch in loader:
            loss = model(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    return losses[:steps]


if __name__ == "__main__":
    print(train())
