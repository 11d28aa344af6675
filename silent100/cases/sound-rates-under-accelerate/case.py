"""The usual accelerate loop with split batches and a linear warm-up."""

import argparse
import os

import torch
import torch.nn as nn
import torch.nn.functional as F

cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--save")
args = cli.parse_args()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.EmbeddingBag(70, 30, mode="sum")
        self.body = nn.Sequential(nn.LayerNorm(30), nn.Linear(30, 60), nn.GELU(), nn.Linear(60, 5))

    def forward(self, ids, weights):
        return self.body(self.embed(ids, per_sample_weights=weights))


def dataset(rows=48):
    g = torch.Generator().manual_seed(3)
    ids, weights = torch.randint(0, 70, (rows, 8), generator=g), torch.rand(rows, 8, generator=g)
    return torch.utils.data.TensorDataset(ids, weights, torch.randint(0, 5, (rows,), generator=g))


torch.manual_seed(83)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, eps=1e-4)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))
loader = torch.utils.data.DataLoader(dataset(), batch_size=12, shuffle=False)
rank = 0
if args.one:
    clip, backward, total = nn.utils.clip_grad_norm_, torch.Tensor.backward, lambda x: x
else:
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=True))
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    clip, backward = accelerator.clip_grad_norm_, accelerator.backward
    rank = accelerator.process_index

    def total(loss):
        return accelerator.reduce(loss, "mean")


for step, (ids, weights, labels) in enumerate(loader, 1):
    loss = F.cross_entropy(model(ids, weights), labels)
    optimizer.zero_grad()
    backward(loss)
    clip(model.parameters(), 50.0)
    optimizer.step()
    scheduler.step()
    shown = total(loss.detach().clone())
    if rank == 0:
        print(f"step {step} loss {shown.item():.7f}", flush=True)
if args.save:
    plain = model if args.one else accelerator.unwrap_model(model)
    torch.save(plain.state_dict(), os.path.join(args.save, f"rank{rank}.pt"))
if not args.one:
    accelerator.end_training()
