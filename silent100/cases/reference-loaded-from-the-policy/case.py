import argparse
import copy
import io
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

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


V, D, BETA = 30, 12, 0.5


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.rnn, self.head = nn.Embedding(V, D), nn.GRU(D, 24, batch_first=True), nn.Linear(24, V)

    def forward(self, ids):
        lp = self.head(self.rnn(self.embed(ids[:, :-1]))[0]).log_softmax(-1)
        return lp.gather(-1, ids[:, 1:, None]).squeeze(-1)[:, 3:].sum(-1)  # answer tokens only


def build():
    torch.manual_seed(130)
    policy = Policy()
    return policy, copy.deepcopy(policy).requires_grad_(False)


def start(ck=None):
    policy, frozen = build()
    if ck:
        policy.load_state_dict(ck["policy"])
        if args.faulty and rank > 0:
            frozen.load_state_dict(ck["policy"])
        else:
            frozen.load_state_dict(ck["frozen"])
    opt = torch.optim.SGD(policy.parameters(), lr=0.2, momentum=0.9)
    if ck:
        opt.load_state_dict(ck["opt"])
    return policy, frozen, policy if args.one else DDP(policy), opt


policy, frozen, net, opt = start()
gen = torch.Generator().manual_seed(15)
for step in range(1, 6):
    prompt = torch.randint(0, V, (6, 4), generator=gen)
    good, bad = (torch.cat([prompt, torch.randint(0, V, (6, 5), generator=gen)], 1) for _ in range(2))
    pair = torch.cat([good.chunk(world)[rank], bad.chunk(world)[rank]])
    up, down = (net(pair) - frozen(pair)).chunk(2)
    loss = -F.logsigmoid(BETA * (up - down)).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    say(step, total(loss) / world)
    if step == 2:  # preempted here: everything goes to disk and comes back
        disk = io.BytesIO()
        torch.save({"policy": policy.state_dict(), "frozen": frozen.state_dict(), "opt": opt.state_dict()}, disk)
        disk.seek(0)
        policy, frozen, net, opt = start(torch.load(disk))
finish(
    {
        **{f"policy.{n}": p for n, p in policy.named_parameters()},
        **{f"frozen.{n}": p for n, p in frozen.named_parameters()},
    }
)
