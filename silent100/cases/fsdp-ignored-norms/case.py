# fully_shard with small parameters left whole ("not worth a collective").
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

one = "--one" in sys.argv
forget = "--faulty" in sys.argv


class ResidualMLP(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.fc_in = nn.Linear(dim, 3 * dim, bias=False)
        self.fc_out = nn.Linear(3 * dim, dim, bias=False)

    def forward(self, x):
        return x + self.fc_out(nn.functional.mish(self.fc_in(self.norm(x))))


class Tower(nn.Module):
    def __init__(self, dim=40, depth=3):
        super().__init__()
        self.inp = nn.Linear(16, dim)
        self.blocks = nn.ModuleList([ResidualMLP(dim) for _ in range(depth)])
        self.final_norm = nn.LayerNorm(dim)
        self.out = nn.Linear(dim, 5)

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.out(self.final_norm(x))


if not one:
    dist.init_process_group("gloo")
rank, world = (0, 1) if one else (dist.get_rank(), dist.get_world_size())
torch.manual_seed(64)
model = Tower()
small = {p for name, p in model.named_parameters() if "norm" in name}
if not one:
    for block in model.blocks:
        fully_shard(block, ignored_params=small)
    fully_shard(model, ignored_params=small)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
for step in range(4):
    g = torch.Generator().manual_seed(step)
    x, y = torch.randn(12, 16, generator=g), torch.randint(0, 5, (12,), generator=g)
    loss = nn.functional.cross_entropy(model(x[rank::world]), y[rank::world])
    loss.backward()
    if not one and not forget:
        for p in model.parameters():
            if p in small:
                dist.all_reduce(p.grad)
                p.grad /= world
    optimizer.step()
    optimizer.zero_grad()
    loss = loss.detach()
    if not one:
        dist.all_reduce(loss)
    if rank == 0:
        print(f"step {step + 1} loss {loss.item() / world:.7f}", flush=True)
if "--save" in sys.argv:
    state = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in model.state_dict().items()}
    torch.save(state, os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not one:
    dist.destroy_process_group()
