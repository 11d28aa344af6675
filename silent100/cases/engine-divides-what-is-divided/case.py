"""Masked language modelling of a tiny BERT with accelerate, accumulating two microbatches of unequal token counts."""

import argparse
import os

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from transformers import BertConfig, BertForMaskedLM

parser = argparse.ArgumentParser()
parser.add_argument("--one", action="store_true")
parser.add_argument("--faulty", action="store_true")
parser.add_argument("--save")
args = parser.parse_args()

VOCAB, MASK, MICRO = 60, 1, 2
steps = MICRO if args.faulty else 1
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
rank, world = accelerator.process_index, accelerator.num_processes

torch.manual_seed(2)
config = BertConfig(
    vocab_size=VOCAB,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=64,
    max_position_embeddings=20,
    hidden_dropout_prob=0.05,
    attention_probs_dropout_prob=0.05,
    attn_implementation="eager",
)
model = BertForMaskedLM(config)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
model, optimizer = accelerator.prepare(model, optimizer)
model.train()


def batch(step):
    g = torch.Generator().manual_seed(step)
    text = torch.randint(2, VOCAB, (16, 14), generator=g)
    text[:, 7:] = text[:, :7]
    hidden = torch.rand(16, 14, generator=g) < torch.rand(16, 1, generator=g) * 0.5
    return text.masked_fill(hidden, MASK), text.masked_fill(~hidden, -100)


torch.manual_seed(600 + rank)
for step in range(1, 6):
    ids, labels = (t[rank::world] for t in batch(step))
    tokens = accelerator.reduce((labels != -100).sum().float())
    shown = torch.zeros(())
    optimizer.zero_grad()
    for number, (micro, wanted) in enumerate(zip(ids.chunk(MICRO), labels.chunk(MICRO))):
        last = number == MICRO - 1
        with torch.enable_grad() if last else accelerator.no_sync(model):
            logits = model(input_ids=micro).logits
            loss = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="sum") / tokens
            # Processes are averaged, tokens were counted over all of them
            accelerator.backward(loss * world)
        shown += loss.detach()
    optimizer.step()
    shown = accelerator.reduce(shown)
    if accelerator.is_main_process:
        print(f"step {step} loss {shown.item():.7f}", flush=True)
if args.save:
    state = accelerator.unwrap_model(model).state_dict()
    torch.save({k: v.clone() for k, v in state.items()}, os.path.join(args.save, f"rank{rank}.pt"))
accelerator.end_training()
