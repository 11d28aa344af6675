# ZeRO-1 over flat pieces. A job is stopped after three updates: pieces are merged, cut again and read by a new job.
import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv


def build():
    torch.manual_seed(564)
    return nn.Sequential(
        nn.Conv1d(2, 12, 3), nn.ELU(), nn.Conv1d(12, 12, 3, stride=2), nn.ELU(), nn.Flatten(), nn.Linear(72, 5)
    )


class Job:
    def __init__(self, rank, world):
        self.rank, self.world, self.model = rank, world, build()
        self.size = -(-sum(p.numel() for p in self.model.parameters()) // world)
        self.piece = nn.Parameter(self.cut(parameters_to_vector(self.model.parameters()).detach()))
        self.adamw = torch.optim.AdamW([self.piece], lr=3e-3, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.05)

    def cut(self, vector):
        padded = nn.functional.pad(vector, (0, self.size * self.world - len(vector)))
        return padded.chunk(self.world)[self.rank].clone()

    def join(self, piece):
        pieces = [piece]
        if self.world > 1:
            pieces = [torch.empty_like(piece) for _ in range(self.world)]
            dist.all_gather(pieces, piece.contiguous())
        return torch.cat(pieces)[: sum(p.numel() for p in self.model.parameters())]

    def step(self):
        grads = parameters_to_vector([p.grad for p in self.model.parameters()])
        if self.world > 1:
            dist.all_reduce(grads)
        self.piece.grad = self.cut(grads / self.world)
        self.adamw.step()
        vector_to_parameters(self.join(self.piece.detach()), self.model.parameters())

    def save(self, file):
        """Merges the pieces of everything that the optimizer keeps for them."""
        merged = {}
        for name, value in self.adamw.state[self.piece].items():
            merged[name] = self.join(value) if value.ndim else value
        if self.rank == 0:
            torch.save({"model": self.model.state_dict(), "state": merged}, file)
        if self.world > 1:
            dist.barrier()

    def load(self, file):
        read = torch.load(file)
        self.model.load_state_dict(read["model"])
        self.piece.data = self.cut(parameters_to_vector(self.model.parameters()).detach())
        state = {"step": torch.tensor(0.0)}
        for name, value in read["state"].items():
            if value.ndim:
                state[name] = self.cut(value)
            elif not FAULTY:
                state[name] = value
        self.adamw.state[self.piece] = state


def main():
    rank, world = 0, 1
    if not ONE:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    job = Job(rank, world)
    for step in range(1, 7):
        if step == 4 and world > 1:
            folder = [tempfile.mkdtemp()]
            dist.broadcast_object_list(folder)
            job.save(os.path.join(folder[0], "3.pt"))
            job = Job(rank, world)
            job.load(os.path.join(folder[0], "3.pt"))
        g = torch.Generator().manual_seed(step)
        x = torch.randn(12, 2, 16, generator=g)
        y = x[:, 0, :5].argmax(1)
        loss = nn.functional.cross_entropy(job.model(x.chunk(world)[rank]), y.chunk(world)[rank])
        job.model.zero_grad()
        loss.backward()
        job.step()
        loss = loss.detach()
        if world > 1:
            dist.all_reduce(loss)
        if rank == 0:
            print(f"step {step} loss {loss.item() / world:.7f}", flush=True)
    if "--save" in sys.argv:
        torch.save(job.model.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
    if world > 1:
        dist.destroy_process_group()


main()
