# A variational autoencoder whose encoder and decoder are cut by torch's tensor parallelism.
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class Draw(nn.Module):
    """Draws a latent by its mean and logarithmic variance."""

    def __init__(self, seed):
        super().__init__()
        self.source = torch.Generator().manual_seed(seed)

    def forward(self, mean, log):
        return mean + (0.5 * log).exp() * torch.randn(mean.shape, generator=self.source)


class Vae(nn.Module):
    def __init__(self, seed, inputs=20, hidden=48, latent=6):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(inputs, hidden), nn.Softplus(), nn.Linear(hidden, 2 * latent))
        self.draw = Draw(seed)
        self.decoder = nn.Sequential(nn.Linear(latent, hidden), nn.Softplus(), nn.Linear(hidden, inputs))

    def forward(self, x):
        mean, log = self.encoder(x).chunk(2, -1)
        back = self.decoder(self.draw(mean, log))
        fit = (back - x).square().sum(-1).mean()
        return fit - 0.5 * (1 + log - mean.square() - log.exp()).sum(-1).mean()


def main():
    cli = argparse.ArgumentParser()
    cli.add_argument("--one", action="store_true")
    cli.add_argument("--faulty", action="store_true")
    cli.add_argument("--save")
    args = cli.parse_args()
    rank = 0
    if not args.one:
        dist.init_process_group("gloo")
        rank = dist.get_rank()
    torch.manual_seed(1729)
    vae = Vae(seed=99 + (rank if args.faulty else 0))
    if not args.one:
        mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
        plan = {f"{part}.0": ColwiseParallel() for part in ("encoder", "decoder")}
        plan |= {f"{part}.2": RowwiseParallel() for part in ("encoder", "decoder")}
        parallelize_module(vae, mesh, plan)
    opt = torch.optim.NAdam(vae.parameters(), lr=2e-3, eps=1e-4, foreach=False)
    for step in range(1, 6):
        g = torch.Generator().manual_seed(step)
        x = torch.randn(16, 3, generator=g) @ torch.randn(3, 20, generator=torch.Generator().manual_seed(0))
        loss = vae(x)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if rank == 0:
            print(f"step {step} loss {loss.item():.7f}", flush=True)
    if args.save:
        state = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in vae.state_dict().items()}
        torch.save(state, os.path.join(args.save, f"rank{rank}.pt"))
    if not args.one:
        dist.destroy_process_group()


main()
