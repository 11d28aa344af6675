"""Gradual unfreezing from the top; every second update another layer gets its gradient and its group."""

import os
import sys
from functools import partial

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


def layer(n):
    return nn.TransformerEncoderLayer(n, 2, 32, 0.0, batch_first=True, norm_first=True)


class Reader(nn.Module):
    def __init__(self, n=16):
        super().__init__()
        self.table = nn.Embedding(22, n)
        self.layers = nn.ModuleList(layer(n) for _ in range(3))
        self.score = nn.Linear(n, 1)

    def forward(self, ids):
        x = self.table(ids)
        for block in self.layers:
            x = block(x)
        return self.score(x.mean(1))[:, 0]


def thaw(net, opt, module, rate):
    for p in module.parameters():
        p.requires_grad_()
    opt.add_param_group({"params": list(module.parameters()), "lr": rate})


def reduce_all(net, world):
    hot = [p for p in net.parameters() if p.requires_grad]
    handles = [dist.all_reduce(p.grad, async_op=True) for p in hot]
    for p, handle in zip(hot, handles, strict=True):
        handle.wait()
        p.grad.div_(world)


def main(argv):
    alone = "--one" in argv
    rank, world, reduce = 0, 1, lambda net: None
    if not alone:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
        reduce = partial(reduce_all, world=world)
    torch.manual_seed(80)
    net = Reader()
    net.requires_grad_(False)
    net.score.requires_grad_()
    opt = torch.optim.SGD(net.score.parameters(), lr=1e-2, momentum=0.9)
    waiting = [net.table, *net.layers]
    for step in range(1, 10):
        if step % 2 == 0 and waiting:
            thaw(net, opt, waiting.pop(), 1e-2 / step)
        g = torch.Generator().manual_seed(step)
        ids = torch.randint(22, (8, 7), generator=g)
        want = (ids < 5).float().sum(1)
        loss = F.mse_loss(net(ids[rank::world]), want[rank::world])
        opt.zero_grad()
        loss.backward()
        reduce(net)
        opt.step()
        loss = loss.detach().clone()
        if world > 1:
            dist.all_reduce(loss)
        if rank == 0:
            print(f"step {step} loss {loss.item() / world:.7f}", flush=True)
    if "--save" in argv:
        torch.save(net.state_dict(), os.path.join(argv[argv.index("--save") + 1], f"rank{rank}.pt"))
    if not alone:
        dist.destroy_process_group()


main(sys.argv)
