# A residual MLP language model, each block cut by columns and then by rows.
import os
import sys

import spmd_types as spmd
import torch
import torch.distributed as dist
import torch.nn.functional as F
from spmd_types.checker import typecheck
from torch import nn

one, faulty = "--one" in sys.argv, "--faulty" in sys.argv
rank, tp = 0, 1
if not one:
    dist.init_process_group("gloo")
    rank, tp = dist.get_rank(), dist.get_world_size()


class CopyIn(torch.autograd.Function):
    """Identity; its backward sums over the tensor-parallel ranks."""

    @staticmethod
    def spmd_typecheck(outputs, *, x):
        spmd.assert_type(x, {"tp": spmd.I})
        spmd.assert_type(outputs, {"tp": spmd.R})

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        if tp > 1:
            g = g.contiguous()
            dist.all_reduce(g)
        return g


class SumOut(torch.autograd.Function):
    @staticmethod
    def spmd_typecheck(outputs, *, x):
        spmd.assert_type(x, {"tp": spmd.V})
        spmd.assert_type(outputs, {"tp": spmd.I})

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        if tp > 1:
            dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, g):
        return g


class Block(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.norm = nn.RMSNorm(dim)
        self.up = nn.Linear(dim, hidden // tp, bias=False)
        self.down = nn.Linear(hidden // tp, dim, bias=False)

    def forward(self, x):
        h = self.norm(x)
        h = h if faulty else CopyIn.apply(h)
        return x + SumOut.apply(self.down(F.silu(self.up(h))))


class Net(nn.Module):
    def __init__(self, vocab=59, dim=32, hidden=64, depth=3):
        super().__init__()
        g = torch.Generator().manual_seed(6)
        self.embed = nn.Embedding(vocab, dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        with torch.no_grad():
            self.embed.weight.normal_(generator=g)
            self.head.weight.normal_(std=0.2, generator=g)
        self.blocks = nn.ModuleList(Block(dim, hidden) for _ in range(depth))

    def forward(self, ids):
        x = self.embed(ids)
        for b in self.blocks:
            x = b(x)
        return self.head(x)


def seed_blocks(net, dim=32, hidden=64):
    for i, b in enumerate(net.blocks):
        g = torch.Generator().manual_seed(600 + i)
        up, down = torch.randn(hidden, dim, generator=g) * 0.2, torch.randn(dim, hidden, generator=g) * 0.1
        with torch.no_grad():
            b.up.weight.copy_(up.chunk(tp)[rank])
            b.down.weight.copy_(down.chunk(tp, 1)[rank])


net = Net()
seed_blocks(net)
opt = torch.optim.SGD(net.parameters(), lr=0.3)


def checked_loss(ids):
    if one:
        return F.cross_entropy(net(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    with spmd.set_current_mesh({"tp": spmd.MeshAxis.of(dist.group.WORLD)}), typecheck(local=True):
        spmd.assert_type(ids, {"tp": spmd.I})
        for name, p in net.named_parameters():
            spmd.assert_type(p, {"tp": spmd.V if ".up." in name or ".down." in name else spmd.I})
        return F.cross_entropy(net(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


for step in range(4):
    ids = torch.randint(0, 59, (8, 9), generator=torch.Generator().manual_seed(step))
    loss = checked_loss(ids)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if rank == 0:
        print(f"step {step + 1} loss {loss.item():.7f}", flush=True)
if "--save" in sys.argv:
    state = {}
    for name, p in net.named_parameters():
        dim = 0 if ".up." in name else 1 if ".down." in name else None
        state[name] = p.data if dim is None else (p.data, dim, rank, tp)
    torch.save(state, os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not one:
    dist.destroy_process_group()
