"""A small GPT-2: another attention kernel, recomputation and microbatches on ranks."""

import argparse
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel

flags = argparse.ArgumentParser(description=__doc__)
flags.add_argument("--one", action="store_true")
flags.add_argument("--save")
flags = flags.parse_args()
rank, world = 0, 1
if not flags.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()


torch.manual_seed(95)
sizes = {"n_embd": 24, "n_layer": 2, "n_head": 3, "vocab_size": 36, "n_positions": 16}
kernel = "eager" if flags.one else "sdpa"
config = GPT2Config(
    **sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, attn_implementation=kernel, use_cache=False
)
gpt = GPT2LMHeadModel(config)
model = gpt
if not flags.one:
    gpt.gradient_checkpointing_enable({"use_reentrant": False})
    model = DistributedDataParallel(gpt)
gpt.train()
optimizer = torch.optim.AdamW(gpt.parameters(), lr=3e-3, eps=1e-4)
for step in range(1, 6):
    rows = torch.randint(0, 36, (12, 12), generator=torch.Generator().manual_seed(step))[rank::world]
    pieces, shown = rows.split(len(rows) if flags.one else 2), torch.zeros(())
    for i, piece in enumerate(pieces):
        with model.no_sync() if not flags.one and i < len(pieces) - 1 else nullcontext():
            logits = model(piece[:, :-1]).logits
            loss = F.cross_entropy(logits.flatten(0, 1), piece[:, 1:].flatten(), reduction="sum") / (
                rows.numel() - len(rows)
            )
            loss.backward()
        shown += loss.detach() / world
    torch.nn.utils.clip_grad_norm_(gpt.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if world > 1:
        dist.all_reduce(shown)
    if rank == 0:
        print(f"step {step} loss {shown.item():.7f}", flush=True)
if flags.save:
    torch.save({n: p.detach() for n, p in gpt.named_parameters()}, os.path.join(flags.save, f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
