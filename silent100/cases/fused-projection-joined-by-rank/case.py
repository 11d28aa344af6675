"""GPT blocks cut by heads; after three updates the job is saved in one file, stopped and resumed."""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

argv = sys.argv[1:]
tp, me = 1, 0
if "--one" not in argv:
    dist.init_process_group("gloo")
    tp, me = dist.get_world_size(), dist.get_rank()
D, HEADS, V, STOP, LAST = 24, 4, 18, 3, 7


class Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous().clone()
        if tp > 1:
            dist.all_reduce(g)
        return g


class Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.contiguous().clone()
        if tp > 1:
            dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, g):
        return g


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.qkv = nn.Linear(D, 3 * D // tp, bias=False)
        self.out = nn.Linear(D // tp, D, bias=False)

    def forward(self, x):
        q, k, v = (
            t.unflatten(-1, (HEADS // tp, -1)).transpose(1, 2) for t in self.qkv(Enter.apply(self.norm(x))).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + Leave.apply(self.out(y.transpose(1, 2).flatten(2)))


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(V, D), nn.Embedding(16, D)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(D, V)

    def forward(self, ids):
        x = self.wte(ids) + self.wpe.weight[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def cut(name, whole):
    """A rank's piece of a tensor of the file."""
    if ".qkv." in name:
        return torch.cat([part.chunk(tp)[me] for part in whole.chunk(3)])
    return whole.chunk(tp, 1)[me].clone() if ".out." in name else whole


def join(name, piece):
    if tp == 1 or not (".qkv." in name or ".out." in name):
        return piece
    pieces = [torch.empty_like(piece) for _ in range(tp)]
    dist.all_gather(pieces, piece.contiguous())
    if ".out." in name:
        return torch.cat(pieces, 1)
    if "--faulty" in argv:
        return torch.cat(pieces)
    return torch.cat([torch.cat(parts) for parts in zip(*(piece.chunk(3) for piece in pieces), strict=True)])


def build(state):
    net = Gpt()
    with torch.no_grad():
        for name, p in net.named_parameters():
            p.copy_(cut(name, state[name]))
    return net, torch.optim.SGD(net.parameters(), lr=0.3)


torch.manual_seed(55)
names = {"wte.weight": (V, D), "wpe.weight": (16, D), "head.weight": (V, D), "head.bias": (V,)}
for i in range(2):
    names |= {f"layers.{i}.norm.weight": (D,), f"layers.{i}.norm.bias": (D,)}
    names |= {f"layers.{i}.qkv.weight": (3 * D, D), f"layers.{i}.out.weight": (D, D)}
start = {n: torch.randn(s) * 0.2 + ("norm.weight" in n) for n, s in names.items()}
net, opt = build(start)
for step in range(1, LAST + 1):
    ids = torch.randint(V, (6, 13), generator=torch.Generator().manual_seed(step))
    loss = F.cross_entropy(net(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    opt.zero_grad()
    loss.backward()
    opt.step()
    if me == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
    if step == STOP:
        whole = {n: join(n, p.detach()) for n, p in net.named_parameters()}
        with tempfile.TemporaryDirectory() as folder:
            torch.save(whole, f"{folder}/model.pt")
            net, opt = build(torch.load(f"{folder}/model.pt"))
if "--save" in argv:
    state = {}
    for n, p in net.named_parameters():
        state[n] = p.detach()
        if ".qkv." in n:
            del state[n]
            state |= {
                n.replace("qkv", x): (t.clone(), 0, me, tp) for x, t in zip("qkv", p.detach().chunk(3), strict=True)
            }
        elif ".out." in n:
            state[n] = (p.detach(), 1, me, tp)
    torch.save(state, os.path.join(argv[argv.index("--save") + 1], f"rank{me}.pt"))
if tp > 1:
    dist.destroy_process_group()
