# All-gather dispatch: every rank sees all tokens, computes its own experts, and outputs are summed back.
import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn

one = "--one" in sys.argv
faulty = "--faulty" in sys.argv
if not one:
    dist.init_process_group("gloo")
rank = 0 if one else dist.get_rank()
size = 1 if one else dist.get_world_size()


class GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        out = [torch.empty_like(x) for _ in range(size)]
        dist.all_gather(out, x.contiguous())
        return torch.cat(out)

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous()
        dist.all_reduce(g)
        return g.chunk(size)[rank]


class ReduceRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.contiguous().clone()
        dist.all_reduce(x)
        return x.chunk(size)[rank]

    @staticmethod
    def backward(ctx, g):
        out = [torch.empty_like(g) for _ in range(size)]
        dist.all_gather(out, g.contiguous())
        return torch.cat(out)


def plain_gather(x):
    out = [torch.empty_like(x) for _ in range(size)]
    dist.all_gather(out, x.detach().contiguous())
    return torch.cat(out)


class Gate(nn.Module):
    def __init__(self, dim, experts, k=2):
        super().__init__()
        self.weight, self.k = nn.Parameter(torch.randn(experts, dim) * 0.3), k

    def forward(self, x):
        scores = torch.sigmoid(x @ self.weight.T)
        top, chosen = scores.topk(self.k, -1)
        return torch.zeros_like(scores).scatter(1, chosen, top / top.sum(-1, keepdim=True))


class MoeLayer(nn.Module):
    def __init__(self, dim=28, experts=6):
        super().__init__()
        self.gate = Gate(dim, experts)
        every = [nn.Sequential(nn.Linear(dim, 40), nn.ReLU(), nn.Linear(40, dim)) for _ in range(experts)]
        self.numbers = torch.arange(experts).chunk(size)[rank].tolist()
        self.experts = nn.ModuleDict({str(i): every[i] for i in self.numbers})

    def forward(self, x):  # (tokens, dim)
        weights = self.gate(x)
        if size > 1:
            x = GatherRows.apply(x)
            weights = plain_gather(weights) if faulty else GatherRows.apply(weights)
        y = sum(self.experts[str(i)](x) * weights[:, i : i + 1] for i in self.numbers)
        return ReduceRows.apply(y) if size > 1 else y


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.out = nn.Linear(9, 28), nn.Linear(28, 9)
        self.moe1, self.moe2 = MoeLayer(), MoeLayer()

    def forward(self, x):
        x = torch.tanh(self.inp(x))
        x = x + self.moe1(x)
        return self.out(x + self.moe2(x))


torch.manual_seed(61)
net = Net()
opt = torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.9)
for step in range(1, 5):
    x = torch.randn(24, 9, generator=torch.Generator().manual_seed(step))
    mine = x.chunk(size)[rank]
    loss = nn.functional.mse_loss(net(mine), mine.abs()) / size
    opt.zero_grad()
    loss.backward()
    for name, p in net.named_parameters():
        if size > 1 and "experts" not in name:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad)
    opt.step()
    loss = loss.detach()
    if size > 1:
        dist.all_reduce(loss)
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(net.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not one:
    dist.destroy_process_group()
