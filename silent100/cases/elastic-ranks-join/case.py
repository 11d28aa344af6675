import argparse

import torch
import torch.distributed as dist
import torch.nn as nn

ap = argparse.ArgumentParser()
ap.add_argument("--one", action="store_true")
ap.add_argument("--save")
args = ap.parse_args()
torch.set_default_dtype(torch.float64)
rank, world = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    pair = dist.new_group([0, 1])
ROWS, JOIN = 16, 3

torch.manual_seed(0 if rank < 2 else 500 + rank)
net = nn.Sequential(nn.Linear(8, 32), nn.Softplus(), nn.Linear(32, 32), nn.Softplus(), nn.Linear(32, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.03, momentum=0.95, weight_decay=1e-4)


def welcome():
    """Newcomers take the weights and the optimizer's momentum from rank 0."""
    for p in net.parameters():
        dist.broadcast(p.data, 0)
        buf = opt.state[p].get("momentum_buffer")
        if buf is None:
            buf = opt.state[p]["momentum_buffer"] = torch.zeros_like(p)
        dist.broadcast(buf, 0)


for step in range(1, 7):
    if world > 1 and step == JOIN:
        welcome()
    members = 1 if world == 1 else (2 if step < JOIN else world)
    group = None if world == 1 or step >= JOIN else pair
    if rank >= members:
        continue
    g = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS, 8, generator=g)
    y = (x[:, :4] * x[:, 4:]).sum(1, keepdim=True)
    x, y = x.chunk(members)[rank], y.chunk(members)[rank]
    loss = nn.functional.mse_loss(net(x), y)
    opt.zero_grad()
    loss.backward()
    loss = loss.detach()
    if world > 1:
        for p in net.parameters():
            dist.all_reduce(p.grad, group=group)
            p.grad /= members
        dist.all_reduce(loss, group=group)
        loss /= members
    opt.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)

if args.save:
    torch.save(net.state_dict(), f"{args.save}/rank{rank}.pt")
if world > 1:
    dist.barrier()
    dist.destroy_process_group()
