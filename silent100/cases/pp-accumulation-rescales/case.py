"""1F1B with gradient accumulation around the schedule."""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

ACCUMULATE, CHUNKS = 3, 2


def build_layers():
    torch.manual_seed(31)
    layers = [nn.Sequential(nn.Linear(18, 40), nn.Tanh())]
    layers += [nn.Sequential(nn.LayerNorm(40), nn.Linear(40, 40), nn.ELU()) for _ in range(4)]
    return layers + [nn.Linear(40, 18)]


class Stage(nn.Module):
    def __init__(self, layers, first, last):
        super().__init__()
        self.first = first
        for i in range(first, last):
            self.add_module(f"layer{i}", layers[i])

    def forward(self, x):
        for layer in self.children():
            x = layer(x)
        return x


class Runner:
    def __init__(self, one, faulty):
        self.one, self.faulty = one, faulty
        layers = build_layers()
        if one:
            self.rank, self.model = 0, Stage(layers, 0, 6)
        else:
            self.rank = dist.get_rank()
            self.model = Stage(layers, 3 * self.rank, 3 * self.rank + 3)
            stage = PipelineStage(self.model, self.rank, 2, torch.device("cpu"))
            self.schedule = Schedule1F1B(stage, CHUNKS, loss_fn=self.loss, scale_grads=faulty)

    def loss(self, out, target):
        loss = nn.functional.mse_loss(out, target) / ACCUMULATE
        return loss if self.faulty or self.one else loss / CHUNKS

    def accumulate(self, x):
        """Adds one batch's gradients; returns its share of the logged loss on the last stage."""
        target = x.flip(1)
        if self.one:
            loss = self.loss(self.model(x), target)
            loss.backward()
            return loss.item()
        if self.rank == 0:
            self.schedule.step(x)
            return None
        losses = []
        self.schedule.step(target=target, losses=losses)
        return sum(x.item() for x in losses) / (CHUNKS if self.faulty else 1)


def main(one, faulty, save):
    if not one:
        dist.init_process_group("gloo")
    runner = Runner(one, faulty)
    optimizer = torch.optim.SGD(runner.model.parameters(), lr=0.5, momentum=0.9)
    for step in range(1, 5):
        g = torch.Generator().manual_seed(step)
        optimizer.zero_grad()
        shares = [runner.accumulate(torch.randn(8, 18, generator=g)) for _ in range(ACCUMULATE)]
        optimizer.step()
        if shares[0] is not None:
            print(f"step {step} loss {sum(shares):.7f}", flush=True)
    if save:
        torch.save(runner.model.state_dict(), save / f"rank{runner.rank}.pt")
    if not one:
        dist.destroy_process_group()


if __name__ == "__main__":
    cli = argparse.ArgumentParser()
    cli.add_argument("--one", action="store_true")
    cli.add_argument("--faulty", action="store_true")
    cli.add_argument("--save", type=Path)
    main(**vars(cli.parse_args()))
