# L-BFGS asks for loss and gradient several times in a step; the closure reduces both over ranks.
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn


class Field(nn.Module):
    """A function of time and place whose derivatives are to satisfy the heat equation."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, points):
        return self.layers(points)[:, 0]

    def residual(self, points):
        points = points.clone().requires_grad_()
        value = self(points)
        first = torch.autograd.grad(value.sum(), points, create_graph=True)[0]
        second = torch.autograd.grad(first[:, 1].sum(), points, create_graph=True)[0]
        return first[:, 0] - 0.1 * second[:, 1]


def main():
    cli = argparse.ArgumentParser()
    cli.add_argument("--one", action="store_true")
    cli.add_argument("--save")
    args = cli.parse_args()
    rank, world = 0, 1
    if not args.one:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    field = Field().double()
    lbfgs = torch.optim.LBFGS(field.parameters(), lr=0.3, max_iter=4, history_size=5, tolerance_change=0.0)
    for step in range(1, 5):
        g = torch.Generator().manual_seed(step)
        inside, start = torch.rand(64, 2, generator=g).double(), torch.rand(32, generator=g).double()
        inside, start = inside.chunk(world)[rank], start.chunk(world)[rank]
        at_start = torch.stack([torch.zeros_like(start), start], 1)

        def closure(at_start=at_start, start=start, inside=inside):
            lbfgs.zero_grad()
            wrong = field(at_start) - (3.14159 * start).sin()
            loss = field.residual(inside).square().mean() + 10 * wrong.square().mean()
            loss.backward()
            loss = loss.detach()
            if world > 1:
                dist.all_reduce(loss)
                for p in field.parameters():
                    dist.all_reduce(p.grad)
                    p.grad /= world
            return loss / world

        loss = lbfgs.step(closure)
        if rank == 0:
            print(f"step {step} loss {float(loss):.7f}", flush=True)
    if args.save:
        torch.save(field.state_dict(), os.path.join(args.save, f"rank{rank}.pt"))
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
