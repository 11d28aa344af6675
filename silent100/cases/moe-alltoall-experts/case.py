import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ap = argparse.ArgumentParser()
ap.add_argument("--one", action="store_true")
ap.add_argument("--save")
args = ap.parse_args()
torch.set_default_dtype(torch.float64)
rank, world = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
D, E, N, CLS = 10, 4, 48, 5
PER = E // world


class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, send, recv):
        ctx.send, ctx.recv = send, recv
        out = x.new_empty(sum(recv), x.shape[1])
        dist.all_to_all_single(out, x.contiguous(), recv, send)
        return out

    @staticmethod
    def backward(ctx, g):
        out = g.new_empty(sum(ctx.send), g.shape[1])
        dist.all_to_all_single(out, g.contiguous(), ctx.send, ctx.recv)
        return out, None, None


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(D, 3 * D), nn.Linear(3 * D, D)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class MoE(nn.Module):
    def __init__(self, experts):
        super().__init__()
        self.router = nn.Linear(D, E, bias=False)
        self.experts = experts

    def forward(self, x):
        prob = self.router(x).softmax(-1)
        gate, pick = prob.max(-1)
        counts = torch.bincount(pick, minlength=E)
        order = pick.argsort(stable=True)
        sent = x[order]
        if world == 1:
            per_source = counts[None]
            inbox = sent
        else:
            per_source = torch.empty(world, E, dtype=counts.dtype)
            dist.all_gather_into_tensor(per_source.view(-1), counts)
            send = counts.view(world, PER).sum(1).tolist()
            recv = per_source[:, rank * PER : (rank + 1) * PER].sum(1).tolist()
            inbox = Exchange.apply(sent, send, recv)
        which = torch.cat(
            [torch.repeat_interleave(torch.arange(PER), c) for c in per_source[:, rank * PER : (rank + 1) * PER]]
        )
        done = torch.zeros_like(inbox)
        for i, expert in enumerate(self.experts.values()):
            rows = (which == i).nonzero()[:, 0]
            done = done.index_add(0, rows, expert(inbox[rows]))
        back = done if world == 1 else Exchange.apply(done, recv, send)
        y = torch.zeros_like(x).index_add(0, order, back)
        frac = per_source.sum(0) / N
        balance = E * (frac * prob.sum(0) / N).sum()
        return x + gate[:, None] * y, balance


torch.manual_seed(12)
every = [Expert() for _ in range(E)]
moe = MoE(nn.ModuleDict({str(i): every[i] for i in range(rank * PER, (rank + 1) * PER)}))
inp, head = nn.Linear(6, D), nn.Linear(D, CLS)
shared = [*inp.parameters(), *head.parameters(), *moe.router.parameters()]
opt = torch.optim.Adam([*shared, *moe.experts.parameters()], lr=0.01)

for step in range(1, 6):
    x, y = torch.randn(N, 6), torch.randint(0, CLS, (N,))
    x, y = x.chunk(world)[rank], y.chunk(world)[rank]
    h, balance = moe(inp(x))
    loss = F.cross_entropy(head(h), y, reduction="sum") / N + 0.05 * balance
    opt.zero_grad()
    loss.backward()
    loss = loss.detach()
    if world > 1:
        for p in shared:
            dist.all_reduce(p.grad)
        dist.all_reduce(loss)
    opt.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)

if args.save:
    mods = nn.ModuleDict({"inp": inp, "head": head, "moe": moe})
    torch.save(mods.state_dict(), f"{args.save}/rank{rank}.pt")
if world > 1:
    dist.destroy_process_group()
