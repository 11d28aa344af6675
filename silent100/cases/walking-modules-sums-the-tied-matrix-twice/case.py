import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

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


V, D, T, MASK = 33, 16, 10, 32
torch.manual_seed(140)


class MaskedLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(V, D)
        self.mix = nn.Conv1d(D, D, 5, padding=2)
        self.norm = nn.LayerNorm(D)
        self.head = nn.Linear(D, V)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        x = x + F.gelu(self.mix(x.transpose(1, 2)).transpose(1, 2))
        return self.head(self.norm(x))


def sync(model):
    done = set()
    for m in model.modules():
        for p in m._parameters.values():
            if p is None or p.grad is None or p in done:
                continue
            if not args.faulty:
                done.add(p)
            if world > 1:
                dist.all_reduce(p.grad)


model = MaskedLM()
opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
gen = torch.Generator().manual_seed(16)
for step in range(1, 5):
    ids = torch.randint(0, V - 1, (8, T), generator=gen)
    hide = torch.rand(8, T, generator=gen) < 0.3
    n = hide.sum()
    ids, hide = ids.chunk(world)[rank], hide.chunk(world)[rank]
    logits = model(ids.masked_fill(hide, MASK))
    loss = F.cross_entropy(logits[hide], ids[hide], reduction="sum") / n
    opt.zero_grad()
    loss.backward()
    sync(model)
    opt.step()
    say(step, total(loss))
finish(dict(model.named_parameters()))
