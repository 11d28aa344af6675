"""Train with meshwright: ``torchrun --nproc-per-node 4 examples/from/torchtitan_after.py``."""

import torch
from yours import your_batches, your_model

from meshwright import Layout, parallelize
from meshwright.distributed import destroy_distributed, get_dp_mesh, get_world_info

model = parallelize(your_model(), Layout(dp_shard=2, tp=2))
data = get_dp_mesh(model.mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for batch in your_batches(data.get_local_rank(), data.size()):
    loss = model.forward_backward(batch)
    model.optimizer_step(optimizer, max_norm=1.0)
    optimizer.zero_grad()
    if get_world_info()[0] == 0:
        print(float(loss))
destroy_distributed()
