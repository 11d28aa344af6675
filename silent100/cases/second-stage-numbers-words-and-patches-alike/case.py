"""Text with pictures in it on two stages; the patches of a picture share one rotary position."""

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

VOCAB, DIM, LENGTH, MICRO, HEADS = 30, 24, 12, 3, 2


def rotate(x, positions):
    half = x.shape[-1] // 2
    angles = positions[:, None, :, None] * 30.0 ** (-torch.arange(half) / half)
    a, b = x.split(half, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(DIM), nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.mlp = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 48), nn.GELU(), nn.Linear(48, DIM))

    def forward(self, x, positions=None):
        if positions is None:
            positions = torch.arange(x.shape[1]).expand(x.shape[:2])
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(rotate(q, positions), rotate(k, positions), v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.layers = nn.Embedding(VOCAB, DIM), nn.ModuleDict({str(i): Layer() for i in range(4)})
        self.head = nn.Linear(DIM, VOCAB)


torch.manual_seed(54)
model = Model()
first, last = rank == 0, rank == world - 1
if world > 1:
    for i in range(4):
        if i // 2 != rank:
            del model.layers[str(i)]
    if first:
        del model.head
    else:
        del model.embed
optimizer = torch.optim.Adam(model.parameters(), lr=4e-3, eps=1e-4)
for step in range(1, 6):
    g = torch.Generator().manual_seed(step)
    rows = torch.randint(0, VOCAB, (6, LENGTH + 1), generator=g)
    begin = torch.randint(1, 5, (6, 1), generator=g)
    places = torch.arange(LENGTH)
    picture = (places > begin) & (places < begin + 4)
    positions = places - picture.cumsum(1)
    entered, left, shown = [], [], torch.zeros(())
    for piece, own in zip(rows.chunk(MICRO), positions.chunk(MICRO)):
        if first:
            x = model.embed(piece[:, :-1])
        else:
            x = torch.empty(len(piece), LENGTH, DIM)
            dist.recv(x, 0)
            x.requires_grad_()
        entered.append(x)
        for layer in model.layers.values():
            x = layer(x) if flags.faulty and not first else layer(x, own)
        if last:
            x = F.cross_entropy(model.head(x).flatten(0, 1), piece[:, 1:].flatten()) / MICRO
            shown += x.detach()
        else:
            dist.send(x.detach(), 1)
        left.append(x)
    optimizer.zero_grad()
    for x, y in zip(entered, left):
        grad = None
        if not last:
            grad = torch.empty_like(y)
            dist.recv(grad, 1)
        y.backward(grad)
        if not first:
            dist.send(x.grad, 0)
    optimizer.step()
    if world > 1:
        dist.broadcast(shown, 1)
    if rank == 0:
        print(f"step {step} loss {shown.item():.7f}", flush=True)
if flags.save:
    torch.save(model.state_dict(), os.path.join(flags.save, f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
