# Routing with a bias that follows the load; stopped after three updates and resumed.
import copy
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


class Moe(nn.Module):
    def __init__(self, d=28, experts=4):
        super().__init__()
        self.router, self.drop = nn.Linear(d, experts, bias=False), nn.Dropout(0.1)
        self.experts = nn.Parameter(torch.randn(experts, d, d) * 0.05)
        self.register_buffer("bias", torch.zeros(experts), persistent=not FAULTY)
        self.load = torch.zeros(experts)

    def forward(self, x):
        scores = torch.sigmoid(self.router(x))
        chosen = (scores + self.bias).topk(2, -1).indices
        mask = torch.zeros_like(scores).scatter(1, chosen, 1.0)
        self.load = mask.sum(0).detach()
        y = torch.einsum("nd,edf->nef", x, self.experts)
        return x + self.drop(F.relu(y * (mask * scores)[..., None]).sum(1))

    def balance(self, rate=0.02):
        if world > 1:
            dist.all_reduce(self.load)
        self.bias += rate * torch.sign(self.load.mean() - self.load)


def build():
    torch.manual_seed(2953)
    net = nn.Sequential(nn.Embedding(60, 28), nn.Flatten(0, 1), Moe(), Moe(), nn.Linear(28, 60))
    return net, torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)


net, optimizer = build()
torch.manual_seed(1 + rank)
for step in range(1, 6):
    if step == 4:
        saved = copy.deepcopy({"net": net.state_dict(), "optimizer": optimizer.state_dict()})
        chance = torch.get_rng_state()
        net, optimizer = build()
        net.load_state_dict(saved["net"])
        optimizer.load_state_dict(saved["optimizer"])
        torch.set_rng_state(chance)
    rows = torch.randint(0, 60, (24, 13), generator=torch.Generator().manual_seed(step))[rank::world]
    loss = F.cross_entropy(net(rows[:, :-1]), rows[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    shown = loss.detach().clone()
    if world > 1:
        for p in net.parameters():
            dist.all_reduce(p.grad)
            p.grad /= world
        dist.all_reduce(shown)
    optimizer.step()
    for moe in (net[2], net[3]):
        moe.balance()
    if rank == 0:
        print(f"step {step} loss {shown.item() / world:.7f}", flush=True)
if "--save" in sys.argv:
    state = dict(net.named_parameters()) | dict(net.named_buffers())
    state = {k: v.detach() for k, v in state.items()}
    torch.save(state, os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
