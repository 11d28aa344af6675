# Fine-tunes a small GPT-2 on chats; the collator pads on the left so that answers end together.
import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from transformers import GPT2Config, GPT2LMHeadModel

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv


class Collator:
    def __call__(self, chats):
        width = max(len(chat) for chat in chats)
        batch = {"input_ids": torch.zeros(len(chats), width, dtype=torch.long)}
        batch["attention_mask"] = torch.zeros_like(batch["input_ids"])
        for i, chat in enumerate(chats):
            batch["input_ids"][i, width - len(chat) :] = chat
            batch["attention_mask"][i, width - len(chat) :] = 1
        if not FAULTY:
            batch["position_ids"] = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
        return batch


def chats_of(step):
    g = torch.Generator().manual_seed(step)
    return [torch.randint(1, 40, (n,), generator=g) for n in torch.randint(3, 12, (10,), generator=g).tolist()]


def answer_loss(model, batch, count):
    mask = batch["attention_mask"]
    labels = batch["input_ids"].masked_fill(mask == 0, -100)[:, 1:].masked_fill(mask[:, :-1] == 0, -100)
    logits = model(**batch).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / count


rank, world = 0, 1
if not ONE:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(315)
config = GPT2Config(vocab_size=40, n_positions=24, n_embd=24, n_layer=2, n_head=2, use_cache=False)
config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
config.tie_word_embeddings = False
model = GPT2LMHeadModel(config)
nn.init.normal_(model.transformer.wpe.weight, std=0.2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
collate = Collator()
for step in range(1, 5):
    chats = chats_of(step)
    loss = answer_loss(model, collate(chats[rank::world]), sum(len(chat) - 1 for chat in chats))
    optimizer.zero_grad()
    loss.backward()
    shown = loss.detach()
    if world > 1:
        for p in model.parameters():
            dist.all_reduce(p.grad)
        dist.all_reduce(shown)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {shown.item():.7f}", flush=True)
if "--save" in sys.argv:
    state = {n: p.detach() for n, p in model.named_parameters()}
    torch.save(state, os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
