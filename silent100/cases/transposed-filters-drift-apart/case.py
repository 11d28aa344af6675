"""A convolutional autoencoder in two stages: the decoder is the encoder transposed."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--faulty", action="store_true")
cli.add_argument("--save")
cli = cli.parse_args()


class Coder(nn.Module):
    """Encodes, decodes, or both; ``filters`` are the same in both."""

    def __init__(self, encodes, decodes):
        super().__init__()
        torch.manual_seed(5)
        self.filters = nn.Parameter(torch.randn(9, 2, 3, 3) * 0.2)
        if encodes:
            self.threshold = nn.Parameter(torch.full((9, 1, 1), 0.1))
        if decodes:
            self.offset = nn.Parameter(torch.zeros(2, 1, 1))

    def encode(self, x):
        code = F.conv2d(x, self.filters, stride=2, padding=1)
        return code - torch.tanh(code / self.threshold) * self.threshold

    def decode(self, code):
        return F.conv_transpose2d(code, self.filters, stride=2, padding=1) + self.offset


def pictures(step):
    return torch.randn(6, 2, 7, 7, generator=torch.Generator().manual_seed(step))


def whole(coder, step):
    x = pictures(step)
    loss = F.mse_loss(coder.decode(coder.encode(x)), x)
    loss.backward()
    return loss


def staged(coder, rank, step):
    loss = None
    halves = pictures(step).chunk(2)
    if rank == 0:
        codes = [coder.encode(x) for x in halves]
        for code in codes:
            dist.send(code.detach(), 1)
        for code in reversed(codes):
            g = torch.empty_like(code)
            dist.recv(g, 1)
            code.backward(g)
    else:
        codes, losses = [], []
        for x in halves:
            code = torch.empty(3, 9, 4, 4)
            dist.recv(code, 0)
            codes.append(code.requires_grad_())
            losses.append(F.mse_loss(coder.decode(code), x) / 2)
        for code, part in zip(reversed(codes), reversed(losses)):
            part.backward()
            dist.send(code.grad, 0)
        loss = sum(losses)
    if not cli.faulty:
        dist.all_reduce(coder.filters.grad)
    return loss


rank = 0
if not cli.one:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
coder = Coder(cli.one or rank == 0, cli.one or rank == 1)
optimizer = torch.optim.Adagrad(coder.parameters(), lr=0.05, eps=1e-3)
for step in range(1, 6):
    optimizer.zero_grad()
    loss = whole(coder, step) if cli.one else staged(coder, rank, step)
    optimizer.step()
    if loss is not None:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if cli.save:
    torch.save(coder.state_dict(), os.path.join(cli.save, f"rank{rank}.pt"))
if not cli.one:
    dist.destroy_process_group()
