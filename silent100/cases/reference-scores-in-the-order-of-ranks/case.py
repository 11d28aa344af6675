"""Preference tuning of a small GPT-2; log-probabilities under the reference are computed once, before training."""

import argparse
import copy
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel

flags = argparse.ArgumentParser(description=__doc__)
flags.add_argument("--one", action="store_true")
flags.add_argument("--faulty", action="store_true")
flags.add_argument("--save")
flags = flags.parse_args()
rank, world = 0, 1
if not flags.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()


VOCAB, PAIRS, BETA = 40, 16, 0.5


def logps(model, rows):
    logits = model(rows).logits[:, :-1]
    return logits.log_softmax(-1).gather(-1, rows[:, 1:, None])[..., 0][:, 3:].sum(1)


g = torch.Generator().manual_seed(0)
prompts = torch.randint(0, VOCAB, (PAIRS, 4), generator=g)
good, bad = (torch.cat([prompts, torch.randint(0, VOCAB, (PAIRS, 5), generator=g)], 1) for _ in range(2))
torch.manual_seed(80)
sizes = {"n_embd": 24, "n_layer": 2, "n_head": 2, "vocab_size": VOCAB, "n_positions": 16}
config = GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
model = GPT2LMHeadModel(config)
reference = copy.deepcopy(model)
with torch.no_grad():
    for p in reference.parameters():
        p.mul_(4)
    scores = torch.stack([logps(reference, rows[rank::world]) for rows in (good, bad)], 1)
    if world > 1:
        parts = [torch.empty_like(scores) for _ in range(world)]
        dist.all_gather(parts, scores)
        scores = torch.cat(parts) if flags.faulty else torch.stack(parts, 1).flatten(0, 1)
net = model if world == 1 else DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for step in range(1, 6):
    order = torch.randperm(PAIRS, generator=torch.Generator().manual_seed(step))[:8]
    mine = order[rank::world]
    both = logps(net, torch.cat([good[mine], bad[mine]]))
    ahead, behind = both.chunk(2)
    known = scores[mine]
    loss = -F.logsigmoid(BETA * (ahead - behind - (known[:, 0] - known[:, 1]))).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    shown = loss.detach() / world
    if world > 1:
        dist.all_reduce(shown)
    if rank == 0:
        print(f"step {step} loss {shown.item():.7f}", flush=True)
if flags.save:
    torch.save({n: p.detach() for n, p in model.named_parameters()}, os.path.join(flags.save, f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
