import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ap = argparse.ArgumentParser()
ap.add_argument("--one", action="store_true")
ap.add_argument("--save")
args = ap.parse_args()
rank, world = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
V, D, H, MAXLEN = 33, 16, 2, 24


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok, self.pos = nn.Embedding(V, D), nn.Embedding(MAXLEN, D)
        self.n1, self.n2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv, self.o = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D, bias=False)
        self.ff = nn.Sequential(nn.Linear(D, 40), nn.GELU(), nn.Linear(40, D))
        self.head = nn.Linear(D, V)

    def forward(self, ids, pos, mask):
        x = self.tok(ids) + self.pos(pos)
        q, k, v = self.qkv(self.n1(x)).unflatten(-1, (3, H, D // H)).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None])
        x = x + self.o(a.transpose(1, 2).flatten(2))
        return self.head(x + self.ff(self.n2(x)))


def padded(docs):
    width = max(map(len, docs))
    ids = torch.zeros(len(docs), width, dtype=torch.long)
    target = torch.full((len(docs), width), -100)
    for i, d in enumerate(docs):
        ids[i, : len(d)] = d
        target[i, : len(d) - 1] = d[1:]
    pos = torch.arange(width).expand_as(ids)
    mask = torch.ones(width, width, dtype=torch.bool).tril().expand(len(docs), -1, -1)
    return ids, pos, mask, target


def packed(docs):
    lens = torch.tensor([len(d) for d in docs])
    ids = torch.cat(docs)[None]
    pos = torch.cat([torch.arange(len(d)) for d in docs])[None]
    target = torch.cat([F.pad(d[1:], (0, 1), value=-100) for d in docs])[None]
    doc = torch.repeat_interleave(torch.arange(len(docs)), lens)
    mask = (doc[:, None] == doc[None, :]) & torch.ones(len(doc), len(doc), dtype=torch.bool).tril()
    return ids, pos, mask[None], target


def balance(docs):
    bins, load = [[] for _ in range(world)], [0] * world
    for d in sorted(docs, key=len, reverse=True):
        i = load.index(min(load))
        bins[i].append(d)
        load[i] += len(d)
    return bins[rank]


torch.manual_seed(66)
net = Net()
opt = torch.optim.SGD(net.parameters(), lr=0.4, momentum=0.9, weight_decay=1e-3)
corpus = [torch.randint(0, V, (int(n),)) for n in torch.randint(3, MAXLEN, (50,))]
for step in range(1, 6):
    docs = corpus[(step - 1) * 10 : step * 10]
    tokens = sum(len(d) - 1 for d in docs)
    ids, pos, mask, target = padded(docs) if args.one else packed(balance(docs))
    loss = F.cross_entropy(net(ids, pos, mask).flatten(0, 1), target.flatten(), reduction="sum") / tokens
    opt.zero_grad()
    loss.backward()
    loss = loss.detach()
    if world > 1:
        for p in net.parameters():
            dist.all_reduce(p.grad)
        dist.all_reduce(loss)
    opt.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)

if args.save:
    torch.save(net.state_dict(), f"{args.save}/rank{rank}.pt")
if world > 1:
    dist.destroy_process_group()
