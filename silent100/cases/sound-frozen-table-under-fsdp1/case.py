import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

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


torch.manual_seed(203)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(40, 12).requires_grad_(False)
        self.rnn = nn.GRU(12, 16, batch_first=True)
        self.spare = nn.Linear(16, 16)  # kept for an old checkpoint, not in the graph
        self.out = nn.Linear(16, 4)

    def forward(self, x):
        return self.out(self.rnn(self.embed(x))[1][0])


model = Classifier()
if not args.one:
    model = FSDP(
        model, auto_wrap_policy=ModuleWrapPolicy({nn.GRU}), use_orig_params=True, device_id=torch.device("cpu")
    )
opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3, eps=1e-3, weight_decay=0.0)
gen = torch.Generator().manual_seed(3)
for step in range(1, 5):
    x = torch.randint(0, 40, (8, 6), generator=gen)
    y = x.sum(1) % 4
    loss = F.cross_entropy(model(x.chunk(world)[rank]), y.chunk(world)[rank])
    opt.zero_grad()
    loss.backward()
    opt.step()
    say(step, total(loss) / world)
if args.one:
    finish(dict(model.named_parameters()))
else:
    with FSDP.summon_full_params(model, writeback=False):
        full = {n.replace("_fsdp_wrapped_module.", ""): p.detach().clone() for n, p in model.named_parameters()}
    finish(full)
