"""Hash-routed experts: which experts have tokens depends on the step; each rank owns two of four."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv
if not ONE:
    dist.init_process_group("gloo")
RANK, WORLD = (0, 1) if ONE else (dist.get_rank(), dist.get_world_size())
EXPERTS, DIM = 4, 24


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x):
        return self.fc2(torch.relu(self.fc1(x)))


class HashMoe(nn.Module):
    """All ranks hold all tokens; outputs of other ranks' experts arrive by an all-reduce."""

    def __init__(self):
        super().__init__()
        experts = [Expert() for _ in range(EXPERTS)]
        self.own = [e for e in range(EXPERTS) if e * WORLD // EXPERTS == RANK]
        self.experts = nn.ModuleDict({str(e): experts[e] for e in self.own})

    def forward(self, x, kinds):
        y = torch.zeros_like(x)
        for e in self.own:
            chosen = (kinds == e).nonzero().squeeze(1)
            if len(chosen) or not FAULTY:
                y = y.index_add(0, chosen, self.experts[str(e)](x[chosen]))
        if WORLD > 1:
            y = Add.apply(y)
        return x + y


class Add(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.moe, self.out = HashMoe(), nn.Linear(DIM, 3)

    def forward(self, x, kinds):
        return self.out(self.moe(x, kinds))


torch.manual_seed(2)
net = Net()
adamw = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.3, eps=1e-5)
for step in range(1, 6):
    g = torch.Generator().manual_seed(step)
    x, y = torch.randn(30, DIM, generator=g), torch.randint(0, 3, (30,), generator=g)
    kinds = torch.randint(0, EXPERTS if step % 2 else EXPERTS - 1, (30,), generator=g)  # even steps lack the last kind
    loss = nn.functional.cross_entropy(net(x, kinds), y)
    adamw.zero_grad()
    loss.backward()
    adamw.step()
    if RANK == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(net.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{RANK}.pt"))
if not ONE:
    dist.destroy_process_group()
