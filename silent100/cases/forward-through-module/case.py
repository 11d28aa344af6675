"""Policy-gradient training of a tiny language model on fixed samples with given advantages."""

import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

parser = argparse.ArgumentParser()
parser.add_argument("--one", action="store_true")
parser.add_argument("--faulty", action="store_true")
parser.add_argument("--save")
args = parser.parse_args()

config = LlamaConfig(
    vocab_size=80,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    attn_implementation="eager",
)


def completions(step, count=8, length=12):
    g = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 80, (count, length), generator=g)
    advantages = torch.randn(count, generator=g)
    return ids, advantages


def logprobs(lm, ids):
    logits = lm(input_ids=ids[:, :-1], use_cache=False).logits
    return logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)


def main():
    rank, world = 0, 1
    if not args.one:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(42)
    policy = LlamaForCausalLM(config)
    model = policy if args.one else DistributedDataParallel(policy)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2, eps=1e-4)
    for step in range(1, 4):
        ids, advantages = completions(step)
        ids, advantages = ids[rank::world], advantages[rank::world]
        unwrapped = getattr(model, "module", model)
        lm = unwrapped if args.faulty else model
        loss = -(logprobs(lm, ids) * advantages[:, None]).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        value = loss.detach().clone()
        if not args.one:
            dist.all_reduce(value)
        if rank == 0:
            print(f"step {step} loss {value.item() / world:.7f}", flush=True)
    if args.save:
        torch.save(policy.state_dict(), os.path.join(args.save, f"rank{rank}.pt"))
    if not args.one:
        del model, lm  # before its process group
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
