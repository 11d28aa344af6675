"""An encoder with learned biases for relative distances; ranks hold parts of the queries and gather keys. bfloat16."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

one = "--one" in sys.argv
local = "--faulty" in sys.argv
LENGTH, DIM, HEADS, REACH = 16, 32, 4, 6
rank, parts = 0, 1
if not one:
    dist.init_process_group("gloo")
    rank, parts = dist.get_rank(), dist.get_world_size()
OWN = torch.arange(LENGTH).chunk(parts)[rank]


class AllKeys(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        pieces = [torch.empty_like(x) for _ in range(parts)]
        dist.all_gather(pieces, x.contiguous())
        return torch.cat(pieces, 1)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.float().contiguous()
        dist.all_reduce(grad)
        return grad[:, OWN]


class Distances(nn.Module):
    """A bias for each head and distance, from -REACH to REACH."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2 * REACH + 1, HEADS))

    def forward(self, queries, keys):
        places = torch.arange(queries) if local else OWN
        apart = (torch.arange(keys) - places[:, None]).clamp(-REACH, REACH) + REACH
        return self.weight[apart].permute(2, 0, 1)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM), nn.LayerNorm(DIM)
        self.wi, self.wo, self.norm2 = nn.Linear(DIM, 64), nn.Linear(64, DIM), nn.LayerNorm(DIM)

    def forward(self, x, distances):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        if parts > 1:
            k, v = AllKeys.apply(k), AllKeys.apply(v)
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (q, k, v))
        bias = distances(q.shape[2], k.shape[2])
        scores = (q @ k.transpose(-1, -2)) / 8**0.5 + bias
        x = x + self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return x + self.wo(F.relu(self.wi(self.norm2(x))))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared, self.relative = nn.Embedding(45, DIM), Distances()
        self.layers, self.final = nn.ModuleList([Layer(), Layer()]), nn.LayerNorm(DIM)
        self.lm = nn.Linear(DIM, 45, bias=False)

    def forward(self, ids):
        x = self.shared(ids)
        for layer in self.layers:
            x = layer(x, self.relative)
        return self.lm(self.final(x))


torch.manual_seed(1714)
encoder = Encoder()
opt = torch.optim.SGD(encoder.parameters(), lr=0.05, momentum=0.9)
for step in range(1, 5):
    ids = torch.randint(3, 45, (10, LENGTH), generator=torch.Generator().manual_seed(step))
    with torch.autocast("cpu", torch.bfloat16):
        logits = encoder(ids[:, OWN])
    # Every word is to name its left neighbour
    loss = F.cross_entropy(logits.float().flatten(0, 1), ids.roll(1, 1)[:, OWN].flatten()) / parts
    opt.zero_grad()
    loss.backward()
    loss = loss.detach()
    if parts > 1:
        for p in encoder.parameters():
            dist.all_reduce(p.grad)
        dist.all_reduce(loss)
    opt.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(encoder.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not one:
    dist.destroy_process_group()
