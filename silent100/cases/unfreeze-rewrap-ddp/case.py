import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

ONE = "--one" in sys.argv
SAVE = sys.argv[sys.argv.index("--save") + 1] if "--save" in sys.argv else None
RANK = int(os.environ.get("RANK", 0))
WORLD = 1 if ONE else int(os.environ["WORLD_SIZE"])
if not ONE:
    dist.init_process_group("gloo")


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv1d(6, 16, 3, padding=1), nn.GELU(), nn.Conv1d(16, 16, 3, padding=1), nn.GELU()
        )
        self.head = nn.Linear(16, 7)

    def forward(self, x):
        return self.head(self.backbone(x).mean(-1))


torch.manual_seed(1234)
model = Tagger()
model.backbone.requires_grad_(False)
train = model if ONE else DDP(model)
opt = torch.optim.Adam(model.head.parameters(), lr=3e-2)
X = torch.randn(96, 6, 20)
Y = torch.randint(0, 7, (96,))
perm = torch.randperm(96)

for step in range(1, 7):
    if step == 3:
        model.backbone.requires_grad_(True)
        opt.add_param_group({"params": list(model.backbone.parameters()), "lr": 5e-3})
        if not ONE:
            train = DDP(model)
    rows = perm[(step - 1) * 16 : step * 16][RANK::WORLD]
    loss = nn.functional.cross_entropy(train(X[rows]), Y[rows])
    opt.zero_grad(set_to_none=True)
    loss.backward()
    opt.step()
    shown = loss.detach()
    if not ONE:
        dist.all_reduce(shown)
        shown /= WORLD
    if RANK == 0:
        print(f"step {step} loss {shown.item():.7f}", flush=True)

if SAVE:
    torch.save(model.state_dict(), os.path.join(SAVE, f"rank{RANK}.pt"))
if not ONE:
    dist.destroy_process_group()
