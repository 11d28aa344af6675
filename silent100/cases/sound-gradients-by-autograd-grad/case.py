import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.utils.parametrizations import weight_norm

D, T, BATCH = 32, 12, 8
torch.set_default_dtype(torch.float64)


class AllSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, g):
        g = g.clone()
        dist.all_reduce(g)
        return g


def all_sum(x):
    return AllSum.apply(x) if dist.is_initialized() else x


class SyncNorm(nn.Module):
    """Batch norm over the global batch: count, sum and sum of squares travel together."""

    def __init__(self, d):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(d)), nn.Parameter(torch.zeros(d))
        self.register_buffer("running_mean", torch.zeros(d))

    def forward(self, x):
        f = x.flatten(0, 1)
        n = torch.full((1,), float(f.shape[0]))
        s = all_sum(torch.cat([f.sum(0), f.pow(2).sum(0), n]))
        mean, sq = s[:D] / s[-1], s[D : 2 * D] / s[-1]
        with torch.no_grad():
            self.running_mean.lerp_(mean, 0.1)
        return (x - mean) * (sq - mean**2 + 1e-5).rsqrt() * self.weight + self.bias


class SpectralBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = SyncNorm(D)
        self.filter = nn.Parameter(torch.randn(T // 2 + 1, D, dtype=torch.complex128) * 0.3)
        self.lin = weight_norm(nn.Linear(D, D), dim=0)

    def forward(self, x):
        h = torch.fft.irfft(torch.fft.rfft(self.norm(x), dim=1) * self.filter, n=T, dim=1)
        return x + torch.tanh(self.lin(h))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(3, D)
        self.blocks = nn.ModuleList([SpectralBlock(), SpectralBlock()])
        self.norm = nn.LayerNorm(D)
        self.head = nn.Linear(D, 2)

    def forward(self, x):
        x = self.embed(x)
        for b in self.blocks:
            x = b(x)
        return self.head(self.norm(x))


def reduce_(g):
    # gloo has no complex all-reduce, the real view shares the memory
    dist.all_reduce(torch.view_as_real(g) if g.is_complex() else g)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--one", action="store_true")
    ap.add_argument("--save")
    args = ap.parse_args()
    rank, world = 0, 1
    if not args.one:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(64)
    net = Net()
    velocity = {}
    lo, hi = (0, BATCH) if world == 1 else [(0, 3), (3, 8)][rank]
    for step in range(1, 4):
        g = torch.Generator().manual_seed(step)
        x = torch.randn(BATCH, T, 3, generator=g)
        y = torch.stack([x.cumsum(1)[..., 0], x[..., 1] * x[..., 2]], -1)
        out = net(x[lo:hi])
        ssq = (out - y[lo:hi]).pow(2).sum()
        # root of the global mean square: every rank needs the whole sum before its own backward
        loss = (all_sum(ssq) / y.numel()).sqrt() / world
        grads = torch.autograd.grad(loss, list(net.parameters()))
        with torch.no_grad():
            for (n, p), gr in zip(net.named_parameters(), grads):
                gr = gr.clone()
                if world > 1:
                    reduce_(gr)
                if gr.dim() > 1 and not gr.is_complex():
                    gr = gr - gr.mean(dim=tuple(range(1, gr.dim())), keepdim=True)
                v = velocity.setdefault(n, torch.zeros_like(p))
                v.mul_(0.9).add_(gr)
                p -= 0.05 * v
        if rank == 0:
            print(f"step {step} loss {loss.item() * world:.7f}", flush=True)
    if args.save:
        torch.save(
            {n: p.detach().clone() for n, p in net.state_dict().items()}, os.path.join(args.save, f"rank{rank}.pt")
        )
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
