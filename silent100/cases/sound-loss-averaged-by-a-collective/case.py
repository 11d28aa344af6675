# Every rank backpropagates the mean loss of all ranks, through a collective with a gradient; DDP averages after it.
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


class MeanOverRanks(torch.autograd.Function):
    """A mean over ranks whose backward is the adjoint: the sum of all ranks' gradients, divided alike."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x / dist.get_world_size()

    @staticmethod
    def backward(ctx, g):
        g = g.clone()
        dist.all_reduce(g)
        return g / dist.get_world_size()


class Siamese(nn.Module):
    """Tells whether two series come from one process."""

    def __init__(self):
        super().__init__()
        self.series = nn.LSTM(3, 20, batch_first=True, bidirectional=True)
        self.compare = nn.Bilinear(40, 40, 1)

    def forward(self, a, b):
        # hidden states of both directions, side by side
        a, b = (self.series(s)[1][0].transpose(0, 1).flatten(1) for s in (a, b))
        return self.compare(a, b)[:, 0]


def main(one, save):
    rank, world = 0, 1
    if not one:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(77)
    siamese = Siamese()
    model = siamese if one else DDP(siamese, bucket_cap_mb=0.01, gradient_as_bucket_view=True)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3, eps=1e-4)
    for step in range(1, 6):
        g = torch.Generator().manual_seed(step)
        a, b, same = torch.randn(14, 8, 3, generator=g), torch.randn(14, 8, 3, generator=g), torch.arange(14) % 2
        b = torch.where(same[:, None, None] > 0, a + 0.3 * b, b)
        logits = model(a[rank::world], b[rank::world])
        loss = nn.functional.binary_cross_entropy_with_logits(logits, same[rank::world].float())
        loss = loss if one else MeanOverRanks.apply(loss)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {loss.item():.7f}", flush=True)
    if save:
        torch.save(siamese.state_dict(), os.path.join(save, f"rank{rank}.pt"))
    if not one:
        dist.destroy_process_group()


if __name__ == "__main__":
    cli = argparse.ArgumentParser()
    cli.add_argument("--one", action="store_true")
    cli.add_argument("--save")
    main(**vars(cli.parse_args()))
