import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--save")
args = cli.parse_args()


class Corpus(torch.utils.data.Dataset):
    def __init__(self, rows=64):
        g = torch.Generator().manual_seed(1)
        self.x = torch.randint(0, 40, (rows, 10), generator=g)
        self.y = torch.randint(0, 6, (rows,), generator=g)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class GlobalBatches:
    """Yields this rank's rows of each global batch; every rank permutes each batch in the same way."""

    def __init__(self, rows, size, rank, world):
        self.rows, self.size, self.rank, self.world = rows, size, rank, world

    def __iter__(self):
        order = torch.randperm(self.rows, generator=torch.Generator().manual_seed(7))
        for number, batch in enumerate(order.split(self.size)):
            if self.world > 1:
                batch = batch[torch.randperm(len(batch), generator=torch.Generator().manual_seed(number))]
            yield batch[self.rank :: self.world].tolist()

    def __len__(self):
        return self.rows // self.size


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(40, 26, mode="mean")
        self.layers = nn.ModuleList(nn.Linear(26, 26) for _ in range(3))
        self.out = nn.Linear(26, 6)

    def forward(self, x):
        x = self.bag(x)
        for layer in self.layers:
            x = x + F.softsign(layer(x))
        return self.out(x)


rank, world = 0, 1
torch.manual_seed(88)
model = Bag()
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
loader = torch.utils.data.DataLoader(Corpus(), batch_sampler=GlobalBatches(64, 16, rank, world))
for step, (x, y) in enumerate(loader, 1):
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    shown = loss.detach()
    if world > 1:
        dist.all_reduce(shown)
    if rank == 0:
        print(f"step {step} loss {shown.item() / world:.7f}", flush=True)
if args.save:
    state = {k: v if args.one else v.full_tensor() for k, v in model.state_dict().items()}
    torch.save(state, os.path.join(args.save, f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
