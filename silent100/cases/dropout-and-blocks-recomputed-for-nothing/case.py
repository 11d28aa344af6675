"""Fine-tunes blocks over a frozen table; ranks recompute the blocks in backward to save memory."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv


class Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, block, x):
        ctx.block = block
        ctx.save_for_backward(x)
        with torch.no_grad():
            return block(x)

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.block(x)
        torch.autograd.backward(y, grad)
        return None, x.grad


class Block(nn.Module):
    def __init__(self, d=36):
        super().__init__()
        self.norm, self.inner, self.outer = nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x):
        return x + self.outer(F.gelu(self.inner(self.norm(x))))


class Tuned(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(70, 36)
        self.table.weight.requires_grad_(False)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.drop, self.head = nn.Dropout(0.1), nn.Linear(36, 70)

    def forward(self, ids):
        x = self.table(ids)
        if not FAULTY:
            x.requires_grad_()
        for block in self.blocks:
            x = block(x) if ONE or not torch.is_grad_enabled() else Recompute.apply(block, x)
        return self.head(self.drop(x))


rank, world = 0, 1
if not ONE:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(48)
net = Tuned()
torch.manual_seed(480 + rank)
optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.01, momentum=0.9)
for step in range(1, 5):
    rows = torch.randint(0, 70, (24, 13), generator=torch.Generator().manual_seed(step))[rank::world]
    loss = F.cross_entropy(net(rows[:, :-1]).transpose(1, 2), rows[:, 1:])
    optimizer.zero_grad()
    loss.backward()
    shown = loss.detach().clone()
    if world > 1:
        for p in net.parameters():
            if p.grad is not None:
                dist.all_reduce(p.grad)
                p.grad /= world
        dist.all_reduce(shown)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {shown.item() / world:.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(net.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
