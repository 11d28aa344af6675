"""Expert parallelism with an all-to-all of own: every rank has its own rows and two of four experts."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--faulty", action="store_true")
cli.add_argument("--save")
args = cli.parse_args()
if not args.one:
    dist.init_process_group("gloo")
RANK, WORLD = (0, 1) if args.one else (dist.get_rank(), dist.get_world_size())
VOCAB, DIM, EXPERTS, LENGTH, ROWS = 50, 24, 4, 10, 8
HELD = EXPERTS // WORLD


class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, sent, received):
        ctx.counts = sent, received
        out = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), received, sent)
        return out

    @staticmethod
    def backward(ctx, g):
        sent, received = ctx.counts
        out = g.new_empty(sum(sent), *g.shape[1:])
        dist.all_to_all_single(out, g.contiguous(), sent, received)
        return out, None, None


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w2 = nn.Linear(DIM, 40), nn.Linear(40, DIM)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)))


class SparseMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(DIM, EXPERTS, bias=False)
        experts = {str(i): Expert() for i in range(EXPERTS)}
        ids = list(experts)
        ids = ids[RANK::WORLD] if args.faulty else ids[RANK * HELD : (RANK + 1) * HELD]
        self.pool = nn.ModuleDict({i: experts[i] for i in ids})

    def run_held(self, x, which):
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.pool.values()):
            rows = (which == i).nonzero()[:, 0]
            y = y.index_add(0, rows, expert(x[rows]))
        return y

    def forward(self, x):
        weight, which = self.gate(x).softmax(-1).max(-1)
        if WORLD == 1:
            return self.run_held(x, which) * weight[:, None]
        owner = which // HELD
        order = owner.argsort(stable=True)
        sent = owner.bincount(minlength=WORLD)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        sent, received = sent.tolist(), received.tolist()
        local = Exchange.apply((which % HELD)[order], sent, received)
        y = self.run_held(Exchange.apply(x[order], sent, received), local)
        y = Exchange.apply(y, received, sent)[order.argsort()]
        return y * weight[:, None]


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, DIM)
        self.mix = nn.Conv1d(DIM, DIM, 3, padding=1)
        self.norm = nn.LayerNorm(DIM)
        self.sparse = SparseMLP()
        self.out = nn.Linear(DIM, 9)

    def forward(self, ids):
        x = self.emb(ids)
        x = (x + F.relu(self.mix(x.mT)).mT).flatten(0, 1)
        return self.out(x + self.sparse(self.norm(x)))


torch.manual_seed(14)
model = Tagger()
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
for step in range(1, 5):
    g = torch.Generator().manual_seed(step)
    ids = torch.randint(0, VOCAB, (ROWS, LENGTH), generator=g)
    tags = (ids * 7 % 9)[RANK::WORLD].flatten()
    loss = F.cross_entropy(model(ids[RANK::WORLD]), tags) / WORLD
    optimizer.zero_grad()
    loss.backward()
    shown = loss.detach()
    if WORLD > 1:
        dist.all_reduce(shown)
        for name, p in model.named_parameters():
            if ".pool." not in name:
                dist.all_reduce(p.grad)
    optimizer.step()
    if RANK == 0:
        print(f"step {step} loss {shown.item():.7f}", flush=True)
if args.save:
    torch.save(model.state_dict(), os.path.join(args.save, f"rank{RANK}.pt"))
if not args.one:
    dist.destroy_process_group()
