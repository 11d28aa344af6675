"""Write the paths of a run's data as absolute ones, so that it can be continued from any folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from meshwright.data import SourceOptions
from meshwright.data.sources.listing import resolved
from meshwright.data.text.tokenizers import BYTES
from meshwright.training.config import DataConfig


def absolute_paths(data: DataConfig) -> dict[str, Any]:
    """Return the data section's paths as absolute ones, so that a run can be continued from any folder."""

    def absolute(path: str) -> str:
        return str(Path(path).expanduser().absolute()) if path else ""

    def source(values: SourceOptions) -> dict[str, Any]:
        return {
            "source": tuple(map(resolved, values.source)),
            "template": absolute(values.template),
        }

    is_path = data.tokenizer != BYTES and not data.tokenizer.startswith(("bpe:", "ids:"))
    parts = tuple(replace(part, **source(part)) for part in data.mixture)
    own = {} if data.mixture else source(data)
    return {
        **own,
        "tokenizer": absolute(data.tokenizer) if is_path else data.tokenizer,
        "cache": absolute(data.cache),
        "mixture": parts,
    }
