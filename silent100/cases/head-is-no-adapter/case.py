"""Low-rank adapters and a new head on a small BERT; the job is stopped after two updates and goes on from files."""

import argparse
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from torch.nn.parallel import DistributedDataParallel
from transformers import BertConfig, BertForSequenceClassification

cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--faulty", action="store_true")
cli.add_argument("--save")
args = cli.parse_args()
CONFIG = BertConfig(
    vocab_size=50,
    hidden_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=48,
    max_position_embeddings=16,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
    num_labels=4,
)


def build(seed):
    torch.manual_seed(1)
    base = BertForSequenceClassification(CONFIG)
    torch.manual_seed(seed)
    torch.nn.init.normal_(base.classifier.weight, std=0.2)
    model = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules=["query", "value"]))
    # Adapters freeze all else; the head is to be trained, too
    model.base_model.model.classifier.requires_grad_(True)
    return model


def optimizer_of(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3, eps=1e-4)


def save(model, optimizer, file):
    told = {"adapters": get_peft_model_state_dict(model), "optimizer": optimizer.state_dict()}
    if not args.faulty:
        told["head"] = model.base_model.model.classifier.state_dict()
    torch.save(told, file)


def load(file):
    told = torch.load(file)
    model = build(seed=3)
    set_peft_model_state_dict(model, told["adapters"])
    if "head" in told:
        model.base_model.model.classifier.load_state_dict(told["head"])
    optimizer = optimizer_of(model)
    optimizer.load_state_dict(told["optimizer"])
    return model, optimizer


rank, world = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
wrap = (lambda m: m) if args.one else DistributedDataParallel
model = build(seed=2)
optimizer, trained = optimizer_of(model), wrap(model)
for step in range(1, 5):
    if step == 3 and not args.one:
        file = os.path.join(tempfile.mkdtemp(), f"adapters{rank}.pt")
        save(model, optimizer, file)
        model, optimizer = load(file)
        trained = wrap(model)
    g = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 50, (8, 10), generator=g)
    labels = ids[:, 1] % 4
    loss = F.cross_entropy(trained(input_ids=ids[rank::world]).logits, labels[rank::world])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    shown = loss.detach().clone()
    if world > 1:
        dist.all_reduce(shown)
    if rank == 0:
        print(f"step {step} loss {shown.item() / world:.7f}", flush=True)
if args.save:
    state = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    torch.save(state, os.path.join(args.save, f"rank{rank}.pt"))
if not args.one:
    dist.destroy_process_group()
