import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ap = argparse.ArgumentParser()
ap.add_argument("--one", action="store_true")
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
        torch.save({k: v.detach().clone() for k, v in state.items()}, f"{args.save}/rank{rank}.pt")
    if not args.one:
        dist.barrier()
        dist.destroy_process_group()


torch.manual_seed(218)
V, D = 30, 16


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.rnn, self.head = nn.Embedding(V, D), nn.Linear(2 * D, D), nn.Linear(D, V)

    def forward(self, ids):
        x = self.embed(ids)
        h, out = torch.zeros_like(x[:, 0]), []
        for t in range(ids.shape[1]):
            h = torch.tanh(self.rnn(torch.cat([x[:, t], h], -1)))
            out.append(h)
        return self.head(torch.stack(out, 1))


model = LM()
master = {n: p.detach().clone() for n, p in model.named_parameters()}  # float32
model.bfloat16()
velocity = {n: torch.zeros_like(m) for n, m in master.items()}
gen = torch.Generator().manual_seed(18)
MICRO = 2  # gradients leave bfloat16 after every microbatch and add up in float32
for step in range(1, 5):
    ids = torch.randint(0, V, (8, 8), generator=gen)
    acc = {n: torch.zeros_like(m) for n, m in master.items()}
    shown = torch.zeros(())
    for rows in ids.chunk(world)[rank].split(MICRO):
        out = model(rows[:, :-1]).float()
        loss = F.cross_entropy(out.flatten(0, 1), rows[:, 1:].flatten())
        model.zero_grad()
        loss.backward()
        shown += loss.detach() * MICRO / 8
        for n, p in model.named_parameters():
            acc[n] += p.grad.float() * (MICRO / 8)
    for n, p in model.named_parameters():
        velocity[n].mul_(0.9).add_(total(acc[n]))
        master[n] -= 0.3 * velocity[n]
        p.data.copy_(master[n])
    say(step, total(shown))
finish(master)
