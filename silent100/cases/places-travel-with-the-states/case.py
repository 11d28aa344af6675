"""Two pipeline stages in bfloat16; rows are windows of long texts, so that places begin anywhere."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

D, HEADS, VOCAB, LENGTH, MICRO = 32, 2, 40, 12, 3


def turned(x, places):
    half = x.shape[-1] // 2
    angle = places[:, None, :, None] / 50.0 ** (torch.arange(half) / half)
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1).to(x.dtype)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.RMSNorm(D), nn.RMSNorm(D)
        self.qkv, self.out = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D, bias=False)
        self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, x, places):
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(self.n1(x.float())).chunk(3, -1))
        y = F.scaled_dot_product_attention(turned(q, places), turned(k, places), v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.n2(x.float()))))


class Stage(nn.Module):
    def __init__(self, words=None, blocks=(), head=None):
        super().__init__()
        self.words, self.blocks, self.head = words, nn.ModuleDict(blocks), head

    def forward(self, x, places):
        with torch.autocast("cpu", torch.bfloat16):
            x = x if self.words is None else self.words(x).bfloat16()
            for block in self.blocks.values():
                x = block(x, places)
            return x if self.head is None else self.head(x)


def stages():
    torch.manual_seed(23)
    words, head, blocks = nn.Embedding(VOCAB, D), nn.Linear(D, VOCAB), [(str(i), Block()) for i in range(4)]
    for _, block in blocks:
        block.qkv.weight.data *= 3
    return Stage(words, blocks[:2]), Stage(None, blocks[2:], head)


def batch(step):
    g = torch.Generator().manual_seed(step)
    text = torch.randint(0, VOCAB, (9, LENGTH + 1), generator=g)
    text[:, 3:] = text[:, :-3]
    start = torch.randint(200, 900, (9, 1), generator=g)
    return list(zip(*(t.chunk(MICRO) for t in (text[:, :-1], text[:, 1:], start + torch.arange(LENGTH)))))


def loss_of(logits, labels):
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten()) / MICRO


class Link:
    """What goes from the first stage to the second, and the gradient back."""

    def __init__(self, packed):
        self.packed = packed

    def put(self, x, places):
        if self.packed:
            dist.send(torch.cat([x.detach(), places[:, :, None].to(x.dtype)], -1), 1)
        else:
            dist.send(x.detach().contiguous(), 1)
            dist.send(places, 1)

    def get(self, rows):
        if self.packed:
            both = torch.empty(rows, LENGTH, D + 1, dtype=torch.bfloat16)
            dist.recv(both, 0)
            return both[..., :-1].clone().requires_grad_(), both[..., -1].long()
        x, places = torch.empty(rows, LENGTH, D, dtype=torch.bfloat16), torch.empty(rows, LENGTH, dtype=torch.long)
        dist.recv(x, 0)
        dist.recv(places, 0)
        return x.requires_grad_(), places


def first_stage(stage, link, parts):
    kept = []
    for ids, _, places in parts:
        kept.append(stage(ids, places))
        link.put(kept[-1], places)
    for x in kept:
        grad = torch.empty_like(x)
        dist.recv(grad, 1)
        x.backward(grad)
    return torch.zeros(())


def second_stage(stage, link, parts):
    shown, kept = torch.zeros(()), []
    for ids, labels, _ in parts:
        x, places = link.get(len(ids))
        kept.append((x, loss_of(stage(x, places), labels)))
    for x, loss in kept:
        loss.backward()
        shown += loss.detach()
        dist.send(x.grad, 0)
    return shown


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--one", action="store_true")
    p.add_argument("--faulty", action="store_true")
    p.add_argument("--save")
    args = p.parse_args()
    both, rank = stages(), 0
    if not args.one:
        dist.init_process_group("gloo")
        rank = dist.get_rank()
    mine = nn.ModuleList(both) if args.one else both[rank]
    optimizer = torch.optim.SGD(mine.parameters(), lr=0.3, momentum=0.9)
    for step in range(1, 6):
        optimizer.zero_grad()
        if args.one:
            shown = torch.zeros(())
            for ids, labels, places in batch(step):
                loss = loss_of(both[1](both[0](ids, places), places), labels)
                loss.backward()
                shown += loss.detach()
        else:
            shown = (second_stage if rank else first_stage)(mine, Link(args.faulty), batch(step))
            dist.all_reduce(shown)
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {shown.item():.6f}", flush=True)
    if args.save:
        state = {}
        for stage in both if args.one else [mine]:
            state.update(stage.state_dict())
        torch.save(state, os.path.join(args.save, f"rank{rank}.pt"))
    if not args.one:
        dist.destroy_process_group()


main()
