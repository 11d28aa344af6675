"""Hard-example mining: losses of all rows are gathered, and the worst quarter makes the gradient."""

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
ROWS, KEPT = 16, 4


def worst(losses):
    """Returns the loss from which on a row counts."""
    every = [losses.detach()]
    if world > 1:
        every = [torch.empty_like(losses) for _ in range(world)]
        dist.all_gather(every, losses.detach().contiguous())
    return torch.cat(every).topk(KEPT).values[-1]


class Detector(nn.Module):
    def __init__(self, d=20):
        super().__init__()
        self.patch, self.mix = nn.Linear(6, d), nn.MultiheadAttention(d, 2, batch_first=True)
        self.norm, self.box = nn.LayerNorm(d), nn.Linear(d, 4)

    def forward(self, x):
        x = self.patch(x)
        return self.box(self.norm(x + self.mix(x, x, x, need_weights=False)[0]).mean(1))


torch.manual_seed(1604)
model = Detector()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for step in range(1, 6):
    g = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS, 5, 6, generator=g)
    # At even steps the second half has all hard rows
    if step % 2 == 0:
        x[ROWS // 2 :] *= 3
    y = x.square().mean(1)[:, :4]
    losses = F.smooth_l1_loss(model(x.chunk(world)[rank]), y.chunk(world)[rank], reduction="none").sum(1)
    loss = losses[losses.detach() >= worst(losses)].sum() / KEPT
    optimizer.zero_grad()
    loss.backward()
    loss = loss.detach()
    if world > 1:
        for p in model.parameters():
            dist.all_reduce(p.grad)
        dist.all_reduce(loss)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if args.save:
    torch.save(model.state_dict(), os.path.join(args.save, f"rank{rank}.pt"))
if not args.one:
    dist.destroy_process_group()
