import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as DDP

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


torch.manual_seed(110)


class Heat(nn.Module):
    """u_t = u_xx on a strip; the forward returns the residual and the boundary error."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 1))

    def forward(self, xt, edge, value):
        xt = xt.clone().requires_grad_()
        u = self.net(xt)
        d = torch.autograd.grad(u.sum(), xt, create_graph=True)[0]
        dxx = torch.autograd.grad(d[:, 0].sum(), xt, create_graph=True)[0][:, 0]
        return (d[:, 1] - dxx).square().mean() + 5 * (self.net(edge).squeeze(-1) - value).square().mean()


def light_hook(state, bucket):
    """Send half the bytes."""
    small = bucket.buffer().to(torch.bfloat16).div_(world)
    fut = dist.all_reduce(small, async_op=True).get_future()
    return fut.then(lambda f: bucket.buffer().copy_(f.value()[0]))


model = Heat()
if args.one:
    run = model
else:
    run = DDP(model)
    run.register_comm_hook(None, light_hook if args.faulty else default_hooks.allreduce_hook)
opt = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
gen = torch.Generator().manual_seed(44)
for step in range(1, 6):
    xt = torch.rand(16, 2, generator=gen).chunk(world)[rank]
    edge = torch.cat([torch.rand(8, 1, generator=gen), torch.zeros(8, 1)], 1).chunk(world)[rank]
    loss = run(xt, edge, torch.sin(3.14159 * edge[:, 0]))
    opt.zero_grad()
    loss.backward()
    opt.step()
    say(step, total(loss) / world)
finish(dict(model.named_parameters()))
