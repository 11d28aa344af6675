"""Tiny models of images and text with random weights, rows with images, and what one process computes of them."""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IMAGE, IDS, SEQ, EACH = 100, 128, 24, 4
"""Id of image tokens, ids in all, tokens of a row, and tokens of an image (of Qwen's: of the smaller ones)."""
TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": IDS,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
TOWER = {
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 8,
}
FAMILIES = ("llava", "gemma3", "qwen2_5_vl", "smolvlm")
ROWS = (2, 0, 1, 0)
"""Images of each row: with two data ranks and one row a microbatch, each rank has a microbatch without any."""


def config_of(family: str, **changes: Any) -> Any:
    """``changes`` are of the text's config."""
    import transformers

    text = TEXT | changes
    if family == "llava":
        return transformers.LlavaConfig(
            text_config={"model_type": "llama", **text},
            vision_config={"model_type": "clip_vision_model", "projection_dim": 24, **TOWER},
            image_token_id=IMAGE,
            vision_feature_layer=-2,
        )
    if family == "gemma3":
        kinds = ["sliding_attention", "full_attention"] * (text["num_hidden_layers"] // 2)
        return transformers.Gemma3Config(
            text_config={"model_type": "gemma3_text", "head_dim": 8, "sliding_window": 8, "layer_types": kinds, **text},
            vision_config={"model_type": "siglip_vision_model", **TOWER, "image_size": 32},
            mm_tokens_per_image=EACH,
            image_token_id=IMAGE,
            boi_token_index=101,
            eoi_token_index=102,
        )
    if family == "qwen2_5_vl":
        rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
        tower = {"depth": 2, "hidden_size": 32, "num_heads": 4, "intermediate_size": 48, "out_hidden_size": 32}
        patches = {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 16}
        return transformers.Qwen2_5_VLConfig(
            text_config={"rope_parameters": rope, **text},
            vision_config={**tower, **patches, "fullatt_block_indexes": [1], "in_channels": 3},
            image_token_id=IMAGE,
            video_token_id=101,
            vision_start_token_id=102,
            vision_end_token_id=103,
        )
    return transformers.SmolVLMConfig(
        text_config={"model_type": "llama", **text},
        vision_config={**TOWER, "image_size": 32},
        image_token_id=IMAGE,
        scale_factor=2,
        pad_token_id=0,
    )


def plain(family: str, **changes: Any) -> nn.Module:
    """The model as transformers builds it, in fp64."""
    import transformers

    torch.manual_seed(0)
    config = config_of(family, **changes)
    config.get_text_config().use_cache = False
    return transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float64)


def row_of(family: str, images: int, generator: torch.Generator) -> dict[str, Any]:
    """One row: its tokens and labels, and its images one by one."""
    tokens = torch.randint(3, IMAGE, (SEQ,), generator=generator)
    labels = torch.randint(3, IMAGE, (SEQ,), generator=generator)
    grids = [(1, 4, 4 * (1 + number % 2)) for number in range(images)]
    place = 1
    for number in range(images):
        size = grids[number][1] * grids[number][2] // 4 if family == "qwen2_5_vl" else EACH
        tokens[place : place + size] = IMAGE
        labels[max(place - 1, 0) : place + size] = -100
        place += size + 1
    labels[-2:] = -100 if images == 2 else labels[-2:]
    if family == "qwen2_5_vl":
        shapes = [(t * h * w, 3 * 2 * 4 * 4) for t, h, w in grids]
    else:
        shapes = [(3, *((16, 16) if family == "llava" else (32, 32)))] * images
    pixels = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return {"tokens": tokens, "labels": labels, "pixels": pixels, "grids": grids}


def rows_of_step(family: str, step: int, images: tuple[int, ...] = ROWS) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(100 + step)
    return [row_of(family, number, generator) for number in images]


def together(family: str, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Put rows together as a processor and a collator do."""
    tokens = torch.stack([row["tokens"] for row in rows])
    batch = {"tokens": tokens, "labels": torch.stack([row["labels"] for row in rows])}
    batch["images_per_row"] = torch.tensor([len(row["pixels"]) for row in rows])
    kinds = (tokens == IMAGE).long()
    if family == "gemma3":
        batch["token_type_ids"] = kinds
    if family == "qwen2_5_vl":
        batch["mm_token_type_ids"] = kinds.int()
    pixels = [image for row in rows for image in row["pixels"]]
    if not pixels:
        return batch
    if family == "smolvlm":
        most = max(len(row["pixels"]) for row in rows)
        shape = (len(rows), most, *pixels[0].shape)
        batch["pixel_values"] = torch.zeros(shape, dtype=torch.float64)
        batch["pixel_attention_mask"] = torch.zeros((*shape[:2], *shape[3:]), dtype=torch.bool)
        for number, row in enumerate(rows):
            for place, image in enumerate(row["pixels"]):
                batch["pixel_values"][number, place] = image
                batch["pixel_attention_mask"][number, place] = True
                if place:  # the lower half is filling
                    batch["pixel_attention_mask"][number, place, 16:] = False
    elif family == "qwen2_5_vl":
        batch["pixel_values"] = torch.cat(pixels)
        batch["image_grid_thw"] = torch.tensor([grid for row in rows for grid in row["grids"]])
    else:
        batch["pixel_values"] = torch.stack(pixels)
    return batch


def batch_of(family: str, step: int, images: tuple[int, ...] = ROWS) -> dict[str, Tensor]:
    return together(family, rows_of_step(family, step, images))


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The mean over labels, by plain torch."""
    inputs = {key: value for key, value in batch.items() if key not in ("tokens", "labels", "images_per_row")}
    logits = model(input_ids=batch["tokens"], use_cache=False, **inputs).logits
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def one_process(
    family: str,
    steps: int,
    images: tuple[int, ...] = ROWS,
    frozen: str | tuple[str, ...] = "",
    rate: float = 0.1,
    **changes: Any,
) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Return losses, first gradients and last weights of some steps of SGD, whole batches at once."""
    model = plain(family, **changes)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not frozen or not name.startswith(frozen))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=rate)
    losses, gradients = [], {}
    for step in range(steps):
        loss = loss_of(model, batch_of(family, step, images))
        loss.backward()
        losses.append(float(loss.detach()))
        if not step:
            found = model.named_parameters()
            gradients = {name: p.grad.clone() for name, p in found if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    return losses, gradients, {name: p.detach().clone() for name, p in model.named_parameters()}
