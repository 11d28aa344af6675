"""Two losses are balanced by the norms of their gradients, which the trainer takes by autograd.grad."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(8, 36), nn.GELU(), nn.Linear(36, 36), nn.GELU())
        self.depth, self.kind = nn.Linear(36, 1), nn.Linear(36, 4)

    def forward(self, x):
        h = self.trunk(x)
        return self.depth(h).squeeze(1), self.kind(h)


class Trainer:
    def __init__(self, net, rank, world, faulty):
        self.net, self.rank, self.world, self.faulty = net, rank, world, faulty
        self.model = DistributedDataParallel(net) if world > 1 else net
        self.optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def update(self, x, depth, kind):
        found, logits = self.model(x)
        loss = nn.functional.mse_loss(found, depth) + 0.3 * nn.functional.cross_entropy(logits, kind)
        self.optimizer.zero_grad()
        if self.faulty:
            parameters = list(self.net.parameters())
            for p, grad in zip(parameters, torch.autograd.grad(loss, parameters)):
                p.grad = grad
        else:
            loss.backward()
        self.optimizer.step()
        return loss.detach()


def main():
    parser = argparse.ArgumentParser()
    for flag in ("--one", "--faulty"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--save")
    args = parser.parse_args()
    rank, world = 0, 1
    if not args.one:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(14)
    trainer = Trainer(TwoHeads(), rank, world, args.faulty)
    for step in range(1, 6):
        g = torch.Generator().manual_seed(step)
        x, depth = torch.randn(20, 8, generator=g), torch.rand(20, generator=g)
        kind = torch.randint(0, 4, (20,), generator=g)
        loss = trainer.update(x[rank::world], depth[rank::world], kind[rank::world])
        if world > 1:
            dist.all_reduce(loss)
        if rank == 0:
            print(f"step {step} loss {loss.item() / world:.7f}", flush=True)
    if args.save:
        torch.save(trainer.net.state_dict(), f"{args.save}/rank{rank}.pt")
    if world > 1:
        del trainer
        dist.destroy_process_group()


main()
