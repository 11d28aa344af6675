# A small GPT-2 with its usual dropout; gradients are summed over replicas by hand.
import os
import sys

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel

one = "--one" in sys.argv
both_names = "--faulty" in sys.argv
rank, world = 0, 1
if not one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()


def build():
    torch.manual_seed(51929)
    drop = {f"{place}_pdrop": 0.03 for place in ("resid", "embd", "attn")}
    sizes = {"vocab_size": 80, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4}
    return GPT2LMHeadModel(GPT2Config(**sizes, **drop, use_cache=False))


def sum_gradients(model):
    for _, p in model.named_parameters(remove_duplicate=not both_names):
        if p.grad is not None:
            dist.all_reduce(p.grad)


def train(model, steps=4):
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    model.train()
    torch.manual_seed(10 + rank)
    for step in range(1, steps + 1):
        ids = torch.randint(0, 80, (32, 16), generator=torch.Generator().manual_seed(step))
        mine = ids.chunk(world)[rank]
        loss = model(input_ids=mine, labels=mine).loss / world
        loss.backward()
        shown = loss.detach().clone()
        if world > 1:
            sum_gradients(model)
            dist.all_reduce(shown)
        opt.step()
        opt.zero_grad()
        if rank == 0:
            print(f"step {step} loss {shown.item():.7f}", flush=True)


net = build()
train(net)
if "--save" in sys.argv:
    kept = {k: p.data for k, p in net.named_parameters()}
    torch.save(kept, os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not one:
    dist.destroy_process_group()
