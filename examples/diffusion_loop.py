"""Train a small diffusion transformer with conditions: ``torchrun --nproc-per-node 2 examples/diffusion_loop.py``.

The loss is a mean, and reads outputs and batch: ``Loss`` declares it. Weights are averaged as they are trained.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from meshwright import Layout, Loss, parallelize
from meshwright.distributed import destroy_distributed, get_world_info

CLASSES, PIXELS = 4, 16


class Block(nn.Module):
    """Attention and MLP, modulated by a condition (arXiv 2212.09748)."""

    def __init__(self, dim: int):
        super().__init__()
        self.norm = nn.LayerNorm(dim, elementwise_affine=False)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.modulation = nn.Linear(dim, 6 * dim)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:  # (rows, patches, dim), (rows, dim)
        a, b, gate, c, d, gate_2 = self.modulation(F.silu(condition)).unsqueeze(1).chunk(6, -1)
        q, k, v = self.qkv(self.norm(x) * (1 + a) + b).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        x = x + gate * self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + gate_2 * self.mlp(self.norm(x) * (1 + c) + d)


class Denoiser(nn.Module):
    """Noisy patches, the share of noise and a class -> the noise."""

    def __init__(self, dim: int, layers: int):
        super().__init__()
        self.patch, self.time, self.label = nn.Linear(PIXELS, dim), nn.Linear(1, dim), nn.Embedding(CLASSES, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(layers))
        self.out = nn.Linear(dim, PIXELS)

    def forward(self, patches: Tensor, timesteps: Tensor, classes: Tensor) -> Tensor:
        x, condition = self.patch(patches), self.time(timesteps[:, None]) + self.label(classes)
        for block in self.blocks:
            x = block(x, condition)
        return self.out(x)


def noisy(step: int, rank: int, rows: int) -> dict[str, Tensor]:
    """This rank's rows of a step: patches of a class have its value, and noise is added here, not in the forward."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    classes = torch.randint(0, CLASSES, (rows,), generator=generator)
    noise = torch.randn(rows, 9, PIXELS, generator=generator)
    timesteps = torch.rand(rows, generator=generator)
    share = timesteps[:, None, None]
    clean = (classes - 1.5)[:, None, None].expand_as(noise)
    return {"patches": (1 - share) * clean + share * noise, "timesteps": timesteps, "classes": classes, "noise": noise}


def train(steps: int = 100, rows: int = 32, dim: int = 64, layers: int = 3) -> tuple[list[float], float]:
    """Return the loss of each step, and that of the averaged weights on rows that were not trained."""
    loss_fn = Loss(lambda noise, batch: F.mse_loss(noise, batch["noise"]), reduction="mean")
    model = parallelize(lambda: Denoiser(dim, layers), Layout(dp_shard=-1), loss_fn=loss_fn)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    rank, losses = get_world_info()[0], []
    for step in range(steps):
        losses.append(float(model.forward_backward(noisy(step, rank, rows))))
        model.optimizer_step(optimizer, max_norm=1.0)
        average.update_parameters(model)
    with average.module.lent():
        averaged = float(model.evaluate(noisy(10**6, rank, rows)))
    if rank == 0:
        print(f"{steps} steps · loss {losses[0]:.4f} to {losses[-1]:.4f} · averaged weights {averaged:.4f}")
    return losses, averaged


if __name__ == "__main__":
    train()
    destroy_distributed()
