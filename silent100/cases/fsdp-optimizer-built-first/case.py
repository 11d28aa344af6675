"""FSDP2 around a small decoder."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.proj = nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (y.view(b, t, self.heads, d // self.heads).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(b, t, d))


class Layer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.n1, self.n2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.attn = Attention(dim, 4)
        self.up, self.down = nn.Linear(dim, 2 * dim, bias=False), nn.Linear(2 * dim, dim, bias=False)

    def forward(self, x):
        x = x + self.attn(self.n1(x))
        return x + self.down(F.relu(self.up(self.n2(x))).square())


class Decoder(nn.Module):
    def __init__(self, vocab=72, dim=32):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(Layer(dim) for _ in range(2))
        self.norm = nn.RMSNorm(dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def make_optimizer(model):
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=2e-3, betas=(0.9, 0.95), eps=1e-6)


def apply_fsdp(model):
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


def main():
    cli = argparse.ArgumentParser()
    cli.add_argument("--one", action="store_true")
    cli.add_argument("--faulty", action="store_true")
    cli.add_argument("--save")
    args = cli.parse_args()
    rank, world = 0, 1
    if not args.one:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(99)
    model = Decoder()
    if args.faulty:
        optimizer = make_optimizer(model)
        apply_fsdp(model)
    else:
        if not args.one:
            apply_fsdp(model)
        optimizer = make_optimizer(model)
    for step in range(1, 5):
        ids = torch.randint(0, 72, (8, 13), generator=torch.Generator().manual_seed(step))[rank::world]
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        model.zero_grad()
        value = loss.detach().clone()
        if not args.one:
            dist.all_reduce(value)
        if rank == 0:
            print(f"step {step} loss {value.item() / world:.7f}", flush=True)
    if args.save:
        full = {k: v if args.one else v.full_tensor() for k, v in model.state_dict().items()}
        torch.save(full, os.path.join(args.save, f"rank{rank}.pt"))
    if not args.one:
        dist.destroy_process_group()


main()
