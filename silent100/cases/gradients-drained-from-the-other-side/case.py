import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn

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
        torch.save({k: v.detach().clone() for k, v in state.items()}, f"{args.save}/rank{rank}.pt")
    if not args.one:
        dist.barrier()
        dist.destroy_process_group()


K, MICRO, ROWS = 3, 4, 5
torch.manual_seed(90)
trunk = nn.Sequential(nn.Linear(2, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh())
tail = nn.Sequential(nn.Linear(20, 20), nn.SiLU(), nn.Linear(20, 3 * K))
first, last = rank == 0, rank == world - 1
stage = nn.ModuleDict({**({"trunk": trunk} if first else {}), **({"tail": tail} if last else {})})
opt = torch.optim.SGD(stage.parameters(), lr=0.05, momentum=0.9)


def nll(out, y):
    logit, mu, ls = out.chunk(3, -1)
    comp = -0.5 * ((y - mu) / ls.exp()).square() - ls
    return -(logit.log_softmax(-1) + comp).logsumexp(-1).mean()


gen = torch.Generator().manual_seed(33)
for step in range(1, 5):
    x = torch.randn(MICRO * ROWS, 2, generator=gen) * (1 + torch.arange(MICRO).repeat_interleave(ROWS)[:, None])
    y = (x[:, :1] * x[:, 1:]).tanh() + 0.1 * torch.randn(len(x), 1, generator=gen)
    opt.zero_grad()
    acts, ends, loss = [], [], torch.zeros(())
    for m in range(MICRO):
        rows = slice(m * ROWS, (m + 1) * ROWS)
        if first:
            h = trunk(x[rows])
            acts.append(h)
            if not last:
                dist.send(h.detach(), 1)
                continue
            h_in = h
        else:
            h_in = torch.empty(ROWS, 20)
            dist.recv(h_in, 0)
            h_in.requires_grad_()
        ends.append((h_in, nll(tail(h_in), y[rows]) / MICRO))
    while ends:  # drain: newest microbatch first
        h_in, part = ends.pop()
        part.backward()
        loss += part.detach()
        if not first:
            dist.send(h_in.grad, 0)
    if first and not last:
        while acts:
            g = torch.empty(ROWS, 20)
            dist.recv(g, 1)
            h = acts.pop(0) if args.faulty else acts.pop()
            h.backward(g)
    if world > 1:
        dist.broadcast(loss, world - 1)
    opt.step()
    say(step, loss)
finish(dict(stage.named_parameters()))
