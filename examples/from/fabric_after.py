"""Train with Lightning Fabric: ``torchrun --nproc-per-node 2`` this script."""

from __future__ import annotations

import torch
from lightning_fabric import Fabric
from torch.utils.data import DataLoader
from yours import padded, your_model, your_rows

from meshwright import Layout
from meshwright.integrations.fabric import MeshwrightStrategy


def train(layout: Layout = Layout(dp_shard=2), rows: int = 2, steps: int = 20) -> list[float]:  # noqa: B008
    """Return the mean loss of each step."""
    strategy = MeshwrightStrategy(layout)
    fabric = Fabric(accelerator="cpu", devices=layout.world, strategy=strategy)
    fabric.launch()
    model = fabric.setup_module(your_model())
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=3e-3))
    loader = fabric.setup_dataloaders(DataLoader(your_rows(), batch_size=rows, collate_fn=padded))
    losses: list[float] = []
    while len(losses) < steps:
        total = torch.zeros(())
        for number, batch in enumerate(loader):
            is_last = number % 2 == 1
            with fabric.no_backward_sync(model, enabled=not is_last):
                loss = model(**batch).loss / 2
                fabric.backward(loss)
            total += loss.detach()
            if is_last:
                fabric.clip_gradients(model, optimizer, max_norm=0.5)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(float(fabric.all_reduce(total)))
                total = torch.zeros(())
    return losses[:steps]


if __name__ == "__main__":
    print(train())
