"""ZeRO-1 by hand: all parameters in one padded vector, of which each rank updates a third."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

ONE = "--one" in sys.argv


class Adam:
    def __init__(self, size, lr):
        self.m, self.v, self.t, self.lr = torch.zeros(size), torch.zeros(size), 0, lr

    def update(self, w, g):
        self.t += 1
        self.m = 0.9 * self.m + 0.1 * g
        self.v = 0.99 * self.v + 0.01 * g * g
        return w - self.lr * (self.m / (1 - 0.9**self.t)) / ((self.v / (1 - 0.99**self.t)).sqrt() + 1e-2)


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(13, 31), nn.ELU(), nn.Linear(31, 17), nn.ELU(), nn.Linear(17, 1))


def main():
    rank, world = 0, 1
    if not ONE:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    model = make_model()
    numbers = sum(p.numel() for p in model.parameters())
    size = -(-numbers // (64 * world)) * 64
    adam = Adam(numbers if ONE else size, 0.01)
    for step in range(1, 6):
        g = torch.Generator().manual_seed(step)
        x = torch.randn(18, 13, generator=g)
        y = x[:, :3].prod(1, keepdim=True)
        if not ONE:
            x, y = x.tensor_split(world)[rank], y.tensor_split(world)[rank]
        loss = (model(x) - y).square().mean()
        model.zero_grad()
        loss.backward()
        w = parameters_to_vector(model.parameters()).detach()
        grad = parameters_to_vector([p.grad for p in model.parameters()])
        shown = loss.detach().clone()
        if ONE:
            new = adam.update(w, grad)
        else:
            grad = nn.functional.pad(grad, (0, size * world - numbers))
            w = nn.functional.pad(w, (0, size * world - numbers))
            own = grad.chunk(world)[rank].clone()
            pieces = [piece.contiguous() for piece in grad.chunk(world)]
            dist.reduce_scatter(own, pieces)
            gathered = [torch.empty(size) for _ in range(world)]
            dist.all_gather(gathered, adam.update(w.chunk(world)[rank], own / world))
            new = torch.cat(gathered)[:numbers]
            dist.all_reduce(shown)
        vector_to_parameters(new, model.parameters())
        if rank == 0:
            print(f"step {step} loss {shown.item() / world:.7f}", flush=True)
    if "--save" in sys.argv:
        torch.save(model.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
    if not ONE:
        dist.destroy_process_group()


main()
