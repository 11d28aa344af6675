import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ap = argparse.ArgumentParser()
ap.add_argument("--one", action="store_true")
ap.add_argument("--save")
args = ap.parse_args()
torch.set_default_dtype(torch.float64)
if not args.one:
    dist.init_process_group("gloo")
rank = 0 if args.one else dist.get_rank()
world = 1 if args.one else dist.get_world_size()

torch.manual_seed(40)
model = nn.Sequential(nn.Linear(4, 10), nn.Tanh(), nn.Linear(10, 3))
X = torch.randn(50, 4)
Y = (X[:, :3] ** 2).argmax(1)
cut = 50 if args.one else 21
rows = slice(0, cut) if rank == 0 else slice(cut, 50)
opt = torch.optim.LBFGS(model.parameters(), lr=1.0, max_iter=4, history_size=6, line_search_fn="strong_wolfe")
calls = 0


def closure():
    global calls
    calls += 1
    opt.zero_grad()
    loss = F.cross_entropy(model(X[rows]), Y[rows], reduction="sum") / len(X)
    loss = loss + 1e-3 / world * sum((p**2).sum() for p in model.parameters())
    loss.backward()
    loss = loss.detach()
    if world > 1:
        buf = torch.cat([loss.view(1)] + [p.grad.flatten() for p in model.parameters()])
        dist.all_reduce(buf)
        loss, flat = buf[0], buf[1:]
        for p in model.parameters():
            p.grad.copy_(flat[: p.numel()].view_as(p))
            flat = flat[p.numel() :]
    return loss


for step in range(1, 6):
    loss = opt.step(closure)
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
        print(f"  closure calls so far {calls}")

if args.save:
    torch.save(model.state_dict(), f"{args.save}/rank{rank}.pt")
if world > 1:
    dist.destroy_process_group()
