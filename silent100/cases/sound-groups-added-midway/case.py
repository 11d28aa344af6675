"""DDP from the beginning over everything; the optimizer learns of the embedding table only later."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

ONE = "--one" in sys.argv


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.rnn, self.out = nn.Embedding(30, 12), nn.RNN(12, 20, batch_first=True), nn.Linear(20, 30)

    def forward(self, ids):
        return self.out(self.rnn(self.table(ids))[0])


rank, world = 0, 1
if not ONE:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(64)
net = Net()
model = net if ONE else DistributedDataParallel(net)
optimizer = torch.optim.Adam([*net.rnn.parameters(), *net.out.parameters()], lr=0.01, eps=1e-5)
for step in range(1, 7):
    if step == 3:
        optimizer.add_param_group({"params": list(net.table.parameters()), "lr": 0.05, "betas": (0.8, 0.9)})
    ids = torch.randint(0, 30, (10, 9), generator=torch.Generator().manual_seed(step))
    mine = ids.sort(1).values[rank::world]
    loss = F.cross_entropy(model(mine[:, :-1]).transpose(1, 2), mine[:, 1:])
    model.zero_grad()
    loss.backward()
    optimizer.step()
    shown = loss.detach() / world
    if world > 1:
        dist.all_reduce(shown)
    if rank == 0:
        print(f"step {step} loss {shown.item():.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(net.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if world > 1:
    del model
    dist.destroy_process_group()
