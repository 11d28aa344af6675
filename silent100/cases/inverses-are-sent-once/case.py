"""K-FAC on a small network: factors are averaged over ranks, inverses are shared out by layer."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F

ONE = "--one" in sys.argv
if not ONE:
    dist.init_process_group("gloo")
rank, world = (0, 1) if ONE else (dist.get_rank(), dist.get_world_size())


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(a, b, bias=False) for a, b in ((9, 16), (16, 12), (12, 4)))

    def forward(self, x):
        for layer in self.layers[:2]:
            x = torch.tanh(layer(x))
        return self.layers[2](x)


class KFAC:
    def __init__(self, layers, rate=0.05, damping=0.3, every=2):
        self.layers, self.rate, self.damping, self.every = list(layers), rate, damping, every
        self.inputs, self.outputs, self.inverses = {}, {}, {}
        for layer in self.layers:
            layer.register_forward_pre_hook(lambda m, a: self.inputs.__setitem__(m, a[0].detach()))
            layer.register_full_backward_hook(lambda m, i, o: self.outputs.__setitem__(m, o[0].detach()))

    def step(self, step, rows):
        for i, layer in enumerate(self.layers):
            a, g = self.inputs[layer], self.outputs[layer] * rows
            left, right, grad = g.T @ g / rows, a.T @ a / rows, layer.weight.grad
            if world > 1:
                for t in (left, right, grad):
                    dist.all_reduce(t)
            if step % self.every == 1:
                self.renew(i, left, right, step)
            inverse_left, inverse_right = self.inverses[i]
            layer.weight.data -= self.rate * inverse_left @ grad @ inverse_right

    def renew(self, i, left, right, step):
        owner = i % world
        if rank == owner:
            self.inverses[i] = [torch.linalg.inv(m + self.damping * torch.eye(len(m))) for m in (left, right)]
        elif i not in self.inverses:
            self.inverses[i] = [torch.empty_like(left), torch.empty_like(right)]
        if world > 1 and not ("--faulty" in sys.argv and step > 1):
            for m in self.inverses[i]:
                dist.broadcast(m, owner)


torch.manual_seed(99)
net = Net()
kfac = KFAC(net.layers)
for step in range(1, 7):
    x = torch.randn(24, 9, generator=torch.Generator().manual_seed(step))
    y = x[:, :4].argmax(1)
    loss = F.cross_entropy(net(x[rank::world]), y[rank::world], reduction="sum") / 24
    net.zero_grad()
    loss.backward()
    kfac.step(step, 24)
    loss = loss.detach()
    if world > 1:
        dist.all_reduce(loss)
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(net.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not ONE:
    dist.destroy_process_group()
