"""Say whether a run's model takes images, and load its processor when data needs it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.core.errors import ConfigError
from meshwright.data.sources.records import MEDIA_COLUMNS as COLUMNS
from meshwright.data.sources.records import Record

from .files import PROCESSOR_FILES

if TYPE_CHECKING:
    from .processor import VisionProcessor

CONFIG, TOWER = "config.json", "vision_config"
"""A model's config, and its key that describes the part for images."""
IMAGE_PARTS = {"image": ("image", "path", "url"), "image_url": ("image_url",)}
"""Types of a message's parts that are images, and the keys that hold their path."""
PROMPTS, ANSWERS = ("prompt", "question"), ("completion", "answer")
"""Columns of a prompt and its answer, where a record has images and no messages."""


def names_images(record: Record) -> bool:
    """Return whether a record has images: in a column of them, or as parts of messages."""
    if any(record.get(name) for name in COLUMNS):
        return True
    return any(
        isinstance(part, dict) and part.get("type") in IMAGE_PARTS
        for value in record.values()
        if isinstance(value, list)
        for message in value
        if isinstance(message, dict) and isinstance(message.get("content"), list)
        for part in message["content"]
    )


@dataclass(frozen=True)
class Vision:
    """How a run's data is read where records have images.

    Attributes:
        folder: of a model with a processor; None where records with images are refused.
        refusal: why they are, as the end of a sentence.
        trust_remote_code: whether code that lies in the folder may run.
    """

    folder: Path | None = None
    refusal: str = "and here no model takes images: name one with model.hf"
    trust_remote_code: bool = False

    @cached_property
    def processor(self) -> VisionProcessor:
        """The model's processor, loaded at the first use. Raises as ``VisionProcessor`` does."""
        from .processor import VisionProcessor

        if self.folder is None:
            raise ConfigError(f"data.source has images, {self.refusal}")
        return VisionProcessor(self.folder, trust_remote_code=self.trust_remote_code)


NO_IMAGES = Vision()


def vision_of(model: str, *, trust_remote_code: bool = False) -> Vision:
    """Return the vision of the model in a folder (``model.hf``; "" for a built-in one). Imports nothing."""
    folder = Path(model).expanduser() if model else None
    if folder is None:
        return Vision(refusal="and the run's model takes no images: name a vision-language model with model.hf")
    keys = _keys(folder / CONFIG if folder.is_dir() else folder)
    if not isinstance(keys.get(TOWER), dict):
        return Vision(refusal=f"and the model of model.hf = {model} takes no images (its config has no {TOWER})")
    if not folder.is_dir() or not any((folder / name).is_file() for name in PROCESSOR_FILES):
        return Vision(
            refusal=f"and beside the model of model.hf = {model} lies no processor ({' or '.join(PROCESSOR_FILES)}),"
            f" which turns them into tokens and pixels: copy it there from the model's folder"
        )
    return Vision(folder, "", trust_remote_code)


def _keys(config: Path) -> dict[str, Any]:
    try:
        found = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):  # refused, with the reason, where the model is read
        return {}
    return found if isinstance(found, dict) else {}
