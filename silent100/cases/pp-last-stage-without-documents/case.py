"""Packed rows: attention stays within documents; both stages need the document ids."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--one", action="store_true")
parser.add_argument("--faulty", action="store_true")
parser.add_argument("--save")
args = parser.parse_args()
DIM, HEADS, VOCAB, ROWS, LENGTH = 32, 4, 51, 6, 14


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.proj = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x, documents):
        b, t, _ = x.shape
        q, k, v = (y.view(b, t, HEADS, -1).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        mask = torch.ones(t, t, dtype=torch.bool).tril()
        if documents is not None:
            mask = mask & (documents[:, None, :, None] == documents[:, None, None, :])
        return self.proj(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).reshape(b, t, DIM))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.attn = Attention()
        self.mlp = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))

    def forward(self, x, documents):
        x = x + self.attn(self.ln1(x), documents)
        return x + self.mlp(self.ln2(x))


class Part(nn.Module):
    def __init__(self, first, last, has_embedding, has_head):
        super().__init__()
        torch.manual_seed(27)
        embed, blocks, head = nn.Embedding(VOCAB, DIM), [Block() for _ in range(4)], nn.Linear(DIM, VOCAB)
        self.embed = embed if has_embedding else None
        self.blocks = nn.ModuleDict({str(i): blocks[i] for i in range(first, last)})
        self.head = head if has_head else None

    def forward(self, x, documents):
        x = self.embed(x) if self.embed is not None else x
        for block in self.blocks.values():
            x = block(x, documents)
        return self.head(x) if self.head is not None else x


def packed(step):
    g = torch.Generator().manual_seed(step)
    rows = torch.randint(0, VOCAB, (ROWS, LENGTH + 1), generator=g)
    ends = torch.rand(ROWS, LENGTH, generator=g) < 0.25
    return rows[:, :-1], rows[:, 1:], ends.long().cumsum(1)


rank = 0
if args.one:
    part = Part(0, 4, True, True)
else:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    part = Part(0, 2, True, False) if rank == 0 else Part(2, 4, False, True)
optimizer = torch.optim.SGD(part.parameters(), lr=0.2)
for step in range(1, 5):
    ids, labels, documents = packed(step)
    optimizer.zero_grad()
    loss = None
    if args.one:
        loss = F.cross_entropy(part(ids, documents).transpose(1, 2), labels)
        loss.backward()
    elif rank == 0:
        out = part(ids, documents)
        dist.send(out.detach().contiguous(), 1)
        back = torch.empty_like(out)
        dist.recv(back, 1)
        out.backward(back)
    else:
        x = torch.empty(ROWS, LENGTH, DIM)
        dist.recv(x, 0)
        x.requires_grad_()
        loss = F.cross_entropy(part(x, None if args.faulty else documents).transpose(1, 2), labels)
        loss.backward()
        dist.send(x.grad, 0)
    optimizer.step()
    if loss is not None:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if args.save:
    torch.save(part.state_dict(), os.path.join(args.save, f"rank{rank}.pt"))
if not args.one:
    dist.destroy_process_group()
