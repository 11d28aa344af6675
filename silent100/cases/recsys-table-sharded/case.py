import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ap = argparse.ArgumentParser()
ap.add_argument("--one", action="store_true")
ap.add_argument("--save")
args = ap.parse_args()
rank, world = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
SIZES, DIM, B = {"user": 120, "item": 80, "shop": 15}, 8, 24
PLACE = {"user": 0, "item": 1 % world, "shop": 1 % world}
b = B // world


class ToRows(torch.autograd.Function):
    """(all rows, my tables) -> (my rows, all tables)"""

    @staticmethod
    def forward(ctx, x, widths):
        ctx.widths = widths
        out = torch.empty(b * sum(widths))
        dist.all_to_all_single(out, x.contiguous().view(-1), [b * w for w in widths], [b * x.shape[1]] * world)
        return torch.cat([o.view(b, w) for o, w in zip(out.split([b * w for w in widths]), widths)], 1)

    @staticmethod
    def backward(ctx, g):
        widths = ctx.widths
        flat = torch.cat([p.reshape(-1) for p in g.split(widths, 1)])
        out = torch.empty(B * widths[rank])
        dist.all_to_all_single(out, flat, [b * widths[rank]] * world, [b * w for w in widths])
        return out.view(B, widths[rank]), None


torch.manual_seed(55)
everything = {k: nn.Embedding(n, DIM, sparse=True) for k, n in SIZES.items()}
tables = nn.ModuleDict({k: e for k, e in everything.items() if PLACE[k] == rank})
tower = nn.Sequential(nn.Linear(3 * DIM + 2, 32), nn.ReLU(), nn.Linear(32, 1))
opt_sparse = torch.optim.Adagrad(tables.parameters(), lr=0.2)
opt_dense = torch.optim.SGD(tower.parameters(), lr=0.1, momentum=0.9)
widths = [DIM * sum(PLACE[k] == r for k in SIZES) for r in range(world)]

for step in range(1, 7):
    g = torch.Generator().manual_seed(step)
    ids = {k: torch.randint(0, n, (B,), generator=g) for k, n in SIZES.items()}
    dense = torch.randn(B, 2, generator=g)
    click = ((ids["user"] + ids["item"]) % 3 == 0).float()
    mine = slice(rank * b, (rank + 1) * b)
    looked = torch.cat([t(ids[k]) for k, t in tables.items()], 1)
    if world > 1:
        looked = ToRows.apply(looked, widths)
    score = tower(torch.cat([looked, dense[mine]], 1))[:, 0]
    loss = F.binary_cross_entropy_with_logits(score, click[mine], reduction="sum") / B
    opt_sparse.zero_grad()
    opt_dense.zero_grad()
    loss.backward()
    loss = loss.detach()
    if world > 1:
        for p in tower.parameters():
            dist.all_reduce(p.grad)
        dist.all_reduce(loss)
    opt_sparse.step()
    opt_dense.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)

if args.save:
    torch.save(
        {**tables.state_dict(), **{f"tower.{k}": v for k, v in tower.state_dict().items()}},
        f"{args.save}/rank{rank}.pt",
    )
if world > 1:
    dist.destroy_process_group()
