"""Natural gradients with Kronecker factors; factors and gradients are averaged over the processes."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

ROWS = 32


class Kronecker:
    def __init__(self, net, faulty, damping=0.03, keep=0.9, lr=0.05):
        self.faulty, self.damping, self.keep, self.lr = faulty, damping, keep, lr
        self.world = dist.get_world_size() if dist.is_initialized() else 1
        self.layers = {n: m for n, m in net.named_modules() if isinstance(m, nn.Linear)}
        self.seen, self.left, self.right = {}, {}, {}
        for name, layer in self.layers.items():
            layer.register_forward_hook(self.forward_hook(name))

    def forward_hook(self, name):
        def hook(module, inputs, output):
            self.seen[name] = [inputs[0].detach(), None]
            output.register_hook(lambda grad: self.seen[name].__setitem__(1, grad.detach()))

        return hook

    def mean(self, t):
        if self.world > 1:
            dist.all_reduce(t)
        return t / self.world

    @torch.no_grad()
    def factors(self):
        for name, (a, g) in self.seen.items():
            a = torch.cat([a, a.new_ones(len(a), 1)], 1)
            rows = ROWS if self.faulty else len(g)
            new = self.mean(a.T @ a / len(a)), self.mean(g.T @ g * rows)
            for into, factor in zip((self.right, self.left), new):
                into[name] = factor if name not in into else self.keep * into[name] + (1 - self.keep) * factor

    @torch.no_grad()
    def step(self):
        self.factors()
        for name, layer in self.layers.items():
            grad = self.mean(torch.cat([layer.weight.grad, layer.bias.grad[:, None]], 1))
            left = self.left[name] + self.damping * torch.eye(len(grad))
            right = self.right[name] + self.damping * torch.eye(grad.shape[1])
            grad = torch.linalg.solve(left, torch.linalg.solve(right, grad.T).T)
            layer.weight -= self.lr * grad[:, :-1]
            layer.bias -= self.lr * grad[:, -1]


def main(one, faulty, save):
    if not one:
        dist.init_process_group("gloo")
    rank, world = (0, 1) if one else (dist.get_rank(), dist.get_world_size())
    torch.manual_seed(5)
    net = nn.Sequential(nn.Linear(9, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 4))
    optimizer = Kronecker(net, faulty)
    for step in range(1, 6):
        g = torch.Generator().manual_seed(step)
        x = torch.randn(ROWS, 9, generator=g)
        y = (x[:, :4] + x[:, 3:7] ** 2).argmax(1)
        net.zero_grad()
        loss = F.cross_entropy(net(x[rank::world]), y[rank::world])
        loss.backward()
        optimizer.step()
        loss = optimizer.mean(loss.detach())
        if rank == 0:
            print(f"step {step} loss {loss.item():.7f}", flush=True)
    if save:
        torch.save(net.state_dict(), os.path.join(save, f"rank{rank}.pt"))
    if not one:
        dist.destroy_process_group()


if __name__ == "__main__":
    cli = argparse.ArgumentParser()
    cli.add_argument("--one", action="store_true")
    cli.add_argument("--faulty", action="store_true")
    cli.add_argument("--save")
    main(**vars(cli.parse_args()))
