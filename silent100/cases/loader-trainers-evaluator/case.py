import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ap = argparse.ArgumentParser()
ap.add_argument("--one", action="store_true")
ap.add_argument("--save")
args = ap.parse_args()
STEPS, B, LOADER, TRAINERS, EVAL = 5, 10, 0, [1, 2], 3


def make_model():
    torch.manual_seed(64)
    return nn.Sequential(nn.Unfold(2, stride=2), nn.Flatten(), nn.Linear(64, 20), nn.Mish(), nn.Linear(20, 3))


def batches(seed, n):
    g = torch.Generator().manual_seed(seed)
    for _ in range(n):
        x = torch.randn(B, 1, 8, 8, generator=g)
        yield x, (x[:, 0, :4, :4].mean((1, 2)) > x[:, 0, 4:, 4:].mean((1, 2))).long()


def report(step, loss, acc):
    print(f"step {step} loss {float(loss):.7f}", flush=True)
    print(f"  held-out accuracy {float(acc):.3f}")


@torch.no_grad()
def evaluate(model):
    hits = [(model(x).argmax(1) == y).float().mean() for x, y in batches(999, 3)]
    return torch.stack(hits).mean()


def single():
    model = make_model()
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step, (x, y) in enumerate(batches(1, STEPS), 1):
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        report(step, loss, evaluate(model))
    return model.state_dict()


def loader():
    for step, (x, y) in enumerate(batches(1, STEPS), 1):
        for t, xs, ys in zip(TRAINERS, x.split([7, 3]), y.split([7, 3])):
            dist.send(torch.tensor([len(xs)]), t)
            dist.send(xs.contiguous(), t)
            dist.send(ys.contiguous(), t)
        loss, acc = torch.zeros(()), torch.zeros(())
        dist.recv(loss, TRAINERS[0])
        dist.recv(acc, EVAL)
        report(step, loss, acc)
    return {}


def trainer(me, team):
    model = make_model()
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(STEPS):
        n = torch.zeros(1, dtype=torch.long)
        dist.recv(n, LOADER)
        x, y = torch.empty(int(n), 1, 8, 8), torch.empty(int(n), dtype=torch.long)
        dist.recv(x, LOADER)
        dist.recv(y, LOADER)
        loss = F.cross_entropy(model(x), y, reduction="sum") / B
        opt.zero_grad()
        loss.backward()
        flat = torch.cat([loss.detach().view(1), *(p.grad.flatten() for p in model.parameters())])
        dist.all_reduce(flat, group=team)
        nn.utils.vector_to_parameters(flat[1:], [p.grad for p in model.parameters()])
        opt.step()
        if me == TRAINERS[0]:
            dist.send(flat[0].clone(), LOADER)
            dist.send(nn.utils.parameters_to_vector(model.parameters()).detach(), EVAL)
    return model.state_dict()


def evaluator():
    model = make_model()
    for _ in range(STEPS):
        vec = nn.utils.parameters_to_vector(model.parameters()).detach()
        dist.recv(vec, TRAINERS[0])
        nn.utils.vector_to_parameters(vec, model.parameters())
        dist.send(evaluate(model), LOADER)
    return model.state_dict()


if args.one:
    rank, state = 0, single()
else:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    team = dist.new_group(TRAINERS)
    state = loader() if rank == LOADER else evaluator() if rank == EVAL else trainer(rank, team)
if args.save:
    torch.save(state, f"{args.save}/rank{rank}.pt")
if not args.one:
    dist.barrier()
    dist.destroy_process_group()
