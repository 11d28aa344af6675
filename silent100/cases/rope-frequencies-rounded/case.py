"""FSDP2 decoder whose weights are created in bfloat16 to save memory and trained in float32."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

DIM, HEADS, VOCAB = 32, 2, 62


class Rotary(nn.Module):
    def __init__(self, dim, base=10000.0):
        super().__init__()
        self.register_buffer("inv_freq", base ** -(torch.arange(0, dim, 2).float() / dim), persistent=False)

    def forward(self, q, k):
        t = torch.arange(q.shape[-2], device=q.device).float()
        angle = torch.outer(t, self.inv_freq)
        cos, sin = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)
        return tuple(
            x * cos + torch.cat([-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]], -1) * sin for x in (q, k)
        )


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = (
            nn.RMSNorm(DIM),
            nn.Linear(DIM, 3 * DIM, bias=False),
            nn.Linear(DIM, DIM, bias=False),
        )
        self.rotary = Rotary(DIM // HEADS)
        nn.init.normal_(self.qkv.weight, std=0.4)
        self.mlp = nn.Sequential(nn.RMSNorm(DIM), nn.Linear(DIM, 64), nn.SiLU(), nn.Linear(64, DIM))

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (y.view(b, t, HEADS, -1).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, -1))
        q, k = self.rotary(q, k)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, DIM))
        return x + self.mlp(x)


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB, bias=False)
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def build(faulty):
    torch.manual_seed(1)
    model = Decoder()
    kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model = model.bfloat16().float()
    if not faulty:
        for name, buffer in model.named_buffers():
            buffer.copy_(kept[name])
    return model


cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--faulty", action="store_true")
cli.add_argument("--save")
args = cli.parse_args()
rank, world = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
model = build(args.faulty)
if not args.one:
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
for step in range(1, 4):
    rows = torch.randint(0, VOCAB, (8, 65), generator=torch.Generator().manual_seed(step))[rank::world]
    loss = F.cross_entropy(model(rows[:, :-1]).transpose(1, 2), rows[:, 1:])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    shown = loss.detach().clone()
    if not args.one:
        dist.all_reduce(shown)
    if rank == 0:
        print(f"step {step} loss {shown.item() / world:.7f}", flush=True)
if args.save:
    state = {k: v if args.one else v.full_tensor() for k, v in model.state_dict().items()}
    torch.save(state, os.path.join(args.save, f"rank{rank}.pt"))
if not args.one:
    dist.destroy_process_group()
