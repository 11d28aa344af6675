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


torch.manual_seed(223)
V, D = 24, 16
enc = nn.ModuleDict({"embed": nn.Embedding(V, D), "rnn": nn.GRU(D, D, batch_first=True), "unused": nn.Linear(D, D)})
dec = nn.ModuleDict(
    {
        "embed": nn.Embedding(V, D),
        "self": nn.GRU(D, D, batch_first=True),
        "cross": nn.MultiheadAttention(D, 2, batch_first=True),
        "out": nn.Linear(D, V),
    }
)
left, right = rank == 0, rank == world - 1
stage = nn.ModuleDict({**({"enc": enc} if left else {}), **({"dec": dec} if right else {})})
opt = torch.optim.AdamW(stage.parameters(), lr=5e-3, eps=1e-3)
gen = torch.Generator().manual_seed(23)


def decode(memory, pad, tgt):
    h = dec["self"](dec["embed"](tgt[:, :-1]))[0]
    h = h + dec["cross"](h, memory, memory, key_padding_mask=pad)[0]
    return F.cross_entropy(dec["out"](h).flatten(0, 1), tgt[:, 1:].flatten(), label_smoothing=0.05)


for step in range(1, 5):
    src = torch.randint(1, V, (8, 7), generator=gen)
    size = torch.randint(3, 8, (8,), generator=gen)
    pad = torch.arange(7)[None] >= size[:, None]
    src = src.masked_fill(pad, 0)
    tgt = torch.cat([torch.zeros(8, 1, dtype=torch.long), src.flip(1)], 1)
    opt.zero_grad()
    shown = torch.zeros(())
    pieces = [(slice(0, 8), 1.0)] if args.one else [(slice(0, 2), 0.25), (slice(2, 8), 0.75)]
    for rows, share in pieces:
        if left:
            memory = enc["rnn"](enc["embed"](src[rows]))[0]
            if not right:
                dist.send(memory.detach().contiguous(), 1)
                g = torch.empty(memory.shape)
                dist.recv(g, 1)
                memory.backward(g)
                continue
            inner = memory
        else:
            inner = torch.empty(rows.stop - rows.start, 7, D)
            dist.recv(inner, 0)
            inner.requires_grad_()
        loss = decode(inner, pad[rows], tgt[rows]) * share
        loss.backward()
        shown += loss.detach()
        if not left:
            dist.send(inner.grad.contiguous(), 0)
    if world > 1:
        dist.broadcast(shown, 1)
    opt.step()
    say(step, shown)
finish(dict(stage.named_parameters()))
