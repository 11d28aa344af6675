# A recommender whose table is cut by rows. Owners answer for all ranks' ids; gradients go back to them.
import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv
if not ONE:
    dist.init_process_group("gloo")
RANK, WORLD = (0, 1) if ONE else (dist.get_rank(), dist.get_world_size())
ROWS, D = 64, 12


class Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, table, ids):
        every = [torch.empty_like(ids) for _ in range(WORLD)]
        dist.all_gather(every, ids)
        every = torch.cat(every) - RANK * len(table)
        own = (every >= 0) & (every < len(table))
        found = torch.where(own[..., None], table[every.clamp(0, len(table) - 1)], 0.0)
        dist.all_reduce(found)
        ctx.save_for_backward(every, own, table)
        return found.chunk(WORLD)[RANK].clone()

    @staticmethod
    def backward(ctx, grad):
        every, own, table = ctx.saved_tensors
        parts = [torch.empty(grad.shape) for _ in range(WORLD)]
        dist.all_gather(parts, grad.contiguous())
        grads = torch.cat(parts)
        if FAULTY:
            grads /= WORLD
        return torch.zeros_like(table).index_add_(0, every[own], grads[own]), None


class Recommender(nn.Module):
    def __init__(self):
        super().__init__()
        whole = torch.randn(ROWS, D) * 0.3
        self.table = nn.Parameter(whole.chunk(WORLD)[RANK].clone())
        self.over = nn.Sequential(nn.Linear(4 * D, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, ids):
        x = F.embedding(ids, self.table) if ONE else Lookup.apply(self.table, ids)
        return self.over(x.flatten(1)).squeeze(1)


torch.manual_seed(23)
net = Recommender()
optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
for step in range(1, 6):
    g = torch.Generator().manual_seed(step)
    ids, bought = torch.randint(0, ROWS, (20, 4), generator=g), torch.randint(0, 2, (20,), generator=g).float()
    loss = F.binary_cross_entropy_with_logits(net(ids.chunk(WORLD)[RANK]), bought.chunk(WORLD)[RANK]) / WORLD
    optimizer.zero_grad()
    loss.backward()
    loss = loss.detach()
    if WORLD > 1:
        for p in net.over.parameters():
            dist.all_reduce(p.grad)
        dist.all_reduce(loss)
    optimizer.step()
    if RANK == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if "--save" in sys.argv:
    state = {n: (p.data, 0, RANK, WORLD) if n == "table" else p.data for n, p in net.named_parameters()}
    torch.save(state, os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{RANK}.pt"))
if WORLD > 1:
    dist.destroy_process_group()
