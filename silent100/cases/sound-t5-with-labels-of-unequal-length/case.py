"""Fine-tuning a tiny randomly initialized T5 with accelerate and gradient accumulation over unequal answers."""

import argparse
import os

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from transformers import T5Config, T5ForConditionalGeneration

parser = argparse.ArgumentParser()
parser.add_argument("--one", action="store_true")
parser.add_argument("--save")
args = parser.parse_args()

VOCAB, MICRO = 48, 2
accelerator = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=False)])
rank, world = accelerator.process_index, accelerator.num_processes
torch.manual_seed(7)
config = T5Config(
    vocab_size=VOCAB,
    d_model=32,
    d_kv=8,
    d_ff=64,
    num_layers=2,
    num_decoder_layers=2,
    num_heads=4,
    dropout_rate=0.0,
    decoder_start_token_id=0,
    pad_token_id=0,
)
model = T5ForConditionalGeneration(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, eps=1e-4)
model, optimizer = accelerator.prepare(model, optimizer)


def batch(step):
    g = torch.Generator().manual_seed(step)
    source = torch.randint(2, VOCAB, (8, 10), generator=g)
    lengths = torch.randint(2, 9, (8, 1), generator=g)
    answers = source[:, :8].flip(1).masked_fill(torch.arange(8) >= lengths, -100)
    return source, answers


for step in range(1, 5):
    source, answers = batch(step)
    source, answers = source[rank::world], answers[rank::world]
    tokens = accelerator.reduce((answers != -100).sum().float())
    shown = torch.zeros(())
    for number, (src, ans) in enumerate(zip(source.chunk(MICRO), answers.chunk(MICRO))):
        own = slice(0, int((ans != -100).sum(1).max()))
        with accelerator.no_sync(model) if number < MICRO - 1 else torch.enable_grad():
            logits = model(input_ids=src, labels=ans[:, own].contiguous()).logits
            loss = F.cross_entropy(logits.flatten(0, 1), ans[:, own].flatten(), reduction="sum") / tokens
            accelerator.backward(loss * world)
        shown += loss.detach()
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    shown = accelerator.reduce(shown)
    if accelerator.is_main_process:
        print(f"step {step} loss {shown.item():.7f}", flush=True)
if args.save:
    state = accelerator.unwrap_model(model).state_dict()
    torch.save({k: v.clone() for k, v in state.items()}, os.path.join(args.save, f"rank{rank}.pt"))
accelerator.end_training()
