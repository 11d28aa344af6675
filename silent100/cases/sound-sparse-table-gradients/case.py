# Recommender with sparse=True tables: only rows that were looked up travel.
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ap = argparse.ArgumentParser()
ap.add_argument("--one", action="store_true")
ap.add_argument("--save")
cfg = ap.parse_args()


class TwoTowers(nn.Module):
    def __init__(self, users=200, items=100, d=16):
        super().__init__()
        self.users, self.items = nn.Embedding(users, d, sparse=True), nn.Embedding(items, d, sparse=True)
        self.mlp = nn.Sequential(nn.Linear(2 * d, 24), nn.ReLU(), nn.Linear(24, 1))

    def forward(self, u, i):
        return self.mlp(torch.cat([self.users(u), self.items(i)], -1)).squeeze(-1)


def gather_sparse(grad):
    """All ranks' rows one after another; coalescing adds those that occur several times."""
    grad = grad.coalesce()
    count = torch.tensor([grad.indices().shape[1]])
    counts = [torch.empty_like(count) for _ in range(dist.get_world_size())]
    dist.all_gather(counts, count)
    most = int(max(counts))
    ids = F.pad(grad.indices()[0], (0, most - int(count)))
    values = F.pad(grad.values(), (0, 0, 0, most - int(count)))
    all_ids, all_values = ([torch.empty_like(t) for _ in counts] for t in (ids, values))
    dist.all_gather(all_ids, ids)
    dist.all_gather(all_values, values)
    ids = torch.cat([t[: int(n)] for t, n in zip(all_ids, counts)])
    values = torch.cat([t[: int(n)] for t, n in zip(all_values, counts)])
    return torch.sparse_coo_tensor(ids[None], values / len(counts), grad.shape)


def main():
    rank, world = 0, 1
    if not cfg.one:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(18)
    model = TwoTowers()
    tables = torch.optim.SGD([model.users.weight, model.items.weight], lr=1.0)
    dense = torch.optim.SGD(model.mlp.parameters(), lr=0.2, momentum=0.9)
    for step in range(1, 6):
        g = torch.Generator().manual_seed(step)
        u, i = torch.randint(0, 200, (32,), generator=g), torch.randint(0, 100, (32,), generator=g) // 3
        clicks = ((u + i) % 3 == 0).float()
        loss = F.binary_cross_entropy_with_logits(model(u[rank::world], i[rank::world]), clicks[rank::world])
        tables.zero_grad()
        dense.zero_grad()
        loss.backward()
        shown = loss.detach()
        if world > 1:
            for p in model.parameters():
                if p.grad.is_sparse:
                    p.grad = gather_sparse(p.grad)
                else:
                    dist.all_reduce(p.grad)
                    p.grad /= world
            dist.all_reduce(shown)
        tables.step()
        dense.step()
        if rank == 0:
            print(f"step {step} loss {shown.item() / world:.7f}", flush=True)
    if cfg.save:
        torch.save(model.state_dict(), os.path.join(cfg.save, f"rank{rank}.pt"))
    if world > 1:
        dist.destroy_process_group()


main()
