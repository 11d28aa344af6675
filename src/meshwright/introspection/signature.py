"""Read off a model's forward which inputs it takes."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .wrapped import layers_of_wrapping

SPELLINGS = {
    "tokens": ("tokens", "input_ids"),
    "positions": ("positions", "position_ids"),
    "document_ids": ("document_ids",),
}
SWITCHED_OFF = ("use_cache", "output_router_logits")
"""Arguments by which models of transformers are asked for what a training forward has no use for: keys and values for
generation, which take memory and make each compiled block a compilation of its own, since it writes to a place of its
own; and the logits of routers with the loss that is made of them, of one rank's tokens only (``router_loss`` takes
all ranks').
"""


@dataclass(frozen=True)
class Signature:
    """How a model wants its inputs: our batch key -> its argument name (None: it does not take that)."""

    arguments: tuple[str, ...]
    takes: dict[str, str | None]
    positions_part_documents: bool = False
    """Whether positions that begin again at 0 keep packed documents apart; see ``ParallelModel.learn_documents``."""

    @classmethod
    def of(cls, model: nn.Module) -> Signature:
        names = tuple(
            dict.fromkeys(name for layer in layers_of_wrapping(model) for name in (*_named(layer), *_of_config(layer)))
        )
        takes = {key: next((s for s in spellings if s in names), None) for key, spellings in SPELLINGS.items()}
        if takes["tokens"] is None and names:
            takes["tokens"] = names[0]
        return cls(names, takes)

    def inputs(self, batch: Mapping[str, Tensor], device: torch.device) -> dict[str, Any]:
        """Keyword arguments of the model's forward."""
        found: dict[str, Any] = {name: False for name in SWITCHED_OFF if name in self.arguments}
        for key, value in batch.items():
            if key in ("labels", "loss_mask"):
                continue
            name = self.takes.get(key, key)
            if name is not None:
                found[name] = value.to(device, non_blocking=True)
        return found


def _of_config(model: nn.Module) -> list[str]:
    """Return what a forward that takes any keyword reads from its config where it is not told."""
    takes_any = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(model.forward).parameters.values())
    config = getattr(model, "config", None)
    return [name for name in SWITCHED_OFF if takes_any and isinstance(getattr(config, name, None), bool)]


def _named(model: nn.Module) -> list[str]:
    takes = inspect.signature(model.forward).parameters.values()
    return [p.name for p in takes if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
