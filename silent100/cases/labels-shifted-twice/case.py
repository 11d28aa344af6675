"""A Hugging Face model on halves of sequences; attention stays within a half, the loss is one of several."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--faulty", action="store_true")
cli.add_argument("--save")
args = cli.parse_args()
LENGTH = 16


def halves(rows):
    """Inputs, global positions and next tokens of both halves: (2, rows, length / 2)."""
    labels = F.pad(rows[:, 1:], (0, 1), value=-100)
    positions = torch.arange(LENGTH).expand_as(rows)
    return [torch.stack(t.chunk(2, 1)) for t in (rows, positions, labels)]


def loss_of(model, ids, positions, labels, count):
    if args.faulty:
        out = model(input_ids=ids, position_ids=positions, labels=labels, num_items_in_batch=count, use_cache=False)
        return out.loss
    logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum") / count


def main():
    rank, world = 0, 1
    if not args.one:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(2)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=60,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=64,
        )
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for step in range(1, 4):
        rows = torch.randint(0, 60, (6, LENGTH), generator=torch.Generator().manual_seed(step))
        ids, positions, labels = halves(rows)
        count = (labels != -100).sum()
        total = torch.zeros(())
        optimizer.zero_grad()
        for half in (0, 1) if args.one else (rank,):
            loss = loss_of(model, ids[half], positions[half], labels[half], count)
            loss.backward()
            total += loss.detach()
        if world > 1:
            for p in model.parameters():
                dist.all_reduce(p.grad)
            dist.all_reduce(total)
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {total.item():.7f}", flush=True)
    if args.save:
        torch.save(model.state_dict(), os.path.join(args.save, f"rank{rank}.pt"))
    if world > 1:
        dist.destroy_process_group()


main()
