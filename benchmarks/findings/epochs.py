"""Train with accelerate's prepared loader and scheduler, eight rows a step: ``epochs.py last|schedule|shuffle``.

``last`` has 14 rows an epoch, ``schedule`` a rate that falls each step, ``shuffle`` another order each epoch.
"""

import os
import sys

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

what = sys.argv[1]
accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
rows = torch.randint(64, (14 if what == "last" else 32, 17), generator=torch.Generator().manual_seed(1))
loader = DataLoader(list(rows), batch_size=8 // int(os.environ.get("WORLD_SIZE", 1)), shuffle=what == "shuffle")
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step) if what == "schedule" else 1)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
for _ in range(2):
    for batch in loader:
        accelerator.backward(F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
accelerator.end_training()
