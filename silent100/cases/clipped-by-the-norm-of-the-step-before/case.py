"""Each rank has a flat piece of gradients, momentum and weights; the norm for clipping is summed in the background."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

flags = argparse.ArgumentParser(description=__doc__)
flags.add_argument("--one", action="store_true")
flags.add_argument("--faulty", action="store_true")
flags.add_argument("--save")
flags = flags.parse_args()
rank, world = 0, 1
if not flags.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()


class Sharded:
    def __init__(self, parameters, lr, limit):
        self.parameters, self.lr, self.limit = list(parameters), lr, limit
        self.sizes = [p.numel() for p in self.parameters]
        self.length = -(-sum(self.sizes) // world)
        self.velocity, self.squares, self.handle = torch.zeros(self.length), None, None

    def flat(self, tensors):
        whole = torch.cat([t.flatten() for t in tensors])
        return F.pad(whole, (0, self.length * world - len(whole)))

    def norm(self, grad):
        squares = grad.square().sum()
        if world == 1:
            return squares.sqrt()
        handle = dist.all_reduce(squares, async_op=True)
        if flags.faulty and self.handle is not None:
            self.handle.wait()
            known = self.squares
        else:
            handle.wait()
            known = squares
        self.squares, self.handle = squares, handle
        return known.sqrt()

    @torch.no_grad()
    def step(self):
        grad = self.flat([p.grad for p in self.parameters])
        if world > 1:
            whole, grad = grad, torch.empty(self.length)
            dist.reduce_scatter_tensor(grad, whole)
        grad = grad * (self.limit / self.norm(grad)).clamp(max=1)
        self.velocity.mul_(0.9).add_(grad)
        weights = self.flat(self.parameters).chunk(world)[rank] - self.lr * self.velocity
        if world > 1:
            own, weights = weights, torch.empty(self.length * world)
            dist.all_gather_into_tensor(weights, own)
        for p, new in zip(self.parameters, weights[: sum(self.sizes)].split(self.sizes)):
            p.copy_(new.view_as(p))
            p.grad = None


torch.manual_seed(84)
net = nn.Sequential(nn.Linear(9, 40), nn.GELU(), nn.LayerNorm(40), nn.Linear(40, 40), nn.GELU(), nn.Linear(40, 2))
optimizer = Sharded(net.parameters(), lr=0.1, limit=0.5)
for step in range(1, 7):
    x = torch.randn(20, 9, generator=torch.Generator().manual_seed(step))[rank::world] * (1 + step % 2)
    y = torch.stack([x[:, :3].sum(1), x[:, 3] * x[:, 4]], 1)
    loss = F.mse_loss(net(x), y) / world
    loss.backward()
    shown = loss.detach()
    optimizer.step()
    if world > 1:
        dist.all_reduce(shown)
    if rank == 0:
        print(f"step {step} loss {shown.item():.7f}", flush=True)
if flags.save:
    torch.save(net.state_dict(), os.path.join(flags.save, f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
