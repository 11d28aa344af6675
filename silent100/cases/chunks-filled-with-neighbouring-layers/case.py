"""Four layers on two ranks; every microbatch goes round the ranks twice (interleaved chunks)."""

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

WIDTH, LAYERS, MICRO = 20, 4, 3


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 40), nn.Linear(40, WIDTH)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


torch.manual_seed(31)
drawn = [Layer() for _ in range(LAYERS)]
head = nn.Linear(WIDTH, 3)
if world == 1:
    layers = dict(enumerate(drawn))
else:
    layers = {}
    for chunk in range(2):
        place = chunk * world + rank
        layers[place] = drawn[rank * 2 + chunk] if flags.faulty else drawn[place]
last = rank == world - 1
named = {f"layers.{i}.{n}": p for i, layer in layers.items() for n, p in layer.named_parameters()}
if last:
    named |= {f"head.{n}": p for n, p in head.named_parameters()}
model = nn.Module()
model.layers = nn.ModuleDict({str(i): layer for i, layer in layers.items()})
if last:
    model.head = head
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for step in range(1, 6):
    g = torch.Generator().manual_seed(step)
    data, shown = torch.randn(12, WIDTH, generator=g), torch.zeros(())
    answers = (data[:, :3] * data[:, 3:6]).cumsum(1).argmax(1)
    for x, answer in zip(data.chunk(MICRO), answers.chunk(MICRO)):
        trace = []
        for place in range(LAYERS):
            if place not in layers:
                continue
            if world > 1 and place > 0:
                x = torch.empty_like(x)
                dist.recv(x, (place - 1) % world)
                x.requires_grad_()
            y = layers[place](x)
            trace.append((place, x, y))
            if world > 1 and place < LAYERS - 1:
                dist.send(y.detach(), (place + 1) % world)
            x = y
        loss = F.cross_entropy(head(x), answer) / MICRO if last else None
        if world == 1:
            loss.backward()
        else:
            for place, x, y in reversed(trace):
                if place == LAYERS - 1:
                    loss.backward()
                else:
                    grad = torch.empty_like(y)
                    dist.recv(grad, (place + 1) % world)
                    y.backward(grad)
                if place > 0:
                    dist.send(x.grad, (place - 1) % world)
        if last:
            shown += loss.detach()
    optimizer.step()
    optimizer.zero_grad()
    if world > 1:
        dist.broadcast(shown, world - 1)
    if rank == 0:
        print(f"step {step} loss {shown.item():.7f}", flush=True)
if flags.save:
    torch.save({n: p.detach() for n, p in named.items()}, os.path.join(flags.save, f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
