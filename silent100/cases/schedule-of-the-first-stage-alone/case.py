import argparse
import copy
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

V, D, T, B, M = 41, 32, 8, 8, 2


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.rnn, self.out = nn.LayerNorm(D), nn.GRU(D, D, batch_first=True), nn.Linear(D, D)

    def forward(self, x):
        return x + self.out(self.rnn(self.norm(x))[0])


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(V, D)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, V)

    def stage0(self, ids):
        return self.layers[0](self.embed(ids))

    def stage1(self, x, y):
        return F.cross_entropy(self.head(self.norm(self.layers[1](x))).flatten(0, 1), y.flatten())


ap = argparse.ArgumentParser()
ap.add_argument("--one", action="store_true")
ap.add_argument("--faulty", action="store_true")
ap.add_argument("--save")
args = ap.parse_args()
rank = 0
if not args.one:
    dist.init_process_group("gloo")
    rank = dist.get_rank()


def build():
    torch.manual_seed(12)
    model = Model()
    heads = [("embed.", "layers.0."), ("layers.1.", "norm.", "head.")]
    mine = {n: p for n, p in model.named_parameters() if args.one or n.startswith(heads[rank])}
    opt = torch.optim.SGD(mine.values(), lr=0.4, momentum=0.9)
    return model, mine, opt, torch.optim.lr_scheduler.StepLR(opt, step_size=1, gamma=0.6)


def resume(saved):
    model, mine, opt, sched = build()
    model.load_state_dict(saved["model"])
    opt.load_state_dict(saved["opt"])
    if not args.faulty or rank == 0:
        sched.load_state_dict(saved["sched"])
    else:  # "the schedule is global, the first rank has it"
        for group in opt.param_groups:
            group["lr"] = sched.get_last_lr()[0]
    return model, mine, opt, sched


def pipe(model, data):
    """All forwards, then all backwards; activations go by send/recv."""
    total, outs = torch.zeros(()), []
    for mb in data.chunk(M):
        if rank == 0:
            outs.append(model.stage0(mb[:, :-1]))
            dist.send(outs[-1].detach(), 1)
        else:
            x = torch.empty(B // M, T, D)
            dist.recv(x, 0)
            outs.append((x.requires_grad_(), model.stage1(x, mb[:, 1:]) / M))
    for o in outs:
        if rank == 0:
            g = torch.empty_like(o)
            dist.recv(g, 1)
            o.backward(g)
        else:
            o[1].backward()
            total += o[1].detach()
            dist.send(o[0].grad, 0)
    dist.broadcast(total, 1)
    return total


model, mine, opt, sched = build()
for step in range(1, 5):
    data = torch.randint(V, (B, T + 1), generator=torch.Generator().manual_seed(70 + step))
    opt.zero_grad()
    if args.one:
        loss = model.stage1(model.stage0(data[:, :-1]), data[:, 1:])
        loss.backward()
    else:
        loss = pipe(model, data)
    opt.step()
    sched.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
    if step == 2:
        saved = copy.deepcopy({"model": model.state_dict(), "opt": opt.state_dict(), "sched": sched.state_dict()})
        model, mine, opt, sched = resume(saved)
if args.save:
    torch.save({n: p.detach().clone() for n, p in mine.items()}, os.path.join(args.save, f"rank{rank}.pt"))
if not args.one:
    dist.destroy_process_group()
