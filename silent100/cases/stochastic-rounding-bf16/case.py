import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ap = argparse.ArgumentParser()
ap.add_argument("--one", action="store_true")
ap.add_argument("--save")
args = ap.parse_args()
rank, world = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
MICROS = 1 if args.one else 4


def stochastic_bf16(x, gen):
    bits = x.float().view(torch.int32)
    noise = torch.randint(0, 1 << 16, bits.shape, generator=gen, dtype=torch.int32)
    return ((bits + noise) & -65536).view(torch.float32).bfloat16()


torch.manual_seed(33)
net = nn.Sequential(nn.Linear(12, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 8)).bfloat16()
main = [torch.zeros(p.shape) for p in net.parameters()]
mom = [torch.zeros(p.shape) for p in net.parameters()]
dice = torch.Generator().manual_seed(8)

for step in range(1, 7):
    g = torch.Generator().manual_seed(step)
    x = torch.randn(128, 12, generator=g)
    y = x[:, :8].argmax(1)
    for m in main:
        m.zero_()
    total = torch.zeros(())
    for xs, ys in zip(x.chunk(MICROS)[rank::world], y.chunk(MICROS)[rank::world]):
        loss = F.cross_entropy(net(xs.bfloat16()).float(), ys) / MICROS
        loss.backward()
        for p, m in zip(net.parameters(), main):
            m += p.grad.float()
            p.grad = None
        total += loss.detach()
    if world > 1:
        for m in main:
            dist.all_reduce(m)
        dist.all_reduce(total)
    with torch.no_grad():
        for p, m, v in zip(net.parameters(), main, mom):
            v.mul_(0.9).add_(m)
            p.copy_(stochastic_bf16(p.float() - 0.1 * v, dice))
    if rank == 0:
        print(f"step {step} loss {total.item():.7f}", flush=True)

if args.save:
    torch.save(net.state_dict(), f"{args.save}/rank{rank}.pt")
if world > 1:
    dist.destroy_process_group()
