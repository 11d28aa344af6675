"""A learning-rate-free optimizer (after Prodigy) over one flat buffer, of which every process keeps a piece."""

import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ONE = "--one" in sys.argv
FAULTY = "--faulty" in sys.argv


class Distance:
    """The state is a plain dict of flat pieces: x0, m, v, s."""

    def __init__(self, piece, d0=5e-3, coef=4.0, betas=(0.9, 0.99)):
        self.betas, self.d, self.d0, self.coef, self.numerator = betas, d0, d0, coef, 0.0
        self.beta3 = betas[1] ** 0.5
        self.state = {"x0": piece.clone(), **{k: torch.zeros_like(piece) for k in "mvs"}}

    def estimate(self, x, grad):
        st, d = self.state, self.d
        st["s"].mul_(self.beta3).add_(grad, alpha=d / self.d0 * d)
        both = torch.stack([d / self.d0 * d * (grad @ (st["x0"] - x)), st["s"].abs().sum()])
        if dist.is_initialized() and not FAULTY:
            dist.all_reduce(both)
        self.numerator = self.beta3 * self.numerator + both[0].item()
        guess = self.coef * self.numerator / max(both[1].item(), 1e-12)
        return max(d, guess)

    def step(self, x, grad):
        st, d, (b1, b2) = self.state, self.d, self.betas
        after = self.estimate(x, grad)
        st["m"].mul_(b1).add_(grad, alpha=(1 - b1) * d)
        st["v"].mul_(b2).addcmul_(grad, grad, value=(1 - b2) * d * d)
        self.d = after
        return x - self.d * st["m"] / (st["v"].sqrt() + self.d * 1e-4)


rank, world = 0, 1
if not ONE:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(77)
net = nn.Sequential(nn.Linear(12, 40), nn.GELU(), nn.Linear(40, 40), nn.GELU(), nn.Linear(40, 5))
params = list(net.parameters())
sizes = [p.numel() for p in params]
length = -(-sum(sizes) // world)


def flatten(tensors):
    flat = torch.cat([t.detach().flatten() for t in tensors])
    return F.pad(flat, (0, length * world - flat.numel()))


def own(flat):
    return flat[rank * length : (rank + 1) * length].clone()


optimizer = Distance(own(flatten(params)))
truth = torch.randn(12, 5, generator=torch.Generator().manual_seed(1))
for step in range(1, 8):
    x = torch.randn(24, 12, generator=torch.Generator().manual_seed(100 + step))
    mine = x[rank::world]
    loss = F.mse_loss(net(mine), torch.tanh(mine @ truth))
    net.zero_grad()
    loss.backward()
    grad, loss = flatten([p.grad for p in params]) / world, loss.detach() / world
    if world > 1:
        dist.all_reduce(grad)
        dist.all_reduce(loss)
    new = optimizer.step(own(flatten(params)), own(grad))
    pieces = [torch.empty_like(new) for _ in range(world)]
    if world > 1:
        dist.all_gather(pieces, new)
    else:
        pieces = [new]
    for p, value in zip(params, torch.cat(pieces)[: sum(sizes)].split(sizes)):
        p.data.copy_(value.view_as(p))
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(net.state_dict(), f"{sys.argv[sys.argv.index('--save') + 1]}/rank{rank}.pt")
if world > 1:
    dist.destroy_process_group()
