"""Tiny models of images and text of transformers, and batches of rows with images, for ``families.py``."""

from __future__ import annotations

from typing import Any

SUFFIX = "+images"
"""Ends the names of families that are trained with images."""
AXES = ("dp_shard", "tp", "pp")
COUNTS = ((2, 0, 1, 0), (0, 1, 2, 0))
"""Images of each row, in each step; one in each row where the model requires images."""
LENGTHS = (4, 6)
"""Tokens of a row beside its images, in each step."""
LONGEST = 256
"""Tokens of a row, at most."""
LAST = 95
"""Token ids with a meaning of their own are counted down from here."""
TOWER: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "embed_dim", "d_model", "out_hidden_size", "projection_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "depth", "n_layers", "num_layers", "spatial_merge_size"), 2),
    **dict.fromkeys(("num_attention_heads", "num_heads"), 4),
    "intermediate_size": 48,
    "image_size": 32,
    "patch_size": 8,
    "temporal_patch_size": 2,
}
OWN: dict[str, dict[str, Any]] = {
    "blip-2": {"num_query_tokens": 4, "image_token_index": LAST},
    "llava_next": {"image_grid_pinpoints": [[32, 64], [64, 32], [64, 64]]},
    "llava_next_video": {"image_grid_pinpoints": [[32, 64], [64, 32], [64, 64]]},
    "llava_onevision": {"image_grid_pinpoints": [[32, 32], [32, 64], [64, 32], [64, 64]]},
    "cohere2_vision": {"alignment_intermediate_size": 64},
    "paligemma": {"projection_dim": 32},
    "vipllava": {"vision_feature_layers": [-1, -2]},
}

ROTATED = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}}
"""Features of a small head, rotated by time, height and width."""
TURNED = ("qwen2_vl", "qwen2_5_vl", "glm4v", "glm_ocr", "cosmos3_edge", "glm46v", "glm4v_moe", "glmga")
OWN_TEXT: dict[str, dict[str, Any]] = {
    **dict.fromkeys((*TURNED, "qwen2_5_omni_thinker"), ROTATED),
    "ernie4_5_vl_moe": {"moe_intermediate_size": [32, 32]},
    "glm5_next": {"num_key_value_heads": 4},
}
OWN_TOWER: dict[str, dict[str, Any]] = {
    **{key: {"deepstack_visual_indexes": [0]} for key in ("qwen3_vl", "qwen3_vl_moe", "cosmos3_omni")},
    "inkling2": {"text_hidden_size": 32},
    "nemotron_h_omni": {"video_temporal_patch_size": 2},
    "paddleocr_vl": {"temporal_patch_size": 1},
}


def families() -> list[str]:
    """List the families that transformers builds for images and text, without another spelling of one."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    return [name + SUFFIX for name in sorted(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)]


def config_of(family: str, sizes: dict[str, Any], own: dict[str, dict[str, Any]]) -> Any:
    """Build a tiny config; ``sizes`` and ``own`` are those of the language models."""
    from transformers import AutoConfig

    name = family.removesuffix(SUFFIX)
    sizes = sizes | {"max_position_embeddings": LONGEST}
    default = type(AutoConfig.for_model(name))()
    inner = {key: value for key, value in vars(default).items() if hasattr(value, "to_dict")}
    keys: dict[str, Any] = {}
    for key, value in inner.items():
        is_text = value is default.get_text_config()
        keys[key] = {"model_type": value.model_type, **_known(value, sizes if is_text else TOWER)}
        keys[key] |= own.get(value.model_type, {}) | OWN_TEXT.get(name, {}) if is_text else OWN_TOWER.get(name, {})
    keys |= {} if inner else _known(default, sizes)
    ids = [key for key, value in vars(default).items() if key.endswith(("_token_id", "_token_index")) and value]
    keys |= {key: LAST - number for number, key in enumerate(key for key in ids if getattr(default, key) > LAST)}
    keys |= _known(default, {"mm_tokens_per_image": 4})
    return type(default)(**keys | OWN.get(name, {}))


def _known(config: Any, sizes: dict[str, Any]) -> dict[str, Any]:
    settable = {key for key in sizes if not isinstance(getattr(type(config), key, None), property)}
    return {key: sizes[key] for key in settable if getattr(config, key, None) is not None}


def batches(model: Any, vocabulary: int) -> list[dict[str, Any]]:
    """Make each step's batch of rows with images, without ``images_per_row`` where rows can be told without."""
    import torch

    from meshwright.introspection.images import PIXELS, ImageArguments, length_for, pictured, sizes_of
    from meshwright.introspection.signature import Signature

    images = ImageArguments.of(model)
    if images is None:
        raise ValueError("its config names no token of images")
    sizes = sizes_of(model, images)
    if not sizes:
        raise ValueError("no images could be made for it")
    made = []
    is_required = PIXELS in Signature.of(model).required
    for step, (counts, text) in enumerate(zip(COUNTS, LENGTHS, strict=True)):
        counts = (1, 1, 1, 1) if is_required else counts
        generator = torch.Generator().manual_seed(step)
        length = length_for(counts, sizes) + text
        drawn = torch.randint(3, vocabulary // 2, (len(counts), length), generator=generator)
        batch = pictured(drawn, counts, images, sizes, generator, torch.float32)
        batch["labels"] = torch.randint(3, vocabulary // 2, (len(counts), length), generator=generator)
        batch["labels"][batch["tokens"] == images.token] = -100
        made.append(batch)
    return made
