"""Context parallelism with pieces of very unequal length; keys are padded for the trip and cut again."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ONE = "--one" in sys.argv
PIECES, WORDS, D = [7, 2, 11], 30, 24
rank = 0
if not ONE:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
pieces = [sum(PIECES)] if ONE else PIECES
begin, longest = sum(pieces[:rank]), max(pieces)


class AllPieces(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        parts = [x.new_empty(x.shape[0], longest, x.shape[2]) for _ in pieces]
        dist.all_gather(parts, F.pad(x, (0, 0, 0, longest - x.shape[1])))
        return torch.cat([part[:, :n] for part, n in zip(parts, pieces)], 1)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad[:, begin : begin + pieces[rank]]


class Attention(nn.Module):
    def __init__(self, heads=3):
        super().__init__()
        self.heads, self.q, self.kv, self.o = heads, nn.Linear(D, D), nn.Linear(D, 2 * D), nn.Linear(D, D)

    def forward(self, x):
        kv = self.kv(x)
        q, (k, v) = self.q(x), (kv if ONE else AllPieces.apply(kv)).chunk(2, -1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        mask = torch.arange(k.shape[2]) <= torch.arange(begin, begin + x.shape[1])[:, None]
        return self.o(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, D), nn.Embedding(sum(PIECES), D)
        self.first, self.second = Attention(), Attention()
        self.mlp, self.head = nn.Sequential(nn.Linear(D, 48), nn.SiLU(), nn.Linear(48, D)), nn.Linear(D, WORDS)

    def forward(self, ids):
        x = self.words(ids) + self.places.weight[begin : begin + ids.shape[1]]
        x = x + self.first(x)
        x = x + self.mlp(x)
        return self.head(x + self.second(x))


torch.manual_seed(52)
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9)
for step in range(1, 5):
    text = torch.randint(0, WORDS, (4, sum(PIECES) + 1), generator=torch.Generator().manual_seed(step))
    text[:, 5:] = text[:, :-5]
    ids, labels = (t[:, begin : begin + pieces[rank]] for t in (text[:, :-1], text[:, 1:]))
    loss = F.cross_entropy(net(ids).flatten(0, 1), labels.flatten(), reduction="sum") / (4 * sum(PIECES))
    optimizer.zero_grad()
    loss.backward()
    loss = loss.detach()
    if not ONE:
        for t in [p.grad for p in net.parameters()] + [loss]:
            dist.all_reduce(t)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(net.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not ONE:
    dist.destroy_process_group()
