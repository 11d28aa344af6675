"""After a restart ranks have other numbers: their rows and their pieces of the optimizer change places."""

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


class Piece:
    """Adam on one contiguous piece of all parameters; pieces are gathered after every step."""

    def __init__(self, model, place):
        self.params, self.place, self.count = list(model.parameters()), place, 0
        total = sum(p.numel() for p in self.params)
        self.size = -(-total // world)
        self.first, self.second = torch.zeros(self.size), torch.zeros(self.size)

    def flat(self, tensors):
        joined = torch.cat([t.detach().flatten() for t in tensors])
        return F.pad(joined, (0, self.size * world - len(joined)))

    def step(self, order, lr=2e-3):
        here = slice(self.place * self.size, (self.place + 1) * self.size)
        grad, weight = self.flat([p.grad for p in self.params])[here], self.flat(self.params)[here].clone()
        self.count += 1
        self.first.lerp_(grad, 0.1)
        self.second.lerp_(grad.square(), 0.02)
        scale = (self.second / (1 - 0.98**self.count)).sqrt() + 1e-4
        weight -= lr * self.first / (1 - 0.9**self.count) / scale
        pieces = [torch.empty_like(weight) for _ in range(world)]
        if world > 1:
            dist.all_gather(pieces, weight)
        else:
            pieces = [weight]
        whole = torch.cat([pieces[order.index(place)] for place in range(world)])
        for p in self.params:
            p.data.copy_(whole[: p.numel()].view_as(p))
            whole = whole[p.numel() :]

    def move(self, place, order):
        """Takes over the piece of another place."""
        for held in (self.first, self.second):
            pieces = [torch.empty_like(held) for _ in range(world)]
            dist.all_gather(pieces, held)
            held.copy_(pieces[order.index(place)])
        self.place = place


class Sums(nn.Module):
    """Reads two numbers digit by digit and says the digits of their sum."""

    def __init__(self):
        super().__init__()
        self.digits, self.cell = nn.Embedding(10, 14), nn.GRU(28, 32, batch_first=True)
        self.say = nn.Linear(32, 10)

    def forward(self, a, b):
        return self.say(self.cell(torch.cat([self.digits(a), self.digits(b)], -1))[0])


torch.manual_seed(292)
model = Sums()
order = list(range(world))
optimizer = Piece(model, rank)
for step in range(1, 7):
    if step == 4 and world > 1:
        new = [(place + 1) % world for place in order]
        optimizer.move(new[rank], order)
        order = new
    g = torch.Generator().manual_seed(step)
    a, b = torch.randint(0, 10, (2, 15, 6), generator=g).unbind()
    a, b = (t[order[rank] :: world] for t in (a, b))
    loss = F.cross_entropy(model(a, b).flatten(0, 1), ((a + b) % 10).flatten())
    model.zero_grad()
    loss.backward()
    loss = loss.detach()
    if world > 1:
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= world
        dist.all_reduce(loss)
    optimizer.step(order)
    if rank == 0:
        print(f"step {step} loss {loss.item() / world:.7f}", flush=True)
if args.save:
    torch.save(model.state_dict(), os.path.join(args.save, f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
