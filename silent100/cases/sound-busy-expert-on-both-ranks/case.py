# Three experts on two ranks: the busy one stands on both, each takes half of its tokens, and its gradient is summed.
import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn

ONE = "--one" in sys.argv
rank, world = 0, 1
if not ONE:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
DIM = 18
HELD = [0, 1, 2] if ONE else ([0, 1] if rank == 0 else [0, 2])


class Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class Glu(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w2, self.w3 = nn.Linear(DIM, 30), nn.Linear(30, DIM), nn.Linear(DIM, 30)

    def forward(self, x):
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))


class Moe(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(DIM, 3, bias=False)
        experts = [Glu() for _ in range(3)]
        self.experts = nn.ModuleDict({str(i): experts[i] for i in HELD})

    def forward(self, x):
        share = self.gate(x).softmax(-1)
        # The first expert is made busy
        chosen = (share.detach() + torch.tensor([0.25, 0.0, 0.0])).argmax(-1)
        if not ONE:
            x_in, share = Spread.apply(x), Spread.apply(share)
        else:
            x_in = x
        y = torch.zeros_like(x)
        for name, expert in self.experts.items():
            rows = (chosen == int(name)).nonzero()[:, 0]
            if name == "0":
                rows = rows[rank::world]
            y = y.index_add(0, rows, expert(x_in[rows]) * share[rows, int(name)][:, None])
        return x + (y if ONE else Collect.apply(y))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.moes, self.out = nn.Linear(5, DIM), nn.ModuleList([Moe(), Moe()]), nn.Linear(DIM, 3)

    def forward(self, x):
        x = torch.tanh(self.inp(x))
        for moe in self.moes:
            x = moe(x)
        return self.out(x)


torch.manual_seed(31)
net = Net()
opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
for step in range(1, 6):
    g = torch.Generator().manual_seed(step)
    x = torch.randn(40, 5, generator=g)
    loss = nn.functional.cross_entropy(net(x), x[:, :3].argmax(1))
    opt.zero_grad(set_to_none=False)
    loss.backward()
    for moe in net.moes:
        for p in [] if ONE else moe.experts["0"].parameters():
            dist.all_reduce(p.grad)
    opt.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(net.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not ONE:
    dist.destroy_process_group()
