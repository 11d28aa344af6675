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
V, D, B, K = 80, 16, 512, 8

torch.manual_seed(23)
center, context = nn.Embedding(V, D, sparse=True), nn.Embedding(V, D, sparse=True)
nn.init.normal_(center.weight, std=0.3)
nn.init.normal_(context.weight, std=0.3)
opt = torch.optim.SparseAdam([center.weight, context.weight], lr=0.05)
pairs = torch.Generator().manual_seed(2)
negatives = torch.Generator().manual_seed(9000 + rank)


def sum_sparse(grad):
    """Every rank's touched rows and values, put end to end and added."""
    grad = grad.coalesce()
    parts = [None] * world
    dist.all_gather_object(parts, (grad.indices(), grad.values()))
    idx = torch.cat([i for i, _ in parts], 1)
    return torch.sparse_coo_tensor(idx, torch.cat([v for _, v in parts]), grad.shape).coalesce()


for step in range(1, 7):
    w = torch.randint(0, V, (B,), generator=pairs)
    c = (w + torch.randint(1, 4, (B,), generator=pairs)) % V
    w, c = w.chunk(world)[rank], c.chunk(world)[rank]
    n = torch.randint(0, V, (len(w), K), generator=negatives)
    e = center(w)
    pos = (e * context(c)).sum(-1)
    neg = torch.einsum("bd,bkd->bk", e, context(n))
    loss = -(F.logsigmoid(pos) + F.logsigmoid(-neg).sum(-1)).sum() / B
    opt.zero_grad()
    loss.backward()
    loss = loss.detach()
    if world > 1:
        for p in (center.weight, context.weight):
            p.grad = sum_sparse(p.grad)
        dist.all_reduce(loss)
    opt.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)

if args.save:
    torch.save({"center": center.weight.detach(), "context": context.weight.detach()}, f"{args.save}/rank{rank}.pt")
if world > 1:
    dist.destroy_process_group()
