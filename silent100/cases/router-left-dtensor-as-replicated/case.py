"""A model on DTensors: units of a gated layer are divided over ranks, a shared gate is replicated."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--faulty", action="store_true")
cli.add_argument("--save")
args = cli.parse_args()
mesh, rank = None, 0
if not args.one:
    dist.init_process_group("gloo")
    mesh, rank = init_device_mesh("cpu", (2,)), dist.get_rank()


def place(tensor, placement):
    return nn.Parameter(tensor if mesh is None else distribute_tensor(tensor, mesh, [placement]))


def local(x, gradient):
    if not isinstance(x, DTensor):
        return x
    return x.to_local(grad_placements=gradient)


class GatedUnits(nn.Module):
    """Each rank computes its hidden units with the whole gate; outputs are partial sums."""

    def __init__(self, d, h):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.up, self.down = place(torch.randn(h, d) * 0.2, Shard(0)), place(torch.randn(d, h) * 0.2, Shard(1))
        self.gate_scale = place(torch.randn(d) * 0.3 + 1, Replicate())

    def forward(self, x):
        h = self.norm(x)
        if mesh is None:
            return x + F.linear(F.silu(F.linear(h * self.gate_scale, self.up)), self.down)
        h = local(DTensor.from_local(h, mesh, [Replicate()]), [Partial()])
        scale = local(self.gate_scale, None if args.faulty else [Partial()])
        up, down = local(self.up, [Shard(0)]), local(self.down, [Shard(1)])
        y = F.linear(F.silu(F.linear(h * scale, up)), down)
        return x + DTensor.from_local(y, mesh, [Partial()]).redistribute(placements=[Replicate()]).to_local()


torch.manual_seed(11)
embed, head = nn.Embedding(44, 32), nn.Linear(32, 44)
net = nn.ModuleDict({"embed": embed, "a": GatedUnits(32, 64), "b": GatedUnits(32, 64), "head": head})
optimizer = torch.optim.SGD(net.parameters(), lr=0.4, foreach=False)
for step in range(1, 5):
    rows = torch.randint(0, 44, (8, 10), generator=torch.Generator().manual_seed(step))
    logits = head(net["b"](net["a"](embed(rows[:, :-1]))))
    loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if args.save:
    state = {}
    for name, p in net.named_parameters():
        if isinstance(p, DTensor) and p.placements[0].is_shard():
            state[name] = (p.to_local().detach(), p.placements[0].dim, rank, 2)
        else:
            state[name] = p.to_local().detach() if isinstance(p, DTensor) else p.detach()
    torch.save(state, os.path.join(args.save, f"rank{rank}.pt"))
if not args.one:
    dist.destroy_process_group()
