"""Train with meshwright: ``torchrun --nproc-per-node 2 examples/from/fsdp2_after.py``."""

import torch
from yours import your_batches, your_model

from meshwright import Layout, parallelize
from meshwright.distributed import destroy_distributed, get_world_info

rank, _, ranks = get_world_info()
model = parallelize(your_model(), Layout(dp_shard=-1))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for batch in your_batches(rank, ranks):
    loss = model.forward_backward(batch)
    model.optimizer_step(optimizer, max_norm=1.0)
    optimizer.zero_grad()
    if rank == 0:
        print(float(loss))
destroy_distributed()
