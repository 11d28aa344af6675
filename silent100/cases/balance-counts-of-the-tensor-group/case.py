"""A mixture of experts with global-batch load balancing: two data ranks by two tensor ranks that cut each expert."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

FLAGS = set(sys.argv[1:])
VOCAB, WIDTH, EXPERTS, HIDDEN = 40, 24, 4, 32


class Parallel:
    """Groups and coordinates, as in Megatron's parallel_state: tensor ranks are neighbours."""

    def __init__(self, single):
        self.data_rank = self.tensor_rank = 0
        self.data = self.tensor = 1
        self.groups = {}
        if single:
            return
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        self.data = self.tensor = 2
        self.data_rank, self.tensor_rank = divmod(rank, 2)
        for name, lists in (("tensor", [[0, 1], [2, 3]]), ("data", [[0, 2], [1, 3]])):
            for members in lists:
                group = dist.new_group(members)
                if rank in members:
                    self.groups[name] = group


par = Parallel("--one" in FLAGS)


class Reduce(torch.autograd.Function):
    """Sums over the tensor group on the way forward, or on the way back."""

    @staticmethod
    def forward(ctx, x, forward):
        ctx.forward_sum = forward
        x = x.clone()
        if forward and par.groups:
            dist.all_reduce(x, group=par.groups["tensor"])
        return x

    @staticmethod
    def backward(ctx, g):
        g = g.clone()
        if not ctx.forward_sum and par.groups:
            dist.all_reduce(g, group=par.groups["tensor"])
        return g, None


class MoE(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        w1, w2 = torch.randn(EXPERTS, HIDDEN, WIDTH) * 0.2, torch.randn(EXPERTS, WIDTH, HIDDEN) * 0.2
        self.w1 = nn.Parameter(w1.chunk(par.tensor, 1)[par.tensor_rank].clone())
        self.w2 = nn.Parameter(w2.chunk(par.tensor, 2)[par.tensor_rank].clone())

    def balance(self, probs, top):
        share = F.one_hot(top, EXPERTS).float().mean(0)
        if par.groups:
            group = par.groups["tensor" if "--faulty" in FLAGS else "data"]
            dist.all_reduce(share, group=group)
            share /= dist.get_world_size(group)
        return EXPERTS * (share * probs.mean(0)).sum()

    def forward(self, x):
        flat = x.flatten(0, 1)
        probs = self.router(flat).softmax(-1)
        weight, top = probs.max(-1)
        inside, out = Reduce.apply(flat, False), torch.zeros_like(flat)
        for e in range(EXPERTS):
            rows = (top == e).nonzero()[:, 0]
            out = out.index_add(0, rows, F.linear(F.silu(F.linear(inside[rows], self.w1[e])), self.w2[e]))
        out = Reduce.apply(out, True) * weight[:, None]
        return out.view_as(x), self.balance(probs, top)


class Layer(nn.Module):
    def __init__(self, sparse):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Conv1d(WIDTH, WIDTH, 3)
        if sparse:
            self.moe = MoE()
        self.sparse = sparse

    def forward(self, x):
        x = x + F.gelu(self.mix(F.pad(self.norm(x).mT, (2, 0)))).mT
        if not self.sparse:
            return x, 0.0
        y, aux = self.moe(x)
        return x + y, aux


class Lm(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList([Layer(False), Layer(True)])
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids):
        x, total = self.embed(ids), 0.0
        for layer in self.layers:
            x, aux = layer(x)
            total = total + aux
        return self.head(x), total


torch.manual_seed(17)
model = Lm()
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
for step in range(1, 5):
    rows = torch.randint(0, VOCAB, (8, 12), generator=torch.Generator().manual_seed(step))
    rows = rows.chunk(par.data)[par.data_rank]
    logits, aux = model(rows[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()) + 0.1 * aux
    loss = loss / par.data
    optimizer.zero_grad()
    loss.backward()
    shown = loss.detach()
    if par.groups:
        for t in [shown, *(p.grad for p in model.parameters())]:
            dist.all_reduce(t, group=par.groups["data"])
    optimizer.step()
    if par.data_rank == par.tensor_rank == 0:
        print(f"step {step} loss {shown.item():.7f}", flush=True)
if "--save" in FLAGS:
    state = dict(model.state_dict())
    if par.groups:
        for name, dim in (("layers.1.moe.w1", 1), ("layers.1.moe.w2", 2)):
            state[name] = (state[name], dim, par.tensor_rank, 2)
    rank = par.data_rank * par.tensor + par.tensor_rank
    torch.save(state, os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if par.groups:
    dist.destroy_process_group()
