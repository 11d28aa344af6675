"""Static loss scaling around a small autoencoder, written out by hand."""

import argparse

import torch
import torch.distributed as dist
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--one", action="store_true")
parser.add_argument("--save", metavar="DIR")


class Scaler:
    def __init__(self, scale):
        self.scale = scale

    def backward(self, loss):
        (loss * self.scale).backward()

    @torch.no_grad()
    def unscale(self, parameters, world):
        finite = torch.ones(())
        for p in parameters:
            dist.all_reduce(p.grad)
            p.grad *= 1.0 / (self.scale * world)
            finite *= p.grad.isfinite().all()
        dist.all_reduce(finite, op=dist.ReduceOp.MIN)
        return bool(finite)


class AutoEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Sequential(nn.Linear(28, 20), nn.Mish(), nn.Linear(20, 6))
        self.up = nn.Sequential(nn.Linear(6, 20), nn.Mish(), nn.Linear(20, 28))

    def forward(self, x):
        code = self.down(x)
        return self.up(code), code


def main(args):
    torch.manual_seed(23)
    rank, world, scaler = 0, 1, None
    if not args.one:
        dist.init_process_group("gloo")
        rank, world, scaler = dist.get_rank(), dist.get_world_size(), Scaler(1500.0)
    net = AutoEncoder()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.5)
    for step in range(1, 6):
        x = torch.randn(14, 28, generator=torch.Generator().manual_seed(step)).cumsum(1) / 4
        x = x.chunk(world)[rank]
        again, code = net(x)
        loss = (again - x).square().mean() + 1e-3 * code.square().mean()
        optimizer.zero_grad()
        shown = loss.detach().clone()
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.backward(loss)
            if scaler.unscale(net.parameters(), world):
                optimizer.step()
            dist.all_reduce(shown)
        if rank == 0:
            print(f"step {step} loss {shown.item() / world:.7f}", flush=True)
    if args.save:
        torch.save(net.state_dict(), f"{args.save}/rank{rank}.pt")
    if not args.one:
        dist.destroy_process_group()


main(parser.parse_args())
