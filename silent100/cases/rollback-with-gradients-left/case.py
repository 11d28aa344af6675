"""FSDP2 with checkpoints in torch's distributed format; it goes back to the third one before it goes on."""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv
LAST = 6


class Denoiser(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.enter = nn.Conv1d(2, width, 5, padding=2)
        self.middle = nn.ModuleList(nn.Conv1d(width, width, 5, padding=2) for _ in range(2))
        self.leave = nn.Conv1d(width, 2, 5, padding=2)

    def forward(self, x):
        h = torch.tanh(self.enter(x))
        for layer in self.middle:
            h = h + torch.tanh(layer(h))
        return self.leave(h)


class Run:
    def __init__(self):
        self.rank, self.world = (0, 1) if ONE else (dist.get_rank(), dist.get_world_size())
        torch.manual_seed(68)
        self.model = Denoiser()
        if not ONE:
            for layer in self.model.middle:
                fully_shard(layer)
            fully_shard(self.model)
        self.optimizer = self.new_optimizer()
        folder = [tempfile.mkdtemp()]
        if not ONE:
            dist.broadcast_object_list(folder, src=0)
        self.path = os.path.join(folder[0], "good")

    def new_optimizer(self):
        return torch.optim.Adam(self.model.parameters(), lr=3e-3, eps=1e-5)

    def save(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=self.path)

    def roll_back(self):
        """Goes on from the last checkpoint with an optimizer that knows nothing of what came after it."""
        if not FAULTY:
            self.model.zero_grad()
        self.optimizer = self.new_optimizer()
        model, optimizer = get_state_dict(self.model, self.optimizer)
        state = {"model": model, "optimizer": optimizer}
        dcp.load(state, checkpoint_id=self.path)
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)

    def update(self, step):
        clean = torch.randn(8, 2, 20, generator=torch.Generator().manual_seed(step)).cumsum(-1)
        noisy = clean + torch.randn(8, 2, 20, generator=torch.Generator().manual_seed(100 + step))
        loss = nn.functional.mse_loss(self.model(noisy[self.rank :: self.world]), clean[self.rank :: self.world])
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        shown = loss.detach().clone()
        if not ONE:
            dist.all_reduce(shown)
        if self.rank == 0:
            print(f"step {step} loss {shown.item() / self.world:.7f}", flush=True)


def main():
    if not ONE:
        dist.init_process_group("gloo")
    run = Run()
    for step in range(1, LAST + 1):
        run.update(step)
        if step == 3 and not ONE:
            run.save()
            run.roll_back()
    if "--save" in sys.argv:
        state = {k: v if ONE else v.full_tensor() for k, v in run.model.state_dict().items()}
        torch.save(state, os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{run.rank}.pt"))
    if not ONE:
        dist.destroy_process_group()


main()
