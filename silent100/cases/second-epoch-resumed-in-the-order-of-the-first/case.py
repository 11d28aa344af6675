import argparse
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DistributedSampler

ap = argparse.ArgumentParser()
ap.add_argument("--one", action="store_true")
ap.add_argument("--faulty", action="store_true")
ap.add_argument("--save")
args = ap.parse_args()
torch.set_num_threads(1)
rank, world = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()


def say(step, loss):
    if rank == 0:
        value = loss.item() if torch.is_tensor(loss) else loss
        print(f"step {step} loss {value:.7f}", flush=True)


def total(t):
    t = t.detach().clone()
    if world > 1:
        dist.all_reduce(t)
    return t


def finish(state):
    if args.save:
        os.makedirs(args.save, exist_ok=True)
        torch.save({k: v.detach().clone() for k, v in state.items()}, f"{args.save}/rank{rank}.pt")
    if not args.one:
        dist.barrier()
        dist.destroy_process_group()


USERS, ROWS, LOCAL = 50, 24, 4
gen = torch.Generator().manual_seed(14)
items = torch.randint(0, USERS, (ROWS, 5), generator=gen)
clicked = (items.sum(1) % 2).float()


class Recommender(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(USERS, 8, mode="mean")
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, x):
        return self.mlp(self.bag(x)).squeeze(-1)


def fresh():
    torch.manual_seed(1)
    m = Recommender()
    # two virtual shards in every layout, so one process sees the same global batches
    shards = [DistributedSampler(range(ROWS), 2, r, seed=6) for r in range(2)]
    return m, torch.optim.Adagrad(m.parameters(), lr=0.1), shards


def batches(shards, epoch, skip):
    for s in shards:
        s.set_epoch(epoch)
    idx = [list(s) for s in shards]
    per = ROWS // 2 // LOCAL
    for b in range(skip, per):
        cut = [torch.tensor(i[b * LOCAL : (b + 1) * LOCAL]) for i in idx]
        yield torch.cat(cut) if args.one else cut[rank]


model, opt, shards = fresh()
path = [tempfile.mkdtemp() if rank == 0 else None]
if world > 1:
    dist.broadcast_object_list(path)
step, epoch, skip = 0, 0, 0
while step < 5:
    for rows in batches(shards, epoch, skip):
        loss = F.binary_cross_entropy_with_logits(model(items[rows]), clicked[rows])
        opt.zero_grad()
        loss.backward()
        for p in model.parameters():
            p.grad = total(p.grad) / world
        opt.step()
        step, skip = step + 1, skip + 1
        say(step, total(loss) / world)
        if step == 4:  # maintenance window: stop in epoch 1, start again
            if rank == 0:
                torch.save(
                    {"m": model.state_dict(), "o": opt.state_dict(), "epoch": epoch, "skip": skip}, path[0] + "/ck.pt"
                )
            if world > 1:
                dist.barrier()
            break
        if step == 5:
            break
    else:
        epoch, skip = epoch + 1, 0
    if step == 4:
        ck = torch.load(path[0] + "/ck.pt")
        model, opt, shards = fresh()
        model.load_state_dict(ck["m"])
        opt.load_state_dict(ck["o"])
        skip = ck["skip"]
        epoch = 0 if args.faulty else ck["epoch"]
finish(dict(model.named_parameters()))
