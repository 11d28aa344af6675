import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--faulty", action="store_true")
cli.add_argument("--save")
args = cli.parse_args()
rank, tp = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, tp = dist.get_rank(), dist.get_world_size()


class Join(torch.autograd.Function):
    """Sums outputs in forward, or gradients of inputs in backward."""

    @staticmethod
    def forward(ctx, x, outputs):
        ctx.outputs = outputs
        x = x.clone()
        if outputs and tp > 1:
            dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, g):
        g = g.clone()
        if not ctx.outputs and tp > 1:
            dist.all_reduce(g)
        return g, None


def draw(pieces, n_out, n_in, seed):
    """Draws a matrix piece by piece, each from a seed of its own."""
    made = []
    for piece in pieces:
        g = torch.Generator().manual_seed(seed if args.faulty else seed + piece)
        made.append(torch.randn(n_out, n_in, generator=g) / 6)
    return made


class Mlp(nn.Module):
    PIECES = 2

    def __init__(self, number, d=26, hidden=64):
        super().__init__()
        own = [rank] if tp > 1 else range(self.PIECES)
        part = hidden // self.PIECES
        self.norm = nn.LayerNorm(d)
        self.up = nn.Parameter(torch.cat(draw(own, part, d, 100 * number)))
        self.down = nn.Parameter(torch.cat(draw(own, d, part, 100 * number + 50), 1))

    def forward(self, x):
        h = Join.apply(self.norm(x), False)
        return x + Join.apply(F.gelu(h @ self.up.T) @ self.down.T, True)


torch.manual_seed(150)
net = nn.Sequential(nn.Embedding(44, 26), Mlp(1), Mlp(2), nn.Linear(26, 44))
optimizer = torch.optim.SGD(net.parameters(), lr=0.3)
for step in range(1, 5):
    rows = torch.randint(0, 44, (8, 10), generator=torch.Generator().manual_seed(step))
    loss = F.cross_entropy(net(rows[:, :-1]).transpose(1, 2), rows[:, 1:])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if args.save:
    dims = {"up": 0, "down": 1}
    state = {}
    for name, p in net.named_parameters():
        dim = dims.get(name.rpartition(".")[2])
        state[name] = p.data if dim is None else (p.data, dim, rank, tp)
    torch.save(state, os.path.join(args.save, f"rank{rank}.pt"))
if tp > 1:
    dist.destroy_process_group()
