# Listwise choice: a score for each of thirteen items, a softmax over all, items cut over ranks.
import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn

ALONE = "--one" in sys.argv
if not ALONE:
    dist.init_process_group("gloo")
rank = 0 if ALONE else dist.get_rank()
ITEMS, CUTS = 13, [0, 5, 9, 13]
BEGIN, END = (0, ITEMS) if ALONE else (CUTS[rank], CUTS[rank + 1])


def over_ranks(t, op=dist.ReduceOp.SUM):
    t = t.detach().clone()
    if not ALONE:
        dist.all_reduce(t, op)
    return t


class SumOnce(torch.autograd.Function):
    """For what is used alike on all ranks."""

    @staticmethod
    def forward(ctx, t):
        return over_ranks(t)

    @staticmethod
    def backward(ctx, g):
        return g


class SumBothWays(torch.autograd.Function):
    """For what each rank uses for items of its own."""

    @staticmethod
    def forward(ctx, t):
        return over_ranks(t)

    @staticmethod
    def backward(ctx, g):
        return over_ranks(g.contiguous())


class Chooser(nn.Module):
    def __init__(self):
        super().__init__()
        self.item, self.context = nn.Linear(6, 15), nn.Linear(15, 15, bias=False)
        self.score = nn.Linear(15, 1, bias=False)

    def forward(self, x):
        h = torch.tanh(self.item(x))
        others = SumBothWays.apply(h.sum(1)) / ITEMS
        return self.score(torch.tanh(h + self.context(others)[:, None]))[..., 0]


torch.manual_seed(38)
net = Chooser()
optimizer = torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.9)
for step in range(1, 7):
    x = torch.randn(9, ITEMS, 6, generator=torch.Generator().manual_seed(step))
    chosen = (x[..., 0] * x[..., 1] - x[..., 2]).argmax(1)
    scores = net(x[:, BEGIN:END])
    top = over_ranks(scores.amax(1), dist.ReduceOp.MAX)
    total = SumOnce.apply((scores - top[:, None]).exp().sum(1))
    here = (chosen >= BEGIN) & (chosen < END)
    picked = scores.gather(1, (chosen - BEGIN).clamp(0, END - BEGIN - 1)[:, None])[:, 0]
    picked = SumOnce.apply(torch.where(here, picked - top, 0.0))
    loss = (total.log() - picked).mean()
    optimizer.zero_grad()
    loss.backward()
    for p in net.parameters():
        p.grad = over_ranks(p.grad)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(net.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not ALONE:
    dist.destroy_process_group()
