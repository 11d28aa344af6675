"""Context parallelism with load balancing: rank r holds chunks r and 2 * cp - 1 - r of the sequence."""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

DIM, HEADS, LENGTH, VOCAB = 32, 2, 16, 50


def own_positions(rank: int, cp: int) -> Tensor:
    chunks = torch.arange(LENGTH).chunk(2 * cp)
    return torch.cat([chunks[rank], chunks[2 * cp - 1 - rank]])


class Rope(nn.Module):
    def __init__(self, head_dim: int):
        super().__init__()
        self.register_buffer("freq", 1.0 / 100 ** (torch.arange(0, head_dim, 2) / head_dim))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        angles = positions[:, None] * self.freq
        a, b = x[..., ::2], x[..., 1::2]
        return torch.stack([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1).flatten(-2)


class GatherLength(torch.autograd.Function):
    """Concatenates (rows, heads, length/cp, head) of all ranks along the length."""

    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x)
        return torch.cat(parts, 2)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size(), 2)[dist.get_rank()].contiguous()


class Attn(nn.Module):
    def __init__(self, rank: int, cp: int):
        super().__init__()
        self.rank, self.cp = rank, cp
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))
        self.rope = Rope(DIM // HEADS)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        q, k = self.rope(q, positions), self.rope(k, positions)
        places = keys_at = own_positions(self.rank, self.cp)
        if self.cp > 1:
            k, v = GatherLength.apply(k.contiguous()), GatherLength.apply(v.contiguous())
            keys_at = torch.cat([own_positions(r, self.cp) for r in range(self.cp)])
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=places[:, None] >= keys_at)
        return self.wo(y.transpose(1, 2).flatten(2))


class LM(nn.Module):
    def __init__(self, rank: int, cp: int):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, DIM)
        self.attn = nn.ModuleList(Attn(rank, cp) for _ in range(2))
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.RMSNorm(DIM), nn.Linear(DIM, 64), nn.SiLU(), nn.Linear(64, DIM)) for _ in range(2)
        )
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        x = self.tok(ids)
        for attn, mlp in zip(self.attn, self.mlp):
            x = x + attn(x, positions)
            x = x + mlp(x)
        return self.head(x)


cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--faulty", action="store_true")
cli.add_argument("--save")
args = cli.parse_args()
rank, cp = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, cp = dist.get_rank(), dist.get_world_size()
torch.manual_seed(300)
model = LM(rank, cp)
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
mine = own_positions(rank, cp)
positions = torch.arange(LENGTH).chunk(cp)[rank] if args.faulty else mine
for step in range(1, 5):
    rows = torch.randint(0, VOCAB, (4, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    loss = F.cross_entropy(model(rows[:, mine], positions).flatten(0, 1), rows[:, mine + 1].flatten())
    optimizer.zero_grad()
    loss.backward()
    shown = loss.detach()
    if cp > 1:
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad.div_(cp)
        dist.all_reduce(shown)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {shown.item() / cp:.7f}", flush=True)
if args.save:
    torch.save(model.state_dict(), os.path.join(args.save, f"rank{rank}.pt"))
if not args.one:
    dist.destroy_process_group()
