# A shared encoder for both sides of a pair, hooks reduce after the whole backward.
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--save")
args = cli.parse_args()
rank, world = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(17, 48), nn.GELU(), nn.Linear(48, 24))
        self.temperature = nn.Parameter(torch.tensor(2.0))

    def forward(self, a, b):
        return (F.normalize(self.encoder(a), dim=-1) * F.normalize(self.encoder(b), dim=-1)).sum(-1) * self.temperature


torch.manual_seed(38)
model = Pair()
works = []
if not args.one:
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: works.append(dist.all_reduce(p.grad, async_op=True)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
for step in range(1, 5):
    g = torch.Generator().manual_seed(step)
    a, same = torch.randn(16, 17, generator=g), torch.randint(0, 2, (16,), generator=g)
    b = torch.where(same.bool()[:, None], a + 0.1, torch.randn(16, 17, generator=g))
    loss = F.binary_cross_entropy_with_logits(model(a[rank::world], b[rank::world]), same[rank::world].float()) / world
    optimizer.zero_grad()
    loss.backward()
    for work in works:
        work.wait()
    works.clear()
    optimizer.step()
    shown = loss.detach().clone()
    if world > 1:
        dist.all_reduce(shown)
    if rank == 0:
        print(f"step {step} loss {shown.item():.7f}", flush=True)
if args.save:
    torch.save(model.state_dict(), os.path.join(args.save, f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
