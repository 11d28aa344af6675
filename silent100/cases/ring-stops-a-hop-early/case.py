"""Pictures and texts under a sigmoid loss over all pairs; other ranks' texts come round a ring, with their gradient."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv
rank, world = 0, 1
if not ONE:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
ROWS = 18


def pass_on(x, way):
    """Sends to the next rank (or, with -1, to the one before) and receives from the other side."""
    got = torch.empty_like(x)
    ops = [
        dist.P2POp(dist.isend, x.contiguous(), (rank + way) % world),
        dist.P2POp(dist.irecv, got, (rank - way) % world),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return got


class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return pass_on(x, 1)

    @staticmethod
    def backward(ctx, g):
        return pass_on(g, -1)


class Siglip(nn.Module):
    def __init__(self, d=12):
        super().__init__()
        self.image = nn.Sequential(nn.Conv2d(1, 8, 3), nn.GELU(), nn.Flatten(), nn.Linear(8 * 16, d))
        self.words, self.text = nn.EmbeddingBag(40, 16), nn.Sequential(nn.GELU(), nn.Linear(16, d))
        self.scale, self.bias = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.tensor(-2.0))

    def pairs(self, a, b, same):
        logits = self.scale.exp() * a @ b.T + self.bias
        sign = 2 * torch.eye(len(a)) - 1 if same else -torch.ones(len(a), len(b))
        return -F.logsigmoid(sign * logits).sum()

    def forward(self, pictures, words):
        a = F.normalize(self.image(pictures), dim=-1)
        b = F.normalize(self.text(self.words(words)), dim=-1)
        loss = self.pairs(a, b, True)
        for _ in range(world // 2 if FAULTY else world - 1):
            b = Exchange.apply(b)
            loss = loss + self.pairs(a, b, False)
        return loss / ROWS


torch.manual_seed(15343)
model = Siglip()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, eps=1e-4)
for step in range(1, 5):
    g = torch.Generator().manual_seed(step)
    words = torch.randint(0, 40, (ROWS, 5), generator=g)
    pictures = torch.randn(ROWS, 1, 6, 6, generator=g) + words[:, :1, None, None] / 20
    loss = model(pictures.chunk(world)[rank], words.chunk(world)[rank])
    optimizer.zero_grad()
    loss.backward()
    loss = loss.detach()
    if world > 1:
        for p in model.parameters():
            dist.all_reduce(p.grad)
        dist.all_reduce(loss)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(model.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not ONE:
    dist.destroy_process_group()
