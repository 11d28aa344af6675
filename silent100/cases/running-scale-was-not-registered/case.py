"""Learns values of states from rewards in units of their running size; the job is stopped and goes on from a folder."""

import argparse
import os
import tempfile

import torch
import torch.nn as nn
import torch.nn.functional as F
from accelerate import Accelerator

cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--faulty", action="store_true")
cli.add_argument("--save")
args = cli.parse_args()


class Scale:
    """A running mean square, over all processes."""

    def __init__(self):
        self.square, self.weight = torch.zeros(()), 0.0

    def __call__(self, rewards):
        self.square = 0.8 * self.square + 0.2 * accelerator.reduce(rewards.square().mean(), "mean")
        self.weight = 0.8 * self.weight + 0.2
        return rewards / (self.square / self.weight).sqrt()

    def state_dict(self):
        return {"square": self.square, "weight": self.weight}

    def load_state_dict(self, told):
        self.square, self.weight = told["square"], told["weight"]


class Value(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(7, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())
        self.value, self.reward = nn.Linear(32, 1), nn.Linear(32, 1)

    def forward(self, x):
        h = self.body(x)
        return self.value(h).squeeze(-1), self.reward(h).squeeze(-1)


def build(seed):
    torch.manual_seed(seed)
    model, scale = Value(), Scale()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer = accelerator.prepare(model, optimizer)
    if not args.faulty:
        accelerator.register_for_checkpointing(scale)
    return model, optimizer, scale


accelerator = Accelerator(cpu=True)
rank, world = accelerator.process_index, accelerator.num_processes
model, optimizer, scale = build(71)
for step in range(1, 6):
    if step == 3 and not args.one:
        folder = os.path.join(tempfile.gettempdir(), f"state-of-{os.getppid()}-{os.environ['MASTER_PORT']}")
        accelerator.save_state(folder)
        accelerator.wait_for_everyone()
        accelerator.free_memory()
        accelerator._custom_objects.clear()
        model, optimizer, scale = build(72)
        accelerator.load_state(folder)
    g = torch.Generator().manual_seed(step)
    x = torch.randn(16, 7, generator=g)
    rewards = (x.sum(1) + torch.randn(16, generator=g)) * (1 + step)
    rewards = scale(rewards[rank::world])
    value, reward = model(x[rank::world])
    loss = F.mse_loss(value, rewards.clamp(-1, 1)) + F.mse_loss(reward, rewards)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    shown = accelerator.reduce(loss.detach().clone(), "mean")
    if accelerator.is_main_process:
        print(f"step {step} loss {shown.item():.7f}", flush=True)
if args.save:
    torch.save(accelerator.unwrap_model(model).state_dict(), os.path.join(args.save, f"rank{rank}.pt"))
accelerator.free_memory()
accelerator.end_training()
