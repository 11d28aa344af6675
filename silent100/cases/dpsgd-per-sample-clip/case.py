import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.func import functional_call, grad_and_value, vmap

ap = argparse.ArgumentParser()
ap.add_argument("--one", action="store_true")
ap.add_argument("--save")
args = ap.parse_args()
rank, world = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
B, CLIP, NOISE, LR = 15, 0.5, 0.4, 0.5

torch.manual_seed(19)
net = nn.Sequential(nn.Linear(10, 24), nn.Tanh(), nn.Linear(24, 4))
weights = {k: v.detach() for k, v in net.named_parameters()}
X = torch.randn(90, 10)
Y = (X @ torch.randn(10, 4)).argmax(1)
draw = torch.Generator().manual_seed(4)
secret = torch.Generator().manual_seed(1337)


def one_loss(w, x, y):
    return F.cross_entropy(functional_call(net, w, (x[None],)), y[None])


per_sample = vmap(grad_and_value(one_loss), in_dims=(None, 0, 0))

for step in range(1, 7):
    rows = torch.randperm(90, generator=draw)[:B]
    rows = rows.tensor_split(world)[rank] if step % 2 else rows[rank::world]
    grads, losses = per_sample(weights, X[rows], Y[rows])
    norms = sum(g.flatten(1).square().sum(1) for g in grads.values()).sqrt()
    factor = (CLIP / norms.clamp_min(1e-12)).clamp_max(1.0)
    loss = losses.sum() / B
    if world > 1:
        dist.all_reduce(loss)
    for k, g in grads.items():
        total = torch.einsum("b,b...->...", factor, g)
        if rank == 0:
            total += NOISE * CLIP * torch.randn(g.shape[1:], generator=secret)
        if world > 1:
            dist.all_reduce(total)
        weights[k] = weights[k] - LR * total / B
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)

if args.save:
    torch.save(weights, f"{args.save}/rank{rank}.pt")
if world > 1:
    dist.destroy_process_group()
