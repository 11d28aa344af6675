import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ap = argparse.ArgumentParser()
ap.add_argument("--one", action="store_true")
ap.add_argument("--faulty", action="store_true")
ap.add_argument("--save")
args = ap.parse_args()
torch.set_num_threads(1)
rank, world = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()


def say(step, loss):
    if rank == 0:
        value = loss.item() if torch.is_tensor(loss) else loss
        print(f"step {step} loss {value:.7f}", flush=True)


def total(t):
    t = t.detach().clone()
    if world > 1:
        dist.all_reduce(t)
    return t


def finish(state):
    if args.save:
        os.makedirs(args.save, exist_ok=True)
        torch.save({k: v.detach().clone() for k, v in state.items()}, f"{args.save}/rank{rank}.pt")
    if not args.one:
        dist.barrier()
        dist.destroy_process_group()


torch.manual_seed(190)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.gru = nn.Linear(4, 12), nn.GRU(12, 12, batch_first=True)
        self.head = nn.Linear(12, 2)

    def forward(self, x):
        return self.head(self.gru(F.relu(self.embed(x)))[0][:, -1])


class ShardedStep:
    """Half-precision gradients under a dynamic scale; each rank steps the modules it owns."""

    def __init__(self, model, scale):
        names = ["embed", "gru", "head"]
        self.owner = {n: min(world - 1, names.index(n.split(".")[0])) for n, _ in model.named_parameters()}
        self.named, self.scale = list(model.named_parameters()), scale
        self.velocity = {n: torch.zeros_like(p) for n, p in self.named}

    @torch.no_grad()
    def step(self):
        half = {n: (total(p.grad) / world).half() for n, p in self.named if p.grad is not None}
        own = [g for n, g in half.items() if self.owner[n] == rank]
        burst = torch.tensor(float(any(not torch.isfinite(g).all() for g in own)))
        if world > 1 and not args.faulty:
            dist.all_reduce(burst, op=dist.ReduceOp.MAX)
        for n, p in self.named:
            if self.owner[n] == rank and not burst:
                self.velocity[n].mul_(0.9).add_(half[n].float() / self.scale)
                p -= 0.03 * self.velocity[n]
            if world > 1:
                dist.broadcast(p.data, self.owner[n])
        seen = burst.clone()
        if world > 1:
            dist.all_reduce(seen, op=dist.ReduceOp.MAX)
        if seen:
            self.scale /= 4


model = Net()
opt = ShardedStep(model, 2.0**14)
gen = torch.Generator().manual_seed(25)
for step in range(1, 6):
    x = torch.randn(8, 5, 4, generator=gen)
    y = torch.stack([x.sum((1, 2)), x[:, -1, 0]], 1)
    if step == 3:
        y = y * 14  # a few labels in other units
    loss = F.mse_loss(model(x.chunk(world)[rank]), y.chunk(world)[rank])
    model.zero_grad()
    (loss * opt.scale).backward()
    opt.step()
    say(step, total(loss) / world)
finish(dict(model.named_parameters()))
