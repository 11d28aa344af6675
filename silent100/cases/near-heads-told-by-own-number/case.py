"""Half of the heads see everything before them, the other half only the last tokens; heads are cut over two ranks."""

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
if not args.one:
    dist.init_process_group("gloo")
R, TP = (0, 1) if args.one else (dist.get_rank(), dist.get_world_size())
DIM, HEADS, FAR_HEADS, NEAR, VOCAB = 32, 4, 2, 3, 50
HELD = HEADS // TP


class Replicate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, g):
        g = g.float().contiguous()
        if TP > 1:
            dist.all_reduce(g)
        return g


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.float().contiguous()
        if TP > 1:
            dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, g):
        return g


class LocalGlobalAttention(nn.Module):
    def __init__(self):
        super().__init__()
        w = torch.randn(4, HEADS, DIM // HEADS, DIM) * 1.6 * DIM**-0.5
        w = w[:, R * HELD : (R + 1) * HELD].flatten(1, 2)
        self.wq, self.wk, self.wv, self.wo = (nn.Parameter(t.clone()) for t in (w[0], w[1], w[2], w[3].T))

    def mask(self, length):
        ahead = torch.arange(length)[:, None] - torch.arange(length)
        near, far = (ahead >= 0) & (ahead < NEAR), ahead >= 0
        first = 0 if args.faulty else R * HELD
        return torch.stack([far if first + head < FAR_HEADS else near for head in range(HELD)])

    def forward(self, x):
        x = Replicate.apply(x)
        q, k, v = (F.linear(x, w).unflatten(-1, (HELD, -1)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask(x.shape[1]))
        return Sum.apply(F.linear(y.transpose(1, 2).flatten(2), self.wo))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.attn, self.norm2 = nn.LayerNorm(DIM), LocalGlobalAttention(), nn.LayerNorm(DIM)
        self.fc1, self.fc2 = nn.Linear(DIM, 48), nn.Linear(48, DIM)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, DIM), nn.Embedding(20, DIM)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.out = nn.Linear(DIM, VOCAB)
        nn.init.normal_(self.out.weight, std=0.0004)

    def forward(self, ids):
        x = self.wte(ids) + self.wpe.weight[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


torch.manual_seed(19)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.002, momentum=0.9)
for step in range(1, 5):
    ids = torch.randint(0, VOCAB, (8, 19), generator=torch.Generator().manual_seed(step))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(ids[:, :-1])
    loss = F.cross_entropy(logits.float().transpose(1, 2), ids[:, 1:])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if R == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if args.save:
    state = dict(model.state_dict())
    if TP > 1:
        for name in [n for n in state if ".attn." in n]:
            state[name] = (state[name], 1 if name.endswith("wo") else 0, R, TP)
    torch.save(state, os.path.join(args.save, f"rank{R}.pt"))
if not args.one:
    dist.destroy_process_group()
