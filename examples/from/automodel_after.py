"""Train with the same function of meshwright: ``torchrun --nproc-per-node 2 examples/from/automodel_after.py``."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from yours import your_batches, your_model

from meshwright.distributed.parallelizer import fsdp2_strategy_parallelize

dist.init_process_group()
rank, ranks = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (1, 1, ranks, 1, 1), mesh_dim_names=("pp", "dp_replicate", "dp_shard", "cp", "tp"))
for axes in (("dp_replicate", "dp_shard"), ("dp_shard", "cp")):
    mesh[axes]._flatten("_".join(axes))
model = fsdp2_strategy_parallelize(your_model(), mesh, mp_policy=MixedPrecisionPolicy())
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for batch in your_batches(rank, ranks):
    logits = model(input_ids=batch["input_ids"]).logits
    loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach() / ranks
    dist.all_reduce(mean)
    if rank == 0:
        print(float(mean))
dist.destroy_process_group()
