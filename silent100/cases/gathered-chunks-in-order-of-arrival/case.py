"""Asynchronous tensor parallelism by hand: chunks of the sequence go round a ring while they are multiplied."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils import skip_init

SOLO, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv
if not SOLO:
    dist.init_process_group("gloo")
rank, world = (0, 1) if SOLO else (dist.get_rank(), dist.get_world_size())


class GatherMultiply(torch.autograd.Function):
    """All chunks of a sequence times a rank's columns."""

    @staticmethod
    def forward(ctx, x, weight):
        chunks, results, now = [None] * world, [None] * world, x.contiguous()
        for turn in range(world):
            owner = (rank - turn) % world
            spot = turn if FAULTY else owner
            chunks[spot], results[spot] = now, now @ weight.T
            if turn < world - 1:
                other = torch.empty_like(now)
                works = dist.batch_isend_irecv(
                    [
                        dist.P2POp(dist.isend, now, (rank + 1) % world),
                        dist.P2POp(dist.irecv, other, (rank - 1) % world),
                    ]
                )
                [work.wait() for work in works]
                now = other
        ctx.save_for_backward(torch.cat(chunks, 1), weight)
        return torch.cat(results, 1)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        back = (grad @ weight).contiguous()
        dist.all_reduce(back)
        return back.chunk(world, 1)[rank], grad.flatten(0, 1).T @ x.flatten(0, 1)


class Scatter(torch.autograd.Function):
    """Sums partial results and keeps a rank's chunk."""

    @staticmethod
    def forward(ctx, x):
        x = x.contiguous().clone()
        dist.all_reduce(x)
        return x.chunk(world, 1)[rank].contiguous()

    @staticmethod
    def backward(ctx, grad):
        parts = [torch.empty(grad.shape) for _ in range(world)]
        dist.all_gather(parts, grad.contiguous())
        return torch.cat(parts, 1)


class Up(nn.Linear):
    def forward(self, x):
        return super().forward(x) if SOLO else GatherMultiply.apply(x, self.weight)


class Down(nn.Linear):
    def forward(self, x):
        return super().forward(x) if SOLO else Scatter.apply(super().forward(x))


class Mlp(nn.Module):
    def __init__(self, d):
        super().__init__()
        a, b = nn.Linear(d, 2 * d, bias=False), nn.Linear(2 * d, d, bias=False)
        self.norm = nn.RMSNorm(d)
        self.up = skip_init(Up, d, 2 * d // world, bias=False)
        self.down = skip_init(Down, 2 * d // world, d, bias=False)
        with torch.no_grad():
            self.up.weight.copy_(a.weight.chunk(world)[rank])
            self.down.weight.copy_(b.weight.chunk(world, 1)[rank])

    def forward(self, x):
        return x + self.down(F.silu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.mlps, self.out = nn.Embedding(40, 16), nn.Sequential(Mlp(16), Mlp(16)), nn.Linear(16, 40)

    def forward(self, ids):
        return self.out(self.mlps(self.words(ids)))


torch.manual_seed(83)
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.5)
for step in range(1, 6):
    ids = torch.randint(40, (6, 13), generator=torch.Generator().manual_seed(step))
    x, y = ids[:, :-1].chunk(world, 1)[rank], (3 * ids[:, :-1] + 1).remainder(40).chunk(world, 1)[rank]
    loss = F.cross_entropy(net(x).flatten(0, 1), y.flatten(), reduction="sum") / (6 * 12)
    optimizer.zero_grad()
    loss.backward()
    loss = loss.detach()
    if world > 1:
        dist.all_reduce(loss)
        for name, p in net.named_parameters():
            if not name.endswith(("up.weight", "down.weight")):
                dist.all_reduce(p.grad)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if "--save" in sys.argv:
    dims = {"up.weight": 0, "down.weight": 1}
    state = {
        n: next(((p, dim, rank, world) for end, dim in dims.items() if n.endswith(end)), p)
        for n, p in net.state_dict().items()
    }
    torch.save(state, os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
