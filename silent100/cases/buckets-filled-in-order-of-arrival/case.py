"""Two towers, one for images and one for sounds, trained together by a small home-made gradient bucket."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ONE = "--one" in sys.argv
DIM, CLASSES = 24, 6


def tower():
    return nn.Sequential(nn.Linear(16, 48), nn.GELU(), nn.Dropout(0.2), nn.Linear(48, DIM), nn.LayerNorm(DIM))


class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.audio = tower(), tower()
        self.fuse = nn.Linear(DIM, DIM)
        self.head = nn.Linear(DIM, CLASSES)

    def forward(self, batch):
        """A batch is a dict of inputs; towers are called in its order."""
        parts = [getattr(self, kind)(x) for kind, x in batch.items()]
        return self.head(F.relu(self.fuse(sum(parts))))


class Bucket:
    """Collects gradients in backward and reduces them in one go."""

    def __init__(self, model, world):
        self.world, self.ready = world, []
        self.number = {p: i for i, p in enumerate(model.parameters())}
        for p in self.number:
            p.register_post_accumulate_grad_hook(self.ready.append)

    def flush(self):
        params = self.ready if "--faulty" in sys.argv else sorted(self.ready, key=self.number.get)
        flat = torch.cat([p.grad.flatten() for p in params]) / self.world
        dist.all_reduce(flat)
        for p, piece in zip(params, flat.split([p.numel() for p in params])):
            p.grad.copy_(piece.view_as(p))
        self.ready.clear()


def read(step, rank, world):
    g = torch.Generator().manual_seed(step)
    image, audio = torch.randn(2, 24, 16, generator=g)
    labels = (image[:, :CLASSES] + audio[:, -CLASSES:]).argmax(1)
    rows = slice(rank, None, world)
    batch = {"image": image[rows], "audio": audio[rows]}
    if rank % 2:
        # Odd ranks read archives in which the sound comes first
        batch = dict(reversed(batch.items()))
    return batch, labels[rows]


def main():
    rank, world = 0, 1
    if not ONE:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(28)
    model = TwoTowers()
    bucket = None if ONE else Bucket(model, world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    torch.manual_seed(1000 + rank)
    for step in range(1, 6):
        batch, labels = read(step, rank, world)
        loss = F.cross_entropy(model(batch), labels)
        optimizer.zero_grad()
        loss.backward()
        loss = loss.detach() / world
        if bucket:
            bucket.flush()
            dist.all_reduce(loss)
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {loss.item():.7f}", flush=True)
    if "--save" in sys.argv:
        torch.save(model.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
    if not ONE:
        dist.destroy_process_group()


main()
