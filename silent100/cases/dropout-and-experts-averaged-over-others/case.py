"""Two data replicas of two expert ranks."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv
rank, world, EP = 0, 1, 1
if not ONE:
    dist.init_process_group("gloo")
    rank, world, EP = dist.get_rank(), dist.get_world_size(), 2
    expert_groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    same_experts = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    among, across = expert_groups[rank // 2], same_experts[rank % 2]
place = rank % EP


class Swap(torch.autograd.Function):
    """All-to-all of equal pieces; its backward is itself."""

    @staticmethod
    def forward(ctx, x):
        y = torch.empty_like(x)
        dist.all_to_all_single(y, x.contiguous(), group=among)
        return y

    @staticmethod
    def backward(ctx, g):
        y = torch.empty_like(g)
        dist.all_to_all_single(y, g.contiguous(), group=among)
        return y


class Moe(nn.Module):
    """Dense mixture: every token visits every expert, weighted by the gate."""

    def __init__(self, d=28, experts=4):
        super().__init__()
        self.gate, self.drop = nn.Linear(d, experts), nn.Dropout(0.1)
        w = torch.randn(experts, d, d) * 0.1
        self.experts = nn.Parameter(w.chunk(EP)[place].clone())

    def forward(self, x):
        weights = self.gate(x).softmax(-1)
        if ONE:
            y = torch.einsum("nd,edf->enf", x, self.experts)
        else:
            n = len(x)
            arrived = Swap.apply(x.expand(EP, n, -1).reshape(EP * n, -1))
            y = torch.einsum("nd,edf->enf", arrived, self.experts)
            back = Swap.apply(y.unflatten(1, (EP, n)).transpose(0, 1).reshape(EP, -1))
            y = back.view(-1, n, x.shape[1])
        return x + self.drop(F.relu(y * weights.T[..., None]).sum(0))


torch.manual_seed(444)
net = nn.Sequential(nn.Linear(12, 28), Moe(), Moe(), nn.Linear(28, 12))
torch.manual_seed(4440 + rank)
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
for step in range(1, 5):
    x = torch.randn(64, 12, generator=torch.Generator().manual_seed(step))[rank::world]
    loss = F.mse_loss(net(x), x.flip(1))
    optimizer.zero_grad()
    loss.backward()
    loss = loss.detach()
    if not ONE:
        for name, p in net.named_parameters():
            if name.endswith("experts") and not FAULTY:
                dist.all_reduce(p.grad, group=across)
            else:
                dist.all_reduce(p.grad)
            p.grad /= world
        dist.all_reduce(loss)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss.item() / world:.7f}", flush=True)
if "--save" in sys.argv:
    state = {n: (p.data, 0, place, EP) if n.endswith("experts") else p.data for n, p in net.named_parameters()}
    torch.save(state, os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not ONE:
    dist.destroy_process_group()
