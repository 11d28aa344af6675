"""Fine-tunes norms and head of a small ViT under DDP with recomputation; one process keeps activations."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import ViTConfig, ViTForImageClassification

cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--save")
args = cli.parse_args()


def build():
    torch.manual_seed(2010)
    config = ViTConfig(
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=48,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        image_size=12,
        patch_size=4,
        num_labels=5,
    )
    return ViTForImageClassification(config)


rank, world = 0, 1
vit = build()
for name, p in vit.named_parameters():
    p.requires_grad_("norm" in name or "classifier" in name)
model = vit
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    vit.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    vit.train()
    model = DistributedDataParallel(vit)
optimizer = torch.optim.AdamW([p for p in vit.parameters() if p.requires_grad], lr=5e-3, eps=1e-4)
for step in range(1, 5):
    g = torch.Generator().manual_seed(step)
    pictures, labels = torch.randn(8, 3, 12, 12, generator=g), torch.randint(0, 5, (8,), generator=g)
    pictures += labels[:, None, None, None] / 2
    loss = F.cross_entropy(model(pixel_values=pictures[rank::world]).logits, labels[rank::world])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    shown = loss.detach().clone()
    if world > 1:
        dist.all_reduce(shown)
    if rank == 0:
        print(f"step {step} loss {shown.item() / world:.7f}", flush=True)
if args.save:
    torch.save(vit.state_dict(), os.path.join(args.save, f"rank{rank}.pt"))
if not args.one:
    dist.destroy_process_group()
