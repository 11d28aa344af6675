"""How a model wants its inputs."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .wrapped import layers_of_wrapping

SPELLINGS = {"tokens": ("tokens", "input_ids"), "positions": ("positions", "position_ids"), "document_ids": ("document_ids",)}
KEEPS_CACHE = "use_cache"
"""The argument by which models of transformers are told whether to keep keys and values for generation. A training forward has no use for
them; they take memory, and each compiled block would be a compilation of its own, since it writes to a place of its own."""


@dataclass(frozen=True)
class Signature:
    """How a model wants its inputs: our batch key -> its argument name (None: it does not take that)."""

    arguments: tuple[str, ...]
    takes: dict[str, str | None]
    positions_part_documents: bool = False
    """Whether positions that begin again at 0 keep packed documents apart; see ``ParallelModel.learn_documents``."""

    @classmethod
    def of(cls, model: nn.Module) -> Signature:
        names = tuple(dict.fromkeys(name for layer in layers_of_wrapping(model) for name in _named(layer)))
        takes = {key: next((s for s in spellings if s in names), None) for key, spellings in SPELLINGS.items()}
        if takes["tokens"] is None and names:
            takes["tokens"] = names[0]
        return cls(names, takes)

    def inputs(self, batch: Mapping[str, Tensor], device: torch.device) -> dict[str, Any]:
        """Keyword arguments of the model's forward."""
        found: dict[str, Any] = {KEEPS_CACHE: False} if KEEPS_CACHE in self.arguments else {}
        for key, value in batch.items():
            if key in ("labels", "loss_mask"):
                continue
            name = self.takes.get(key, key)
            if name is not None:
                found[name] = value.to(device, non_blocking=True)
        return found


def _named(model: nn.Module) -> list[str]:
    takes = inspect.signature(model.forward).parameters.values()
    return [p.name for p in takes if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
