"""Tiny processors, made on the spot, and folders of models, records and images."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np

from support.pictures import config_of

SPECIAL = {
    "llava": ["<s>", "</s>", "<image>"],
    "gemma3": ["<bos>", "<eos>", "<image_soft_token>", "<start_of_image>", "<end_of_image>"],
    "qwen2_5_vl": ["<|im_start|>", "<|im_end|>", "<|image_pad|>", "<|video_pad|>", "<|vision_start|>"],
    "smolvlm": ["<s>", "<end_of_utterance>", "<image>", "<fake_token_around_image>", "<global-img>"]
    + [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)],
}
PLACE = {
    "llava": "<image>",
    "gemma3": "<start_of_image>",
    "qwen2_5_vl": "<|vision_start|><|image_pad|>",
    "smolvlm": "<image>",
}
"""The text that a template writes for an image."""
LLAVA = {"patch_size": 8, "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"}
"""Of LLaVA-1.5: the tower's class token is counted, and left out again."""
COLOURS = ("red", "green", "blue", "white")


def template_of(family: str) -> str:
    """A template as these families have it: contents are lists of parts."""
    begin, end = SPECIAL[family][:2]
    parts = (
        "{% for part in m['content'] %}{% if part['type'] == 'image' %}"
        + PLACE[family]
        + "{% else %}{{ part['text'] }}{% endif %}{% endfor %}"
    )
    return (
        (begin if family == "gemma3" else "")
        + "{% for m in messages %}{{ m['role'] }}: "
        + parts
        + "{% if m['role'] == 'assistant' %}"
        + end
        + "{% endif %}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    )


def tokenizer_of(family: str) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=SPECIAL[family],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(["user: what colour is it? assistant: it is " + " ".join(COLOURS)] * 4, trainer)
    begin, end, image = SPECIAL[family][:3]
    if family == "llava":  # puts its first token before each text, as Llama's does
        made.post_processor = processors.TemplateProcessing(single=f"{begin} $A", special_tokens=[(begin, 0)])
    extra: dict[str, Any] = {"image_token": image}
    if family == "gemma3":
        extra |= {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
    if family == "smolvlm":
        extra |= {"fake_image_token": "<fake_token_around_image>", "global_image_token": "<global-img>"}
    begins = {} if family in ("qwen2_5_vl", "smolvlm") else {"bos_token": begin}
    return PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token=end, pad_token=end, extra_special_tokens=extra, **begins
    )


def processor_of(family: str) -> Any:
    """The processor of a family with images of a few patches; those of videos need torchvision, and are left out."""
    import transformers

    tokenizer, template = tokenizer_of(family), template_of(family)
    if family == "llava":
        images = transformers.CLIPImageProcessorPil(
            size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}, do_center_crop=True
        )
        return transformers.LlavaProcessor(images, tokenizer, **LLAVA, chat_template=template)
    if family == "gemma3":
        images = transformers.Gemma3ImageProcessorPil(size={"height": 32, "width": 32})
        return transformers.Gemma3Processor(images, tokenizer, chat_template=template, image_seq_length=4)
    if family == "qwen2_5_vl":
        images = transformers.Qwen2VLImageProcessorPil(
            patch_size=4, merge_size=2, temporal_patch_size=2, size={"shortest_edge": 64, "longest_edge": 512}
        )
        kind = _without_videos(transformers.Qwen2_5_VLProcessor)
        return kind(images, tokenizer, None, chat_template=template)
    images = transformers.Idefics3ImageProcessorPil(
        size={"longest_edge": 64}, max_image_size={"longest_edge": 32}, do_image_splitting=True
    )
    return transformers.Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=template)


def _without_videos(kind: type) -> Any:
    def check(self: Any, argument_name: str, argument: Any) -> Any:
        return None if argument is None else kind.check_argument_for_proper_class(self, argument_name, argument)

    return type(kind.__name__, (kind,), {"check_argument_for_proper_class": check})


def model_folder(family: str, folder: Path, *, weights: bool = False, **changes: Any) -> Path:
    """A folder as ``save_pretrained`` of model and processor leave it; ``changes`` are of the text's config."""
    processor = processor_of(family)
    folder.mkdir(parents=True, exist_ok=True)
    processor.tokenizer.save_pretrained(folder)
    processor.image_processor.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(template_of(family))
    sizes = {"llava": LLAVA, "gemma3": {"image_seq_length": 4}, "smolvlm": {"image_seq_len": 4}}
    name = type(processor).__name__
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": name, **sizes.get(family, {})}))
    config = config_of(family, vocab_size=512, **changes)
    config.image_token_id = processor.tokenizer.convert_tokens_to_ids(SPECIAL[family][2])
    ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    for key, value in ids.items():
        setattr(config.get_text_config(), key, value)
    config.save_pretrained(folder)
    if weights:
        import torch
        import transformers

        torch.manual_seed(0)
        transformers.AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    return folder


def draw_image(path: Path, width: int, height: int, seed: int = 0) -> Path:
    """A picture of noise, so that no two are alike."""
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path)
    return path


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def asks(*images: str, about: str = "what colour is it?", answer: str = "it is red") -> dict[str, Any]:
    """A conversation about images, as Hugging Face's data sets have it."""
    content = [*({"type": "image", "image": image} for image in images), {"type": "text", "text": about}]
    return {
        "messages": [
            {"role": "user", "content": content},
            {"role": "assistant", "content": [{"type": "text", "text": answer}]},
        ]
    }
