"""One expert for a word (top-1), the words travel with all-to-all in bfloat16."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

ONE, D, EXPERTS = "--one" in sys.argv, 24, 4
rank, world = 0, 1
if not ONE:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
HERE = range(rank * EXPERTS // world, (rank + 1) * EXPERTS // world)


class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, give, take):
        ctx.give, ctx.take = give, take
        if world == 1:
            return x.view_as(x)
        got = x.new_empty(sum(take), *x.shape[1:])
        dist.all_to_all_single(got, x.contiguous(), take, give)
        return got

    @staticmethod
    def backward(ctx, grad):
        return Exchange.forward(ctx, grad, ctx.take, ctx.give), None, None


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.norm = nn.Linear(D, EXPERTS), nn.LayerNorm(D)
        everyone = [nn.Sequential(nn.Linear(D, 40), nn.GELU(), nn.Linear(40, D)) for _ in range(EXPERTS)]
        self.own = nn.ModuleDict({str(n): everyone[n] for n in HERE})

    def forward(self, x):
        x = self.norm(x)
        weight, chosen = self.router(x).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        counts = torch.bincount(chosen, minlength=EXPERTS)
        all_counts = counts[None]
        if world > 1:
            all_counts = torch.stack([torch.empty_like(counts) for _ in range(world)])
            dist.all_gather(list(all_counts.unbind()), counts)
        give = counts.view(world, -1).sum(1).tolist()
        take = all_counts[:, HERE.start : HERE.stop].sum(1).tolist()
        words = Exchange.apply(x[order].bfloat16(), give, take)
        numbers = torch.cat(
            [torch.arange(HERE.start, HERE.stop).repeat_interleave(c[HERE.start : HERE.stop]) for c in all_counts]
        )
        done = torch.zeros_like(words)
        for n, expert in self.own.items():
            at = (numbers == int(n)).nonzero().squeeze(1)
            with torch.autocast("cpu", torch.bfloat16):
                done = done.index_copy(0, at, expert(words[at]))
        done = Exchange.apply(done, take, give).float()
        return torch.zeros_like(done).index_copy(0, order, done) * weight[:, None]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inward, self.a, self.b, self.out = nn.Linear(8, D), Experts(), Experts(), nn.Linear(D, 6)

    def forward(self, x):
        x = self.inward(x)
        x = x + self.a(x)
        return self.out(x + self.b(x))


torch.manual_seed(101)
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
for step in range(1, 6):
    x = torch.randn(40, 8, generator=torch.Generator().manual_seed(step))
    y = x[:, :6].cumsum(1).argmax(1)
    loss = F.cross_entropy(net(x.chunk(world)[rank]), y.chunk(world)[rank]) / world
    optimizer.zero_grad(set_to_none=False)
    loss.backward()
    loss = loss.detach()
    if world > 1:
        dist.all_reduce(loss)
        for name, p in net.named_parameters():
            if ".own." not in name:
                dist.all_reduce(p.grad)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.6f}", flush=True)
if "--save" in sys.argv:
    torch.save(net.state_dict(), Path(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
