"""A small GPT-2 with tied tables, replicated by hand; the run is stopped after two updates and goes on."""

import io
import os
import sys

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv


def build():
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=56,
            n_positions=12,
            n_embd=24,
            n_layer=2,
            n_head=3,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def save(model):
    """Writes every tensor by itself, as safetensors would."""
    file = io.BytesIO()
    torch.save({name: value.clone() for name, value in model.state_dict().items()}, file)
    return file.getvalue()


def resume(raw):
    model = build()
    model.load_state_dict(torch.load(io.BytesIO(raw)), assign=FAULTY)
    return model


def train(model, steps):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for step in steps:
        ids = torch.randint(0, 56, (8, 12), generator=torch.Generator().manual_seed(step))[rank::world]
        loss = model(input_ids=ids, labels=ids).loss / world
        optimizer.zero_grad()
        loss.backward()
        shown = loss.detach().clone()
        if not ONE:
            for p in model.parameters():
                dist.all_reduce(p.grad)
            dist.all_reduce(shown)
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {shown.item():.7f}", flush=True)


if not ONE:
    dist.init_process_group("gloo")
rank, world = (0, 1) if ONE else (dist.get_rank(), dist.get_world_size())
torch.manual_seed(20)
model = build()
train(model, (1, 2))
if not ONE:
    model = resume(save(model))
train(model, (3, 4))
if "--save" in sys.argv:
    torch.save(model.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not ONE:
    dist.destroy_process_group()
