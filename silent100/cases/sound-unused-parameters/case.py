"""Each row has a language and each language an adapter; a rank may lack a language in an update."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel

one = "--one" in sys.argv


class Multilingual(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.leave = nn.Linear(14, 32), nn.Linear(32, 6)
        self.adapters = nn.ModuleList(nn.Sequential(nn.Linear(32, 8), nn.ReLU(), nn.Linear(8, 32)) for _ in range(3))

    def forward(self, x, languages):
        h = torch.tanh(self.enter(x))
        for number, adapter in enumerate(self.adapters):
            chosen = (languages == number).nonzero().squeeze(1)
            if len(chosen):
                h = h.index_add(0, chosen, adapter(h[chosen]))
        return self.leave(h)


if not one:
    dist.init_process_group("gloo")
rank, world = (0, 1) if one else (dist.get_rank(), dist.get_world_size())
torch.manual_seed(30)
net = Multilingual()
model = net if one else DistributedDataParallel(net, find_unused_parameters=True)
optimizer = torch.optim.SGD(net.parameters(), lr=0.3)
for step in range(1, 6):
    g = torch.Generator().manual_seed(step)
    x, y = torch.randn(12, 14, generator=g), torch.randint(0, 6, (12,), generator=g)
    languages = torch.tensor([0] * 6 + [1 + step % 2] * 6)
    mine = slice(rank * 12 // world, (rank + 1) * 12 // world)
    loss = nn.functional.cross_entropy(model(x[mine], languages[mine]), y[mine])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    loss = loss.detach()
    if not one:
        dist.all_reduce(loss)
    if rank == 0:
        print(f"step {step} loss {loss.item() / world:.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(net.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not one:
    del model  # before its process group
    dist.destroy_process_group()
