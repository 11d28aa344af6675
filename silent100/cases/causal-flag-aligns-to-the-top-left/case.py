"""A small decoder over a sequence in two chunks; each rank has its queries and gathers keys and values."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv
VOCAB, WIDTH, HEADS, LENGTH = 53, 32, 4, 24

if not ONE:
    dist.init_process_group("gloo")
RANK = 0 if ONE else dist.get_rank()
CP = 1 if ONE else dist.get_world_size()


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty(x.shape) for _ in range(CP)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, 2)

    @staticmethod
    def backward(ctx, g):
        g = g.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(g)
        return g.chunk(CP, 2)[RANK].contiguous()


def whole_sequence(x):
    return x if CP == 1 else Gather.apply(x)


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.outp = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.inp(x).chunk(3, -1))
        k, v = whole_sequence(k), whole_sequence(v)
        if FAULTY or CP == 1:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            mine = RANK * q.size(2) + torch.arange(q.size(2))
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mine[:, None] >= torch.arange(k.size(2)))
        return self.outp(y.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mixer = Mixer()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))

    def forward(self, x):
        x = x + self.mixer(self.n1(x))
        return x + self.mlp(self.n2(x))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, WIDTH)
        self.pos = nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids):
        x = self.tok(ids) + self.pos(RANK * ids.size(1) + torch.arange(ids.size(1)))
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


torch.manual_seed(17)
model = Decoder()
opt = torch.optim.AdamW(model.parameters(), lr=2e-3, eps=1e-5)
for step in range(1, 5):
    rows = torch.randint(0, VOCAB, (4, LENGTH + 1), generator=torch.Generator().manual_seed(100 + step))
    ids, labels = rows[:, :-1].chunk(CP, 1)[RANK], rows[:, 1:].chunk(CP, 1)[RANK]
    loss = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten()) / CP
    opt.zero_grad()
    loss.backward()
    value = loss.detach()
    if CP > 1:
        for p in model.parameters():
            dist.all_reduce(p.grad)
        dist.all_reduce(value)
    opt.step()
    if RANK == 0:
        print(f"step {step} loss {value.item():.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(model.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{RANK}.pt"))
if not ONE:
    dist.destroy_process_group()
