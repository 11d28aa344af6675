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


torch.manual_seed(150)


def collect(x):
    """Rows of every rank; the piece of this rank stays attached to its graph."""
    if world == 1:
        return x
    parts = [torch.empty_like(x) for _ in range(world)]
    dist.all_gather(parts, x.detach().contiguous())
    parts[rank] = x
    return torch.cat(parts)


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 8))
        self.text = nn.Sequential(nn.EmbeddingBag(40, 16), nn.Linear(16, 8))
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, img, txt):
        return F.normalize(self.image(img), dim=-1), F.normalize(self.text(txt), dim=-1)


model = Towers()
opt = torch.optim.AdamW(model.parameters(), lr=5e-3, eps=1e-3)
gen = torch.Generator().manual_seed(17)
for step in range(1, 5):
    txt = torch.randint(0, 40, (12, 5), generator=gen)
    img = torch.randn(12, 20, generator=gen) * 0.3 + F.one_hot(txt[:, 0] % 20, 20)
    a, b = model(img.chunk(world)[rank], txt.chunk(world)[rank])
    every_a, every_b = collect(a), collect(b)
    here = torch.arange(12).chunk(world)[rank]
    if args.faulty:  # only the rows of this rank, against all the others
        s = model.scale.exp()
        loss = (F.cross_entropy(s * a @ every_b.T, here) + F.cross_entropy(s * b @ every_a.T, here)) / 2
        shown, weight = total(loss) / world, 1 / world
    else:
        logits = model.scale.exp() * every_a @ every_b.T
        y = torch.arange(12)
        loss = (F.cross_entropy(logits, y) + F.cross_entropy(logits.T, y)) / 2
        shown, weight = loss, 1
    opt.zero_grad()
    loss.backward()
    for n, p in model.named_parameters():
        # every rank sees the whole loss, so `scale` is already complete there
        p.grad = total(p.grad) * (1 / world if n == "scale" else weight)
    opt.step()
    say(step, shown)
finish(dict(model.named_parameters()))
