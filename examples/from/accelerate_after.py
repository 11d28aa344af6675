"""Train with accelerate: ``torchrun --nproc-per-node 2`` this script."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from yours import padded, your_model, your_rows

from meshwright import Layout
from meshwright.integrations.accelerate import lay_out, step_batch


def train(layout: Layout = Layout(dp_shard=2), rows: int = 4, steps: int = 20) -> list[float]:  # noqa: B008
    """Return the mean loss of each step."""
    accelerator = Accelerator(cpu=True)
    loader = DataLoader(your_rows(shortest=12, longest=12), batch_size=rows, collate_fn=padded)
    model, loader = lay_out(accelerator, your_model(), loader, layout=layout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses: list[float] = []
    while len(losses) < steps:
        for batch in loader:
            loss = model.forward_backward(step_batch(batch))
            model.optimizer_step(optimizer, max_norm=0.5)
            losses.append(float(loss))
    return losses[:steps]


if __name__ == "__main__":
    print(train())
