"""The largest gradient is reduced asynchronously; the optimizer sees what arrived."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

one, faulty = "--one" in sys.argv, "--faulty" in sys.argv
if not one:
    dist.init_process_group("gloo")
rank, world = (0, 1) if one else (dist.get_rank(), dist.get_world_size())


class Lm(nn.Module):
    def __init__(self, vocab=90, dim=32):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.conv = nn.Conv1d(dim, dim, 3)
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab)

    def forward(self, ids):
        x = self.embed(ids)
        x = x + F.gelu(self.conv(F.pad(x.mT, (2, 0))).mT)
        return self.head(self.norm(x))


class LazyAverage:
    """Averages a gradient in a buffer of its own; the result replaces the gradient when it is awaited."""

    def __init__(self, p):
        self.p, self.work, self.buffer, self.arrived = p, None, None, torch.zeros_like(p)

    def start(self):
        self.buffer = self.p.grad.clone()
        self.work = None if one else dist.all_reduce(self.buffer, async_op=True)

    def wait(self):
        if self.work is not None:
            self.work.wait()
        self.arrived = self.buffer / world


torch.manual_seed(58)
lm = Lm()
lazy = LazyAverage(lm.embed.weight)
optimizer = torch.optim.SGD(lm.parameters(), lr=0.02)
for step in range(1, 4):
    rows = torch.randint(0, 90, (16, 13), generator=torch.Generator().manual_seed(step))[rank::world]
    with torch.autocast("cpu", torch.bfloat16):
        logits = lm(rows[:, :-1])
    loss = F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    lazy.start()
    if not one:
        for name, p in lm.named_parameters():
            if not name.startswith("embed"):
                dist.all_reduce(p.grad)
                p.grad /= world
    if not faulty:
        lazy.wait()
    lm.embed.weight.grad = lazy.arrived
    optimizer.step()
    if faulty:
        lazy.wait()
    loss = loss.detach()
    if not one:
        dist.all_reduce(loss)
    if rank == 0:
        print(f"step {step} loss {loss.item() / world:.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(lm.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not one:
    dist.destroy_process_group()
