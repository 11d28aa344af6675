"""Train a ViT of transformers in a loop of one's own: ``torchrun --nproc-per-node 2 examples/vit_loop.py``.

The batch has no tokens: rows are images. Without ``loss_fn``, the loss is the cross entropy of logits and labels.
"""

from __future__ import annotations

import torch
from transformers import ViTConfig, ViTForImageClassification

from meshwright import Layout, parallelize
from meshwright.distributed import destroy_distributed, get_world_info

CLASSES = 3


def images(step: int, rank: int, rows: int, size: int) -> dict[str, torch.Tensor]:
    """Noise in which one colour is brighter, by which the class can be told: this rank's rows of a step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    labels = torch.randint(0, CLASSES, (rows,), generator=generator)
    pixels = torch.randn(rows, 3, size, size, generator=generator)
    pixels[torch.arange(rows), labels] += 1.0
    return {"pixel_values": pixels, "labels": labels}


def train(steps: int = 50, rows: int = 16, size: int = 32, width: int = 64, layers: int = 4) -> list[float]:
    """Return the loss of each step: the mean over the images of all ranks."""
    config = ViTConfig(
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        image_size=size,
        patch_size=size // 4,
        num_labels=CLASSES,
    )
    model = parallelize(lambda: ViTForImageClassification(config), Layout(dp_shard=-1), microbatch_rows=rows // 2)
    optimizer = torch.optim.AdamW(model.make_parameter_groups(), lr=1e-3)
    rank, losses = get_world_info()[0], []
    for step in range(steps):
        loss = model.forward_backward(images(step, rank, rows, size))
        model.optimizer_step(optimizer, max_norm=1.0)
        losses.append(float(loss))
        if rank == 0:
            print(f"step {step + 1} · loss {losses[-1]:.4f} over {loss.tokens} images")
    return losses


if __name__ == "__main__":
    train()
    destroy_distributed()
