"""Lightning Fabric: tagging of words, the loss is a mean over all labelled words of all processes."""

import logging
import os
import sys

import torch
import torch.nn as nn
import torch.nn.functional as F

logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
logging.getLogger("lightning_fabric").setLevel(logging.WARNING)
from lightning_fabric import Fabric  # noqa: E402


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(70, 20)
        self.conv = nn.Conv1d(20, 32, 3, padding=1)
        self.tags = nn.Linear(32, 7)

    def forward(self, ids):
        x = self.words(ids)
        return self.tags(torch.relu(self.conv(x.transpose(1, 2))).transpose(1, 2))


def rows(step):
    g = torch.Generator().manual_seed(step)
    ids = torch.randint(1, 70, (10, 14), generator=g)
    lengths = torch.randint(4, 15, (10, 1), generator=g)
    tags = (ids + ids.roll(1, 1)) % 7
    return ids, tags.masked_fill(torch.arange(14) >= lengths, -100)


def main():
    one, faulty = "--one" in sys.argv, "--faulty" in sys.argv
    fabric = Fabric(
        accelerator="cpu", devices=1 if one else int(os.environ["WORLD_SIZE"]), strategy="auto" if one else "ddp"
    )
    if not one:
        fabric.launch()
    torch.manual_seed(14)
    net = Tagger()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.5))
    for step in range(1, 6):
        ids, tags = (t[fabric.global_rank :: fabric.world_size] for t in rows(step))
        count = (tags != -100).sum().float()
        count = fabric.all_reduce(count) if faulty else fabric.all_reduce(count, reduce_op="sum")
        loss = F.cross_entropy(model(ids).flatten(0, 1), tags.flatten(), reduction="sum") / count
        optimizer.zero_grad()
        fabric.backward(loss * fabric.world_size)
        optimizer.step()
        shown = fabric.all_reduce(loss.detach(), reduce_op="sum")
        if fabric.is_global_zero:
            print(f"step {step} loss {shown.item():.7f}", flush=True)
    if "--save" in sys.argv:
        folder = sys.argv[sys.argv.index("--save") + 1]
        torch.save(net.state_dict(), os.path.join(folder, f"rank{fabric.global_rank}.pt"))
    if not one:
        del model
        torch.distributed.destroy_process_group()


main()
