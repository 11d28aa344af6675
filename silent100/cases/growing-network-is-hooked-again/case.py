"""A denoiser that grows: a block is added in the third step (progressive training)."""

import argparse
import pathlib

import torch
import torch.distributed as dist
from torch import nn

args = argparse.ArgumentParser()
args.add_argument("--one", action="store_true")
args.add_argument("--faulty", action="store_true")
args.add_argument("--save", type=pathlib.Path)
args = args.parse_args()


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.norm, self.conv = nn.GroupNorm(2, c), nn.Conv2d(c, c, 3, padding=1)
        nn.init.normal_(self.conv.weight, std=0.08)

    def forward(self, x):
        return x + self.conv(torch.tanh(self.norm(x)))


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.paint = nn.Conv2d(2, 8, 3, padding=1), nn.Conv2d(8, 2, 3, padding=1)
        self.blocks = nn.ModuleList(Block(8) for _ in range(2))

    def forward(self, x):
        h = self.stem(x)
        for block in self.blocks:
            h = block(h)
        return x - self.paint(h)


def add_over_ranks(p):
    dist.all_reduce(p.grad)


class Session:
    """Keeps what belongs together: network, optimizer, communication."""

    def __init__(self):
        self.rank, self.world = 0, 1
        if not args.one:
            dist.init_process_group("gloo")
            self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(88)
        self.net = Denoiser()
        self.connect(self.net)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.02, momentum=0.8)

    def connect(self, module):
        if self.world > 1:
            for p in module.parameters():
                p.register_post_accumulate_grad_hook(add_over_ranks)

    def grow(self):
        block = Block(8)
        self.net.blocks.append(block)
        self.connect(self.net if args.faulty else block)
        self.optimizer.add_param_group({"params": list(block.parameters())})

    def update(self, step):
        g = torch.Generator().manual_seed(step * 7)
        clean = torch.rand(6, 2, 7, 7, generator=g)
        noisy = clean + 0.3 * torch.randn(6, 2, 7, 7, generator=g)
        mine = slice(self.rank, None, self.world)
        loss = (self.net(noisy[mine]) - clean[mine]).square().sum() / clean.numel()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        loss = loss.detach()
        if self.world > 1:
            dist.all_reduce(loss)
        if self.rank == 0:
            print(f"step {step} loss {loss.item():.7f}", flush=True)


session = Session()
for step in range(1, 7):
    if step == 3:
        session.grow()
    session.update(step)
if args.save:
    torch.save(session.net.state_dict(), args.save / f"rank{session.rank}.pt")
if session.world > 1:
    dist.destroy_process_group()
