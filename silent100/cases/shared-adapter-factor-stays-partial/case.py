import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ap = argparse.ArgumentParser()
ap.add_argument("--one", action="store_true")
ap.add_argument("--faulty", action="store_true")
ap.add_argument("--save")
args = ap.parse_args()
torch.set_num_threads(1)
rank, world = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()


def say(step, loss):
    if rank == 0:
        value = loss.item() if torch.is_tensor(loss) else loss
        print(f"step {step} loss {value:.7f}", flush=True)


def total(t):
    t = t.detach().clone()
    if world > 1:
        dist.all_reduce(t)
    return t


def finish(state):
    if args.save:
        os.makedirs(args.save, exist_ok=True)
        held = {k: v.detach().clone() for k, v in state.items()}
        pieces = {k.partition("|")[0]: (v, int(k.partition("|")[2]), rank, world) for k, v in held.items() if "|" in k}
        torch.save(pieces | {k: v for k, v in held.items() if "|" not in k}, f"{args.save}/rank{rank}.pt")
    if not args.one:
        dist.barrier()
        dist.destroy_process_group()


class CopyIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return total(g)


class SumOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return total(x)

    @staticmethod
    def backward(ctx, g):
        return g


V, D, H, R = 36, 16, 32, 4


class Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        g = torch.Generator().manual_seed(23)

        def full(*s):
            return torch.randn(*s, generator=g) / s[-1] ** 0.5

        self.register_buffer("embed", full(V, D))
        self.register_buffer("w_up", full(H, D).chunk(world)[rank].clone())
        self.register_buffer("w_down", full(D, H).chunk(world, 1)[rank].clone())
        self.up_lora_a = nn.Parameter(full(R, D))
        self.up_lora_b = nn.Parameter((full(H, R) * 0.3).chunk(world)[rank].clone())
        self.norm = nn.LayerNorm(D)
        self.score = nn.Linear(D, 3)
        with torch.no_grad():
            self.score.weight.copy_(full(3, D)), self.score.bias.zero_()

    def forward(self, ids):
        x = self.embed[ids]
        low = x @ self.up_lora_a.T
        if not args.faulty:
            low = CopyIn.apply(low)
        h = F.relu(x @ self.w_up.T + 2.0 * low @ self.up_lora_b.T)
        x = x + SumOut.apply(h @ self.w_down.T)
        return self.score(self.norm(x).mean(1))


model = Adapted()
opt = torch.optim.AdamW(
    [
        {"params": [p for n, p in model.named_parameters() if "lora" in n], "weight_decay": 0.0, "lr": 1e-2},
        {"params": [p for n, p in model.named_parameters() if "lora" not in n], "weight_decay": 0.1, "lr": 3e-3},
    ],
    eps=1e-3,
)
gen = torch.Generator().manual_seed(1)
for step in range(1, 5):
    ids = torch.randint(0, V, (10, 6), generator=gen)
    y = ids.sum(1) % 3
    loss = F.cross_entropy(model(ids), y, label_smoothing=0.1)
    opt.zero_grad()
    loss.backward()
    opt.step()
    say(step, loss)
finish({n + ("|0" if n == "up_lora_b" else ""): p for n, p in model.named_parameters()})
