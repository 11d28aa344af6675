"""How a model wants its inputs."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

SPELLINGS = {"tokens": ("tokens", "input_ids"), "positions": ("positions", "position_ids"), "document_ids": ("document_ids",)}


@dataclass(frozen=True)
class Signature:
    """How a model wants its inputs: our batch key -> its argument name (None: it does not take that)."""

    arguments: tuple[str, ...]
    takes: dict[str, str | None]
    positions_part_documents: bool = False
    """Whether positions that begin again at 0 keep packed documents apart; see ``ParallelModel.learn_documents``."""

    @classmethod
    def of(cls, model: nn.Module) -> Signature:
        names = tuple(name for name, p in inspect.signature(model.forward).parameters.items() if p.kind is not p.VAR_KEYWORD)
        takes = {key: next((s for s in spellings if s in names), None) for key, spellings in SPELLINGS.items()}
        if takes["tokens"] is None and names:
            takes["tokens"] = names[0]
        return cls(names, takes)

    def inputs(self, batch: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
        """Keyword arguments of the model's forward."""
        found = {}
        for key, value in batch.items():
            if key in ("labels", "loss_mask"):
                continue
            name = self.takes.get(key, key)
            if name is not None:
                found[name] = value.to(device, non_blocking=True)
        return found
