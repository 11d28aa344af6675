"""Train with the same functions of meshwright: ``torchrun --nproc-per-node 2 examples/from/kempnerforge_after.py``."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import MixedPrecisionPolicy
from yours import YourDecoder, your_batches

from meshwright.distributed import (
    ActivationCheckpointing,
    DistributedConfig,
    apply_ac,
    apply_fsdp2,
    destroy_distributed,
    get_world_info,
    init_distributed,
)
from meshwright.distributed.utils import clip_grad_norm_

mesh = init_distributed(DistributedConfig(dp_shard=2), seed=42)
rank, _, ranks = get_world_info()
model = YourDecoder()
apply_ac(model, ActivationCheckpointing.full)
apply_fsdp2(model, mesh, mp_policy=MixedPrecisionPolicy())
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for batch in your_batches(rank, ranks):
    loss = F.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())
    loss.backward()
    clip_grad_norm_(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach() / ranks
    dist.all_reduce(mean)
    if rank == 0:
        print(float(mean))
destroy_distributed()
