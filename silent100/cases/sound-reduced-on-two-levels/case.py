import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ap = argparse.ArgumentParser()
ap.add_argument("--one", action="store_true")
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


torch.manual_seed(224)
NODE = 2  # ranks in a node; four ranks in all
inside, heads = None, None
if not args.one:
    for a in range(world // NODE):
        grp = dist.new_group(list(range(a * NODE, (a + 1) * NODE)))
        if rank // NODE == a:
            inside = grp
    heads = dist.new_group(list(range(0, world, NODE)))


def reduce_two_levels(t):
    first = rank // NODE * NODE
    dist.reduce(t, first, group=inside)
    if rank == first:
        dist.all_reduce(t, group=heads)
    dist.broadcast(t, first, group=inside)


class Reward(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.conv, self.score = nn.Embedding(26, 12), nn.Conv1d(12, 16, 3), nn.Linear(16, 1, bias=False)

    def forward(self, ids):
        return self.score(F.gelu(self.conv(self.embed(ids).transpose(1, 2))).mean(-1)).squeeze(-1)


model = Reward()
opt = torch.optim.AdamW(model.parameters(), lr=5e-3, eps=1e-3, weight_decay=0.0)
gen = torch.Generator().manual_seed(24)
PAIRS = 8
for step in range(1, 5):
    good, bad = torch.randint(0, 26, (PAIRS, 9), generator=gen), torch.randint(0, 26, (PAIRS, 9), generator=gen)
    margin = torch.rand(PAIRS, generator=gen)
    mine = slice(rank * PAIRS // world, (rank + 1) * PAIRS // world)
    each = -F.logsigmoid(model(good[mine]) - model(bad[mine]) - margin[mine])
    opt.zero_grad()
    (each.sum() / PAIRS).backward()
    if world > 1:
        for p in model.parameters():
            reduce_two_levels(p.grad)
    opt.step()
    say(step, each[: PAIRS // 4].mean())  # a local number: the first two pairs, which rank 0 has
finish(dict(model.named_parameters()))
