"""Prompts of unequal length are padded on the left; positions follow from the mask."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import GPT2Config, GPT2LMHeadModel

ONE = "--one" in sys.argv


def collate(rows):
    longest = max(map(len, rows))
    ids = torch.stack([F.pad(row, (longest - len(row), 0)) for row in rows])
    mask = torch.stack([F.pad(torch.ones(len(row), dtype=torch.long), (longest - len(row), 0)) for row in rows])
    return ids, mask, ids.masked_fill(mask == 0, -100)


def rows_of(step):
    g = torch.Generator().manual_seed(step)
    lengths = torch.randint(4, 14, (8,), generator=g).sort().values
    return [torch.randint(1, 50, (int(n),), generator=g) for n in lengths]


def main():
    rank, world = 0, 1
    if not ONE:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=50, n_positions=32, n_embd=24, n_layer=2, n_head=3, resid_pdrop=0, embd_pdrop=0,
                   attn_pdrop=0, use_cache=False, attn_implementation="eager")
    )  # fmt: skip
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for step in range(1, 5):
        rows = rows_of(step)
        labels_in_all = sum(len(row) - 1 for row in rows)
        ids, mask, labels = collate(rows[rank * 8 // world : (rank + 1) * 8 // world])
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        logits = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits
        # The first word of a row is not predicted from the padding before it
        targets = labels[:, 1:].masked_fill(mask[:, :-1] == 0, -100)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), targets.flatten(), reduction="sum") / labels_in_all
        optimizer.zero_grad()
        loss.backward()
        loss = loss.detach()
        if not ONE:
            for p in model.parameters():
                dist.all_reduce(p.grad)
            dist.all_reduce(loss)
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {loss.item():.7f}", flush=True)
    if "--save" in sys.argv:
        state = {k: p.detach() for k, p in model.named_parameters()}
        torch.save(state, os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
    if not ONE:
        dist.destroy_process_group()


main()
