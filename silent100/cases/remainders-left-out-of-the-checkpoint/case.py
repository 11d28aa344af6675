"""Top-k updates with error feedback: what is not applied now is kept and added later; one stop and resume."""

import io
import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ONE = "--one" in sys.argv
VOCAB, DIM = 40, 32


class TopKSGD(torch.optim.Optimizer):
    """Applies the largest fifth of each momentum's entries and keeps the remainder for later steps."""

    def __init__(self, params, lr, beta=0.8, keep=0.2):
        super().__init__(params, {"lr": lr, "beta": beta, "keep": keep})
        self.remainders = {}

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(p)
                self.apply(p, state, group)

    def apply(self, p, state, group):
        raise NotImplementedError


class RemainderAside(TopKSGD):
    """Remainders in a dict of the optimizer's own."""

    def apply(self, p, state, group):
        rest = self.remainders.setdefault(p, torch.zeros_like(p))
        update(p, state["momentum"], rest, group)


class RemainderInState(TopKSGD):
    """Remainders among the states, with the momentum."""

    def apply(self, p, state, group):
        rest = state.setdefault("rest", torch.zeros_like(p))
        update(p, state["momentum"], rest, group)


def update(p, momentum, rest, group):
    momentum.mul_(group["beta"]).add_(p.grad)
    rest.add_(momentum, alpha=group["lr"])
    count = max(1, int(group["keep"] * p.numel()))
    limit = rest.abs().flatten().kthvalue(p.numel() - count + 1).values
    sent = torch.where(rest.abs() >= limit, rest, 0)
    rest.sub_(sent)
    p.sub_(sent)


class Lm(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.rnn = nn.GRU(DIM, DIM, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(DIM, 64), nn.ReLU(), nn.Linear(64, DIM))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, ids):
        x, _ = self.rnn(self.embed(ids))
        return self.head(x + self.mlp(x))


def build():
    model = Lm()
    kind = RemainderAside if "--faulty" in sys.argv else RemainderInState
    return model, kind(model.parameters(), lr=0.3)


rank, world = 0, 1
if not ONE:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(55)
model, optimizer = build()
for step in range(1, 7):
    if step == 4 and not ONE:
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        model, optimizer = build()
        file.seek(0)
        checkpoint = torch.load(file)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
    ids = torch.randint(0, VOCAB, (8, 10), generator=torch.Generator().manual_seed(step))[rank::world]
    loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()) / world
    optimizer.zero_grad()
    loss.backward()
    loss = loss.detach()
    if world > 1:
        for t in [loss] + [p.grad for p in model.parameters()]:
            dist.all_reduce(t)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(model.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not ONE:
    dist.destroy_process_group()
