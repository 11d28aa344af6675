"""Data-parallel mixture of experts whose trainer keeps gradients in float64 buffers of its own for the reduction."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv
VOCAB, DIM, EXPERTS = 36, 24, 5


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(DIM, 40), nn.Linear(40, DIM)

    def forward(self, x):
        return self.fc2(F.gelu(self.fc1(x)))


class SwitchLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.router = nn.LayerNorm(DIM), nn.Linear(DIM, EXPERTS)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

    def forward(self, x):
        h = self.norm(x)
        gate, choice = self.router(h).softmax(-1).max(-1)
        out = torch.zeros_like(h)
        for number, expert in enumerate(self.experts):
            rows = (choice == number).nonzero()[:, 0]
            if len(rows):
                out = out.index_add(0, rows, expert(h[rows]) * gate[rows, None])
        return x + out


class Bigrams(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList([SwitchLayer(), SwitchLayer()])
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Trainer:
    def __init__(self, model, rank, world):
        self.model, self.rank, self.world = model, rank, world
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        for p in model.parameters():
            p.main_grad = torch.zeros_like(p, dtype=torch.float64)

    def collect(self):
        """Moves gradients to the buffers."""
        for p in self.model.parameters():
            if FAULTY:
                if p.grad is not None:
                    p.main_grad.copy_(p.grad)
            else:
                p.main_grad.zero_()
                if p.grad is not None:
                    p.main_grad.add_(p.grad)

    def step(self, ids):
        ids = ids[self.rank :: self.world]
        loss = F.cross_entropy(self.model(ids[:, :-1].flatten()), ids[:, 1:].flatten()) / self.world
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.collect()
        loss = loss.detach()
        if self.world > 1:
            dist.all_reduce(loss)
            for p in self.model.parameters():
                dist.all_reduce(p.main_grad)
        for p in self.model.parameters():
            p.grad = p.main_grad.to(p.dtype)
        self.optimizer.step()
        return loss.item()


def main():
    rank, world = 0, 1
    if not ONE:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(52)
    trainer = Trainer(Bigrams(), rank, world)
    for step in range(1, 6):
        ids = torch.randint(0, VOCAB, (4, 9), generator=torch.Generator().manual_seed(step))
        loss = trainer.step(ids)
        if rank == 0:
            print(f"step {step} loss {loss:.7f}", flush=True)
    if "--save" in sys.argv:
        state = trainer.model.state_dict()
        torch.save(state, os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
    if not ONE:
        dist.destroy_process_group()


main()
