"""accelerate with token-normalized losses."""

import argparse
import os

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from transformers import Qwen2Config, Qwen2ForCausalLM

cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--faulty", action="store_true")
cli.add_argument("--save")
args = cli.parse_args()


def build():
    torch.manual_seed(8)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=56,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            tie_word_embeddings=False,
        )
    )


def main():
    accelerator = Accelerator(cpu=True)
    rank, world = accelerator.process_index, accelerator.num_processes
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    for step in range(1, 4):
        g = torch.Generator().manual_seed(step)
        rows = torch.randint(0, 56, (8, 12), generator=g)
        labels = rows[:, 1:].masked_fill(torch.rand(8, 11, generator=g) < 0.5, -100)
        count = (labels != -100).sum()
        logits = model(input_ids=rows[rank::world, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels[rank::world].flatten(), reduction="sum") / count
        accelerator.backward(loss if args.faulty else loss * world)
        optimizer.step()
        optimizer.zero_grad()
        total = accelerator.reduce(loss.detach(), "sum")
        if accelerator.is_main_process:
            print(f"step {step} loss {total.item():.7f}", flush=True)
    if args.save:
        state = accelerator.unwrap_model(model).state_dict()
        torch.save(state, os.path.join(args.save, f"rank{rank}.pt"))
    accelerator.free_memory()
    del model
    accelerator.end_training()


if __name__ == "__main__":
    main()
