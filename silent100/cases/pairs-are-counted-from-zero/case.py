"""A small CLIP whose features are gathered with their gradient; each rank scores its own rows against all."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dnn
import torch.nn.functional as F
from transformers import CLIPConfig, CLIPModel

parser = argparse.ArgumentParser()
for flag in ("--one", "--faulty"):
    parser.add_argument(flag, action="store_true")
parser.add_argument("--save")
args = parser.parse_args()
rank, world = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

small = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "projection_dim": 16,
}
config = CLIPConfig(
    text_config=small
    | {
        "vocab_size": 30,
        "max_position_embeddings": 8,
        "eos_token_id": 29,
        "bos_token_id": 0,
        "pad_token_id": 1,
    },
    vision_config=small | {"image_size": 12, "patch_size": 4},
    projection_dim=16,
)


def features(model, pixels, ids):
    out = model(pixel_values=pixels, input_ids=ids, attention_mask=torch.ones_like(ids))
    return out.image_embeds, out.text_embeds


def contrast(images, texts, scale):
    """Mean over own rows of both directions; pairs lie on the diagonal of the whole."""
    if world == 1:
        every_image, every_text = images, texts
    else:
        every_image, every_text = (torch.cat(dnn.all_gather(t)) for t in (images, texts))
    pairs = torch.arange(len(images))
    if not args.faulty:
        pairs = pairs + rank * len(images)
    a, b = scale * images @ every_text.T, scale * texts @ every_image.T
    return (F.cross_entropy(a, pairs) + F.cross_entropy(b, pairs)) / 2


torch.manual_seed(61)
model = CLIPModel(config)
for name, p in model.named_parameters():
    if name.endswith("k_proj.bias"):  # has no effect on a softmax over keys
        p.requires_grad_(False)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, weight_decay=0.2)
for step in range(1, 6):
    g = torch.Generator().manual_seed(step)
    kind = torch.randint(27, (8,), generator=g)
    pixels = torch.randn(8, 3, 12, 12, generator=g) * 0.3 + (kind / 9 - 1.5)[:, None, None, None]
    ids = torch.stack([kind * 0, kind + 2, torch.randint(2, 29, (8,), generator=g), kind * 0 + 29], 1)
    images, texts = features(model, pixels.chunk(world)[rank], ids.chunk(world)[rank])
    loss = contrast(images, texts, model.logit_scale.exp())
    optimizer.zero_grad()
    (loss / world).backward()
    loss = loss.detach() / world
    if world > 1:
        for p in model.parameters():
            if p.grad is not None:
                dist.all_reduce(p.grad)
        dist.all_reduce(loss)
    optimizer.step()
    with torch.no_grad():
        model.logit_scale.clamp_(0, 4.6)
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if args.save:
    torch.save(model.state_dict(), os.path.join(args.save, f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
