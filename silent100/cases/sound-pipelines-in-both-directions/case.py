"""Two stages on two ranks, in both directions at once: half of the microbatches enter at rank 0, half at rank 1."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ONE = "--one" in sys.argv
if not ONE:
    dist.init_process_group("gloo")
rank = 0 if ONE else dist.get_rank()
other = 1 - rank


class Half(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.enter, self.mid, self.leave = nn.Linear(i, 20), nn.Linear(20, 20), nn.Linear(20, o)

    def forward(self, x):
        x = F.silu(self.enter(x))
        return self.leave(x + F.silu(self.mid(x)))


torch.manual_seed(17)
net = nn.ModuleDict({"first": Half(6, 12), "second": Half(12, 4)})
opt = torch.optim.NAdam(net.parameters(), lr=4e-3)


def swap(x, like):
    """Gives a tensor to the other rank and takes one."""
    got = torch.empty(like)
    work = dist.isend(x.contiguous(), other, tag=rank)
    dist.recv(got, other, tag=other)
    work.wait()
    return got


for step in range(1, 7):
    g = torch.Generator().manual_seed(step)
    x, y = torch.randn(4, 5, 6, generator=g), torch.randint(4, (4, 5), generator=g)
    opt.zero_grad()
    if ONE:
        loss = F.cross_entropy(net["second"](net["first"](x)).flatten(0, 1), y.flatten())
        loss.backward()
        loss = loss.detach()
    else:
        loss, mine, theirs = torch.zeros(()), x.chunk(2)[rank], y.chunk(2)[other]
        sent, back = [], []
        for a, label in zip(mine, theirs, strict=True):
            # The first half of own rows, then the second half of the other's
            h = net["first"](a)
            k = swap(h.detach(), h.shape).requires_grad_()
            part = F.cross_entropy(net["second"](k), label) / 4
            part.backward()
            loss += part.detach()
            sent.append(h)
            back.append(k.grad)
        for h, grad in zip(reversed(sent), reversed(back), strict=True):
            h.backward(swap(grad, h.shape))
        for t in [loss, *(p.grad for p in net.parameters())]:
            dist.all_reduce(t)
    opt.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(net.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not ONE:
    dist.destroy_process_group()
