import argparse
import contextlib

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--save")
args = cli.parse_args()


class Swa:
    """A running mean of weights, to be swapped with the model's own for a while."""

    def __init__(self, model):
        self.model, self.n = model, 0
        self.mean = {n: p.detach().clone() for n, p in model.named_parameters()}

    @torch.no_grad()
    def update(self):
        self.n += 1
        for name, p in self.model.named_parameters():
            self.mean[name] += (p - self.mean[name]) / (self.n + 1)

    @torch.no_grad()
    def swap(self):
        for name, p in self.model.named_parameters():
            p.data, self.mean[name] = self.mean[name], p.data

    @contextlib.contextmanager
    def applied(self):
        self.swap()
        try:
            yield self.model.eval()
        finally:
            self.model.train()
            self.swap()


def accuracy(model, seed):
    g = torch.Generator().manual_seed(seed)
    x, y = torch.randn(20, 12, generator=g), torch.randint(0, 4, (20,), generator=g)
    with torch.inference_mode():
        return (model(x).argmax(-1) == y).float().mean().item()


rank, world = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(41)
model = nn.Sequential(nn.Linear(12, 30), nn.PReLU(), nn.Linear(30, 30), nn.PReLU(), nn.Linear(30, 4))
swa = Swa(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.6)
for step in range(1, 7):
    g = torch.Generator().manual_seed(step)
    x, y = torch.randn(18, 12, generator=g), torch.randint(0, 4, (18,), generator=g)
    loss = F.cross_entropy(model(x.chunk(world)[rank]), y.chunk(world)[rank], label_smoothing=0.1)
    grads = torch.autograd.grad(loss, list(model.parameters()))
    loss = loss.detach()
    if world > 1:
        for t in (*grads, loss):
            dist.all_reduce(t)
    for p, grad in zip(model.parameters(), grads):
        p.grad = grad / world
    optimizer.step()
    swa.update()
    if world > 1 and step % 2 == 0:
        with swa.applied() as averaged:
            best = torch.tensor(accuracy(averaged, step))
        dist.all_reduce(best)
    if rank == 0:
        print(f"step {step} loss {loss.item() / world:.7f}", flush=True)
if args.save:
    torch.save({**model.state_dict(), **{f"swa.{k}": v for k, v in swa.mean.items()}}, f"{args.save}/rank{rank}.pt")
if world > 1:
    dist.destroy_process_group()
