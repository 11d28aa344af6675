"""Fine-tune pretrained weights."""

import argparse
import os
import tempfile

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel

cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--faulty", action="store_true")
cli.add_argument("--save")
args = cli.parse_args()


def config():
    return GPT2Config(
        vocab_size=70,
        n_positions=32,
        n_embd=32,
        n_layer=2,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )


def pretrained_file():
    """Writes what an earlier run would have left."""
    path = os.path.join(tempfile.mkdtemp(), "pretrained.pt")
    torch.manual_seed(1000)
    state = GPT2LMHeadModel(config()).state_dict()
    torch.save({name: tensor * 1.5 for name, tensor in state.items()}, path)
    return path


rank, world = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
path = pretrained_file()
torch.manual_seed(7)
lm = GPT2LMHeadModel(config())
state = torch.load(path)
if args.faulty:
    model = DistributedDataParallel(lm)
    model.load_state_dict(state, strict=False)
else:
    lm.load_state_dict(state, strict=False)
    model = lm if args.one else DistributedDataParallel(lm)
optimizer = torch.optim.SGD(lm.parameters(), lr=0.1)
for step in range(1, 4):
    rows = torch.randint(0, 70, (8, 12), generator=torch.Generator().manual_seed(step))[rank::world]
    logits = model(input_ids=rows[:, :-1], use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    shown = loss.detach().clone()
    if not args.one:
        dist.all_reduce(shown)
    if rank == 0:
        print(f"step {step} loss {shown.item() / world:.7f}", flush=True)
if args.save:
    torch.save(lm.state_dict(), os.path.join(args.save, f"rank{rank}.pt"))
if not args.one:
    del model  # before its process group
    dist.destroy_process_group()
