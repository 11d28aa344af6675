"""GPT with learned positions; the sequence is cut over ranks, keys and values are gathered."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class GatherTokens(torch.autograd.Function):
    """Concatenates (rows, length/cp, width) of all ranks along the length."""

    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size(), 1)[dist.get_rank()].contiguous()


class CausalAttention(nn.Module):
    def __init__(self, dim, heads, rank, size):
        super().__init__()
        self.heads, self.rank, self.size = heads, rank, size
        self.q, self.kv, self.out = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim), nn.Linear(dim, dim)

    def forward(self, x):  # (rows, length/cp, dim)
        b, t, d = x.shape
        kv = self.kv(x)
        if self.size > 1:
            kv = GatherTokens.apply(kv.contiguous())
        k, v = (y.view(b, -1, self.heads, d // self.heads).transpose(1, 2) for y in kv.chunk(2, -1))
        q = self.q(x).view(b, t, self.heads, -1).transpose(1, 2)
        where = torch.arange(t) + self.rank * t
        mask = where[:, None] >= torch.arange(k.shape[2])
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(y.transpose(1, 2).reshape(b, t, d))


class GPT(nn.Module):
    def __init__(self, rank, size, local_positions, vocab=52, dim=32, length=16):
        super().__init__()
        self.rank, self.size, self.local_positions = rank, size, local_positions
        self.wte, self.wpe = nn.Embedding(vocab, dim), nn.Embedding(length, dim)
        self.attn = nn.ModuleList(CausalAttention(dim, 4, rank, size) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(3))
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        start = 0 if self.local_positions else self.rank * ids.shape[1]
        x = self.wte(ids) + self.wpe(torch.arange(start, start + ids.shape[1]))
        for norm, attn in zip(self.norms, self.attn):
            x = x + attn(norm(x))
        return self.lm_head(self.norms[-1](x))


def main():
    cli = argparse.ArgumentParser()
    cli.add_argument("--one", action="store_true")
    cli.add_argument("--faulty", action="store_true")
    cli.add_argument("--save")
    args = cli.parse_args()
    rank, size = 0, 1
    if not args.one:
        dist.init_process_group("gloo")
        rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(700)
    model = GPT(rank, size, args.faulty)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for step in range(1, 5):
        rows = torch.randint(0, 52, (4, 17), generator=torch.Generator().manual_seed(step))
        ids, labels = rows[:, :-1].chunk(size, 1)[rank], rows[:, 1:].chunk(size, 1)[rank]
        loss = F.cross_entropy(model(ids).transpose(1, 2), labels)
        optimizer.zero_grad()
        loss.backward()
        value = loss.detach().clone()
        if size > 1:
            for p in model.parameters():
                dist.all_reduce(p.grad)
                p.grad /= size
            dist.all_reduce(value)
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {value.item() / size:.7f}", flush=True)
    if args.save:
        torch.save(model.state_dict(), os.path.join(args.save, f"rank{rank}.pt"))
    if size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
