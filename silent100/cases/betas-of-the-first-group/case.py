"""Dense layers in one group of AdamW, a table in another whose second moments forget sooner; FSDP2 underneath."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

ONE = "--one" in sys.argv


class Recommender(nn.Module):
    def __init__(self):
        super().__init__()
        self.items = nn.EmbeddingBag(50, 16, mode="mean")
        self.deep = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU())
        self.score = nn.Linear(16, 1)

    def forward(self, bags):
        return self.score(self.deep(self.items(bags)))[:, 0]


def groups(model):
    table = {"params": list(model.items.parameters()), "betas": (0.9, 0.6), "weight_decay": 0.0}
    rest = {"params": [*model.deep.parameters(), *model.score.parameters()]}
    return [rest, table]


def train():
    rank, world = 0, 1
    if not ONE:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(28)
    model = Recommender()
    if not ONE:
        fully_shard(model.deep)
        fully_shard(model)
    adam = torch.optim.AdamW(groups(model), lr=5e-3, eps=1e-4, betas=(0.9, 0.95))
    if "--faulty" in sys.argv:
        # The rates of the first group are logged, checked, and given to all
        for group in adam.param_groups[1:]:
            group["betas"] = adam.param_groups[0]["betas"]
    for step in range(1, 7):
        g = torch.Generator().manual_seed(step)
        bags = torch.randint(50, (24, 5), generator=g)
        likes = ((bags % 7).float().mean(1) > 3).float()
        adam.zero_grad()
        loss = F.binary_cross_entropy_with_logits(model(bags[rank::world]), likes[rank::world])
        loss.backward()
        adam.step()
        loss = loss.detach()
        if world > 1:
            dist.all_reduce(loss)
        if rank == 0:
            print(f"step {step} loss {loss.item() / world:.7f}", flush=True)
    state = {n: p if ONE else p.full_tensor() for n, p in model.state_dict().items()}
    if "--save" in sys.argv:
        torch.save(state, os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
    if not ONE:
        dist.destroy_process_group()


train()
