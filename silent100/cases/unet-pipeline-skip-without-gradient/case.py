import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--one", action="store_true")
parser.add_argument("--faulty", action="store_true")
parser.add_argument("--save")
args = parser.parse_args()
if not args.one:
    dist.init_process_group("gloo")
rank, world = (0, 1) if args.one else (dist.get_rank(), dist.get_world_size())
torch.manual_seed(235)


class Down(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc1, self.enc2 = nn.Conv1d(2, 6, 3, padding=1), nn.Conv1d(6, 6, 4, stride=2, padding=1)

    def forward(self, x):
        skip = F.silu(self.enc1(x))
        return F.silu(self.enc2(skip)), skip


class Up(nn.Module):
    def __init__(self):
        super().__init__()
        self.dec2 = nn.ConvTranspose1d(6, 6, 4, stride=2, padding=1)
        self.dec1 = nn.Conv1d(12, 2, 3, padding=1)

    def forward(self, h, skip):
        return self.dec1(torch.cat([F.silu(self.dec2(h)), skip], 1))


model = nn.Module()
down, up = Down(), Up()
if rank == 0:
    model.down = down
if rank == world - 1:
    model.up = up
opt = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
for step in range(1, 8):
    g = torch.Generator().manual_seed(300 + step)
    clean = torch.randn(8, 2, 10, generator=g).cumsum(-1) / 2
    noisy = clean + 0.5 * torch.randn(8, 2, 10, generator=g)
    opt.zero_grad()
    losses = torch.zeros(())
    for rows in torch.arange(8).split(2):
        if rank == 0:
            h, skip = down(noisy[rows])
        if world > 1 and rank == 0:
            dist.send(h.detach().contiguous(), 1)
            dist.send(skip.detach().contiguous(), 1)
            grads = [torch.empty_like(h), torch.empty_like(skip)]
            dist.recv(grads[0], 1)
            outputs = [h]
            if not args.faulty:
                dist.recv(grads[1], 1)
                outputs.append(skip)
            torch.autograd.backward(outputs, grads[: len(outputs)])
            continue
        if world > 1:
            h, skip = torch.empty(2, 6, 5), torch.empty(2, 6, 10)
            dist.recv(h, 0)
            dist.recv(skip, 0)
            h.requires_grad_()
            skip.requires_grad_()
        loss = F.mse_loss(up(h, skip), clean[rows], reduction="sum") / clean.numel()
        loss.backward()
        losses += loss.detach()
        if world > 1:
            dist.send(h.grad, 0)
            if not args.faulty:
                dist.send(skip.grad, 0)
    opt.step()
    if world > 1:
        dist.broadcast(losses, 1)
    if rank == 0:
        print(f"step {step} loss {losses.item():.7f}", flush=True)

if args.save:
    os.makedirs(args.save, exist_ok=True)
    torch.save(model.state_dict(), f"{args.save}/rank{rank}.pt")
if not args.one:
    dist.destroy_process_group()
