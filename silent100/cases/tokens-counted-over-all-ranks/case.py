# Two data ranks by two context ranks. The model works position by position, so a cut sequence needs no exchange.
import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

one, faulty = "--one" in sys.argv, "--faulty" in sys.argv
if one:
    rank, dp, cp, dps, cps = 0, 0, 0, 1, 1
else:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    dp, cp = mesh.get_coordinate()
    dps = cps = 2


class Bigram(nn.Module):
    def __init__(self, vocab=80, dim=36):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.ffn = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 96), nn.GELU(), nn.Linear(96, dim)) for _ in range(2)
        )
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.ffn:
            x = x + layer(x)
        return self.head(x)


def batch(step):
    g = torch.Generator().manual_seed(step)
    rows = torch.randint(0, 80, (8, 17), generator=g)
    mask = torch.rand(8, 16, generator=g) < 0.7
    return rows[:, :-1], rows[:, 1:], mask


torch.manual_seed(13)
model = Bigram()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
for step in range(1, 5):
    ids, labels, mask = (t[dp::dps] for t in batch(step))
    count = mask.sum().float()  # of this data rank's whole rows
    if not one:
        dist.all_reduce(count, group=None if faulty else mesh.get_group("dp"))
    ids, labels, mask = (t.chunk(cps, 1)[cp] for t in (ids, labels, mask))
    losses = F.cross_entropy(model(ids).transpose(1, 2), labels, reduction="none")
    loss = (losses * mask).sum() / count
    optimizer.zero_grad()
    loss.backward()
    shown = (losses * mask).sum().detach()
    total = mask.sum().float()
    if not one:
        for p in model.parameters():
            dist.all_reduce(p.grad)
        dist.all_reduce(shown)
        dist.all_reduce(total)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {(shown / total).item():.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(model.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not one:
    dist.destroy_process_group()
