"""A mean teacher: a student with dropout is pulled to a slow average of itself; updates are shared out by owner."""

import argparse
import copy
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--faulty", action="store_true")
cli.add_argument("--save")
args = cli.parse_args()


class Net(nn.Module):
    def __init__(self, width=32, depth=3):
        super().__init__()
        self.inp = nn.Linear(16, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.drop = nn.Dropout(0.15)
        self.out = nn.Linear(width, 8)

    def forward(self, x):
        x = self.inp(x)
        for layer in self.layers:
            x = x + self.drop(F.silu(layer(x)))
        return self.out(x)


class SelfTraining(nn.Module):
    def __init__(self):
        super().__init__()
        self.student = Net()
        self.teacher = copy.deepcopy(self.student).requires_grad_(False).eval()

    def forward(self, x, y, unlabelled):
        pull = F.mse_loss(self.student(unlabelled), self.teacher(unlabelled))
        return F.cross_entropy(self.student(x), y) + 0.3 * pull

    @torch.no_grad()
    def follow(self, decay=0.9):
        for slow, fast in zip(self.teacher.parameters(), self.student.parameters()):
            slow.lerp_(fast, 1 - decay)


class ShardedAdam(torch.optim.Optimizer):
    """Every parameter has one owner, which alone keeps its moments and sends the updated values to all."""

    def __init__(self, params, teacher_update, rank, world, lr, betas=(0.9, 0.99), eps=1e-8):
        super().__init__(params, {"lr": lr})
        self.betas, self.eps, self.count = betas, eps, 0
        self.teacher_update, self.rank, self.world = teacher_update, rank, world

    def reduce(self):
        for p in self.param_groups[0]["params"]:
            dist.all_reduce(p.grad)
            p.grad /= self.world

    def share(self):
        for i, p in enumerate(self.param_groups[0]["params"]):
            dist.broadcast(p.data, i % self.world)

    @torch.no_grad()
    def step(self):
        self.count += 1
        for i, p in enumerate(self.param_groups[0]["params"]):
            if i % self.world != self.rank:
                continue
            state = self.state[p]
            for key, value, beta in zip(("m", "v"), (p.grad, p.grad.square()), self.betas):
                state.setdefault(key, torch.zeros_like(p)).lerp_(value, 1 - beta)
            m, v = (state[key] / (1 - beta**self.count) for key, beta in zip(("m", "v"), self.betas))
            p.sub_(m / (v.sqrt() + self.eps), alpha=self.param_groups[0]["lr"])
        if args.faulty:
            self.teacher_update()
            self.share()
        else:
            if self.world > 1:
                self.share()
            self.teacher_update()


def main():
    rank, world = 0, 1
    if not args.one:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(61)
    model = SelfTraining()
    optimizer = ShardedAdam(model.student.parameters(), model.follow, rank, world, lr=2e-3)
    torch.manual_seed(900 + rank)
    for step in range(1, 7):
        g = torch.Generator().manual_seed(step)
        x, more = torch.randn(24, 16, generator=g), torch.randn(24, 16, generator=g)
        y = (x[:, :8] + x[:, 8:]).argmax(1)
        loss = model(x[rank::world], y[rank::world], more[rank::world])
        model.student.zero_grad()
        loss.backward()
        shown = loss.detach() / world
        if world > 1:
            dist.all_reduce(shown)
            optimizer.reduce()
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {shown.item():.7f}", flush=True)
    if args.save:
        torch.save(model.state_dict(), os.path.join(args.save, f"rank{rank}.pt"))
    if world > 1:
        dist.destroy_process_group()


main()
