"""Each matrix is orthogonalized and updated by one rank and then broadcast; compute is bfloat16."""

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
rank, world = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()


def sign_of(g):
    """The orthogonal factor of a matrix, in a few Newton-Schulz rounds."""
    x = g / (g.norm() + 1e-7)
    for _ in range(6):
        x = 1.5 * x - 0.5 * x @ x.T @ x
    return x


class Residual(nn.Module):
    def __init__(self, d=32, depth=5):
        super().__init__()
        self.embed, self.head = nn.Embedding(72, d), nn.Linear(d, 72)
        self.layers = nn.ModuleList(nn.Linear(d, d, bias=False) for _ in range(depth))

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = x + F.silu(layer(F.layer_norm(x, x.shape[-1:])))
        return self.head(x)


@torch.no_grad()
def update(matrices, lr):
    rounds = len(matrices) // world if args.faulty else -(-len(matrices) // world)
    for i in range(rounds):
        dealt = matrices[i * world : (i + 1) * world]
        if rank < len(dealt):
            dealt[rank].sub_(sign_of(dealt[rank].grad), alpha=lr)
        if world > 1:
            for owner, p in enumerate(dealt):
                dist.broadcast(p.data, owner)


torch.manual_seed(17)
net = Residual()
matrices = [layer.weight for layer in net.layers]
rest = torch.optim.SGD([*net.embed.parameters(), *net.head.parameters()], lr=0.1)
for step in range(1, 5):
    rows = torch.randint(0, 72, (32, 13), generator=torch.Generator().manual_seed(step))[rank::world]
    with torch.autocast("cpu", torch.bfloat16):
        logits = net(rows[:, :-1])
    loss = F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())
    net.zero_grad()
    loss.backward()
    shown = loss.detach().clone()
    if world > 1:
        for p in net.parameters():
            dist.all_reduce(p.grad)
            p.grad /= world
        dist.all_reduce(shown)
    update(matrices, 1e-3)
    rest.step()
    if rank == 0:
        print(f"step {step} loss {shown.item() / world:.7f}", flush=True)
if args.save:
    torch.save(net.state_dict(), os.path.join(args.save, f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
