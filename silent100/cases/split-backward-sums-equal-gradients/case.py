"""Part of the model runs on a cut sequence; the rest runs whole on every rank."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv
rank, n = 0, 1
if not ONE:
    dist.init_process_group("gloo")
    rank, n = dist.get_rank(), dist.get_world_size()


class Cut(torch.autograd.Function):
    """Takes this rank's part of dimension 1; the gradient is put together again."""

    @staticmethod
    def forward(ctx, x):
        return x.chunk(n, 1)[rank].clone()

    @staticmethod
    def backward(ctx, grad):
        parts = [torch.empty_like(grad) for _ in range(n)]
        dist.all_gather(parts, grad.contiguous())
        whole = torch.cat(parts, 1)
        if FAULTY:
            dist.all_reduce(whole)
        return whole


class Join(torch.autograd.Function):
    """Gathers parts of dimension 1; every rank computes the same afterwards, so its gradient is only cut."""

    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(n)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, grad):
        return grad.chunk(n, 1)[rank].contiguous()


class Hourglass(nn.Module):
    def __init__(self, d=40):
        super().__init__()
        self.before = nn.LSTM(6, d, batch_first=True)
        self.middle = nn.Sequential(nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))
        self.after = nn.LSTM(d, d, batch_first=True)
        self.readout = nn.Linear(d, 1)

    def forward(self, x):
        x = self.before(x)[0]
        if ONE:
            x = x + self.middle(x)
        else:
            part = Cut.apply(x)
            x = Join.apply(part + self.middle(part))
        return self.readout(self.after(x)[0])


torch.manual_seed(29)
net = Hourglass()
adam = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9)
for step in range(1, 5):
    g = torch.Generator().manual_seed(step)
    x = torch.randn(8, 12, 6, generator=g)
    y = x.sum(-1, keepdim=True).cumsum(1).tanh()
    loss = nn.functional.mse_loss(net(x), y)
    adam.zero_grad()
    loss.backward()
    if not ONE:
        for p in net.middle.parameters():
            dist.all_reduce(p.grad)
    adam.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(net.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not ONE:
    dist.destroy_process_group()
