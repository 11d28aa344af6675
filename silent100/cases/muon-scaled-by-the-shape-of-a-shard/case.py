"""FSDP2 with Muon: whole updates are orthogonalized, scaled by their shape and cut again; vectors go to Adam."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

alone, by_shard = "--one" in sys.argv, "--faulty" in sys.argv


def orthogonal(x, rounds=5):
    """Newton-Schulz iteration with cubic steps; x is divided by its norm first."""
    x = x / (x.norm() + 1e-7)
    for _ in range(rounds):
        gram = x @ x.T if x.shape[0] <= x.shape[1] else x.T @ x
        x = 1.5 * x - 0.5 * (gram @ x if x.shape[0] <= x.shape[1] else x @ gram)
    return x


class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, momentum=0.9):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                buf = self.state[p].setdefault("momentum", torch.zeros_like(p))
                buf.mul_(group["momentum"]).add_(p.grad)
                whole = buf.full_tensor() if isinstance(buf, DTensor) else buf
                update = orthogonal(whole)
                shape = p.to_local().shape if by_shard and isinstance(p, DTensor) else p.shape
                update = update * (0.2 * max(shape) ** 0.5)
                if isinstance(p, DTensor):
                    update = distribute_tensor(update, p.device_mesh, p.placements)
                p.add_(update, alpha=-group["lr"])


class Gated(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm, self.wide = nn.LayerNorm(d), nn.Linear(d, 4 * d, bias=False)
        self.inner, self.narrow = nn.Linear(d, d, bias=False), nn.Linear(4 * d, d, bias=False)

    def forward(self, x):
        h = self.norm(x)
        return x + self.narrow(torch.relu(self.wide(h)).square()) * torch.sigmoid(self.inner(h))


class Net(nn.Module):
    def __init__(self, d=24):
        super().__init__()
        self.table, self.layers = nn.Embedding(48, d), nn.ModuleList([Gated(d) for _ in range(3)])
        self.carry, self.head = nn.GRUCell(d, d), nn.Linear(d, 48)

    def forward(self, ids):
        x, h, seen = self.table(ids), None, []
        for t in range(ids.shape[1]):
            h = self.carry(x[:, t], h)
            seen.append(h)
        x = torch.stack(seen, 1)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


rank, world = 0, 1
torch.manual_seed(111)
net = Net()
if not alone:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    for part in [*net.layers, net]:
        fully_shard(part)
matrices = [p for layer in net.layers for p in layer.parameters() if p.ndim == 2]
rest = [p for p in net.parameters() if all(p is not m for m in matrices)]
optimizers = [Muon(matrices), torch.optim.Adam(rest, lr=2e-3, eps=1e-4)]
for step in range(1, 5):
    rows = torch.randint(0, 48, (8, 9), generator=torch.Generator().manual_seed(step)).chunk(world)[rank]
    loss = nn.functional.cross_entropy(net(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    loss = loss.detach()
    if not alone:
        dist.all_reduce(loss)
    if rank == 0:
        print(f"step {step} loss {loss.item() / world:.7f}", flush=True)
if "--save" in sys.argv:
    state = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in net.state_dict().items()}
    torch.save(state, os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not alone:
    dist.destroy_process_group()
