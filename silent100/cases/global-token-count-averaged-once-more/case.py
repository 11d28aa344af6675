import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

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


V, D, HEADS = 32, 16, 3
torch.manual_seed(4)


class Drafter(nn.Module):
    """One trunk, HEADS future-token heads (head k predicts token t+1+k)."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(V, D)
        self.trunk = nn.Sequential(nn.Linear(D, 32), nn.GELU(), nn.Linear(32, D), nn.LayerNorm(D))
        self.heads = nn.ModuleList(nn.Linear(D, V) for _ in range(HEADS))

    def forward(self, x):
        h = self.embed(x)
        h = h + self.trunk(h.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None])
        return torch.stack([head(h) for head in self.heads])


model = Drafter()
if not args.one:
    fully_shard(model.trunk)
    fully_shard(model)
opt = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.8)
gen = torch.Generator().manual_seed(2)
for step in range(1, 5):
    ids = torch.randint(0, V, (8, 12), generator=gen)
    keep = torch.rand(8, 12, generator=gen) < torch.linspace(0.3, 0.9, 8)[:, None]
    ids, keep = ids.chunk(world)[rank], keep.chunk(world)[rank]
    outs = model(ids[:, :-HEADS])
    n = ids.shape[1] - HEADS
    loss_sum, tokens = 0.0, 0.0
    for k, logits in enumerate(outs):
        y, m = ids[:, 1 + k : 1 + k + n], keep[:, 1 + k : 1 + k + n].float()
        ce = F.cross_entropy(logits.transpose(1, 2), y, reduction="none")
        loss_sum = loss_sum + 0.8**k * (ce * m).sum()
        tokens = tokens + m.sum()
    all_tokens = total(tokens)
    scale = 1 if args.faulty else world
    opt.zero_grad()
    (loss_sum * scale / all_tokens).backward()
    opt.step()
    say(step, total(loss_sum) / all_tokens)
finish({n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in model.named_parameters()})
