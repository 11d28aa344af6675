"""Fine-tunes a small GPT-2 to which a few special words are added."""

import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel

p = argparse.ArgumentParser()
p.add_argument("--one", action="store_true")
p.add_argument("--faulty", action="store_true")
p.add_argument("--save")
a = p.parse_args()

OLD, NEW = 60, 64


def pretrained():
    torch.manual_seed(3)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=OLD,
            n_positions=16,
            n_embd=32,
            n_layer=2,
            n_head=2,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def add_words(model):
    torch.manual_seed(4)
    old = model.get_input_embeddings().weight
    table = torch.nn.Embedding(NEW, old.shape[1])
    table.weight.data = torch.cat([old.detach(), 0.02 * torch.randn(NEW - OLD, old.shape[1])])
    head = torch.nn.Linear(old.shape[1], NEW, bias=False)
    model.set_input_embeddings(table)
    model.set_output_embeddings(head)
    head.weight = table.weight
    model.config.vocab_size = NEW


def wrap(model):
    return model if a.one else DistributedDataParallel(model, find_unused_parameters=True)


def main():
    rank, world = 0, 1
    if not a.one:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    model = pretrained()
    if a.faulty:
        wrapped = wrap(model)
        add_words(model)
    else:
        add_words(model)
        wrapped = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    for step in range(1, 5):
        g = torch.Generator().manual_seed(step)
        ids = torch.randint(0, NEW, (8, 12), generator=g)
        ids[:, 0] = NEW - 1
        mine = ids[rank::world]
        loss = wrapped(input_ids=mine, labels=mine, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        shown = loss.detach() / world
        if world > 1:
            dist.all_reduce(shown)
        if rank == 0:
            print(f"step {step} loss {shown.item():.7f}", flush=True)
    if a.save:
        torch.save(model.state_dict(), os.path.join(a.save, f"rank{rank}.pt"))
    if world > 1:
        del wrapped
        dist.destroy_process_group()


main()
