"""Gated linear recurrences over a series that is cut into three pieces; states go from rank to rank."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv
rank, world = 0, 1
if not ONE:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()


class Arrive(torch.autograd.Function):
    """The previous rank's last state; its gradient goes back."""

    @staticmethod
    def forward(ctx, like):
        state = torch.zeros_like(like)
        if rank > 0:
            dist.recv(state, rank - 1)
        return state

    @staticmethod
    def backward(ctx, g):
        if rank > 0:
            dist.send(g.contiguous(), rank - 1)
        return None


class Depart(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, state):
        ctx.like = state
        if rank < world - 1:
            dist.send(state.contiguous(), rank + 1)
        return y.clone()

    @staticmethod
    def backward(ctx, g):
        back = torch.zeros_like(ctx.like)
        if rank < world - 1:
            dist.recv(back, rank + 1)
        return g, back


class Scan(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm, self.gate, self.value = nn.LayerNorm(d), nn.Linear(d, d), nn.Linear(d, d)
        self.out = nn.Linear(d, d)
        nn.init.constant_(self.gate.bias, 2.0)

    def forward(self, x):
        z = self.norm(x)
        decay, value = self.gate(z).sigmoid(), self.value(z)
        start = Arrive.apply(x[:, 0].detach().requires_grad_())
        local, through, states, kept = torch.zeros_like(start), torch.ones_like(start), [], []
        for t in range(x.shape[1]):
            local = decay[:, t] * local + (1 - decay[:, t]) * value[:, t]
            through = decay[:, t] * through
            states.append(local)
            kept.append(through)
        states, kept = torch.stack(states, 1), torch.stack(kept, 1)
        whole = states + kept * start[:, None]
        last = states[:, -1] if FAULTY else whole[:, -1]
        return x + self.out(Depart.apply(whole, last))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.head = nn.Linear(6, 20), nn.Linear(20, 6)
        self.layers = nn.ModuleList(Scan(20) for _ in range(2))

    def forward(self, x):
        x = self.inp(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


torch.manual_seed(27)
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.9)
for step in range(1, 5):
    series = torch.randn(6, 13, 6, generator=torch.Generator().manual_seed(step)).cumsum(1) * 0.5
    x, y = (part.chunk(world, 1)[rank] for part in (series[:, :-1], series[:, 1:]))
    loss = F.mse_loss(net(x), y, reduction="sum") / series[:, 1:].numel()
    optimizer.zero_grad()
    loss.backward()
    loss = loss.detach()
    if world > 1:
        for p in net.parameters():
            dist.all_reduce(p.grad)
        dist.all_reduce(loss)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(net.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not ONE:
    dist.destroy_process_group()
