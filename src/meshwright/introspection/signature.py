"""Map the keys of a batch to the arguments of a model's forward."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.core.devices import to_device

from .wrapped import layers_of_wrapping

REFERENCE = "reference_log_probs"
"""The key of a batch that a loss of pairs reads, and no model."""

IMAGES_PER_ROW = "images_per_row"
"""The key of a batch that deals its images to rows, and that no model reads."""

TARGETS = ("labels", "loss_mask", REFERENCE, IMAGES_PER_ROW)
"""Keys of a batch that are read by a loss of logits, or by what deals rows, and not by the model."""

KEEPING = ("logits_to_keep", "num_logits_to_keep")
"""Arguments of transformers' models that choose the tokens whose logits are computed, by number or by place."""

SPELLINGS = {
    "tokens": ("tokens", "input_ids"),
    "positions": ("positions", "position_ids"),
    "document_ids": ("document_ids",),
}
SWITCHED_OFF = ("use_cache", "output_router_logits")
"""Arguments that switch on outputs of transformers models which training does not use.

Keys and values for generation take memory, and make each compiled block compile separately, since each writes to
its own place. Routers' logits come with a loss over one rank's tokens only (``router_loss`` takes all ranks').
"""


@dataclass(frozen=True)
class Signature:
    """A model's inputs: batch key -> the model's argument name (None: the model does not take that key)."""

    arguments: tuple[str, ...]
    takes: dict[str, str | None]
    positions_part_documents: bool = False
    """Whether positions that restart at 0 keep packed documents apart; see ``ParallelModel.learn_documents``."""
    required: tuple[str, ...] = ()
    """Arguments without a default."""

    @classmethod
    def of(cls, model: nn.Module) -> Signature:
        names = tuple(
            dict.fromkeys(name for layer in layers_of_wrapping(model) for name in (*_named(layer), *_of_config(layer)))
        )
        takes = {key: next((s for s in spellings if s in names), None) for key, spellings in SPELLINGS.items()}
        if takes["tokens"] is None and names:
            takes["tokens"] = names[0]
        return cls(names, takes, required=tuple(_required(model)))

    def inputs(
        self, batch: Mapping[str, Tensor], device: torch.device, *, with_targets: bool = False
    ) -> dict[str, Any]:
        """Return the keyword arguments of the model's forward for a batch.

        Args:
            with_targets: a declared loss reads the batch: labels are passed on where the forward takes them, and keys
                that it does not take are the loss's.
        """
        found: dict[str, Any] = {name: False for name in SWITCHED_OFF if name in self.arguments}
        for key, value in batch.items():
            name = self.takes.get(key, key)
            if name is not None and (name in self.arguments if with_targets else key not in TARGETS):
                found[name] = to_device(value, device)
        return found

    def argument_of(self, key: str) -> str | None:
        """Return the argument that a batch's key is passed as; None if the forward has no such argument."""
        name = self.takes.get(key, key)
        return name if name in self.arguments else None


def _of_config(model: nn.Module) -> list[str]:
    """List the switches that a forward with ``**kwargs`` reads from its config, or its text's, if not passed."""
    takes_any = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(model.forward).parameters.values())
    config: Any = getattr(model, "config", None)
    parts = (config, config.get_text_config()) if hasattr(config, "get_text_config") else (config,)
    known = [name for name in SWITCHED_OFF if any(isinstance(getattr(part, name, None), bool) for part in parts)]
    return known if takes_any else []


def _required(model: nn.Module) -> list[str]:
    takes = inspect.signature(model.forward).parameters.values()
    return [p.name for p in takes if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def _named(model: nn.Module) -> list[str]:
    takes = inspect.signature(model.forward).parameters.values()
    return [p.name for p in takes if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
