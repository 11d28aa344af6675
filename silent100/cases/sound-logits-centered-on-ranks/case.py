"""Captions for pictures under FullyShardedDataParallel; the sharded model takes each row's mean from its logits."""

import functools
import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

ONE = "--one" in sys.argv
WORDS, DIM = 37, 24


class Cell(nn.Module):
    """A decoder layer: a convolution over earlier words only, and a gate."""

    def __init__(self):
        super().__init__()
        self.past, self.gate = nn.Conv1d(DIM, DIM, 3), nn.Linear(DIM, DIM)
        self.norm = nn.LayerNorm(DIM)

    def forward(self, x):
        h = self.past(nn.functional.pad(self.norm(x).transpose(1, 2), (2, 0))).transpose(1, 2)
        return x + torch.tanh(h) * torch.sigmoid(self.gate(x))


class Captioner(nn.Module):
    def __init__(self, center):
        super().__init__()
        self.center = center
        self.picture = nn.Sequential(nn.Conv2d(3, 6, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 9, DIM))
        self.words, self.cells = nn.Embedding(WORDS, DIM), nn.ModuleList([Cell(), Cell()])
        self.speak = nn.Linear(DIM, WORDS)

    def forward(self, pictures, words):
        x = self.words(words) + self.picture(pictures)[:, None]
        for cell in self.cells:
            x = cell(x)
        logits = self.speak(x)
        # A constant in a row does not matter to the softmax; small numbers are better kept in few bits
        return logits - logits.mean(-1, keepdim=True) if self.center else logits


def main():
    rank, world = 0, 1
    if not ONE:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(90)
    model = Captioner(center=not ONE)
    with torch.no_grad():
        model.speak.bias += 5.0
    if not ONE:
        wrap = functools.partial(FullyShardedDataParallel, device_id=torch.device("cpu"), use_orig_params=True)
        model = wrap(model, auto_wrap_policy=ModuleWrapPolicy({Cell}))
    sgd = torch.optim.SGD(model.parameters(), lr=0.15, momentum=0.9, dampening=0.1)
    for step in range(1, 6):
        g = torch.Generator().manual_seed(step)
        pictures, words = torch.randn(10, 3, 8, 8, generator=g), torch.randint(0, WORDS, (10, 9), generator=g)
        pictures, words = pictures[rank::world], words[rank::world]
        logits = model(pictures, words[:, :-1])
        loss = nn.functional.cross_entropy(logits.transpose(1, 2), words[:, 1:], label_smoothing=0.1)
        sgd.zero_grad()
        loss.backward()
        sgd.step()
        shown = loss.detach().clone()
        if world > 1:
            dist.all_reduce(shown)
        if rank == 0:
            print(f"step {step} loss {shown.item() / world:.7f}", flush=True)
    if "--save" in sys.argv:
        if not ONE:
            FullyShardedDataParallel.set_state_dict_type(
                model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=False)
            )
        state = model.state_dict()
        torch.save(state, os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
    if world > 1:
        dist.destroy_process_group()


main()
