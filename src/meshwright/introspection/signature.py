"""Map the keys of a batch to the arguments of a model's forward, and find the logits in its output."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.core.devices import to_device
from meshwright.core.errors import UnsupportedError

# --- find models inside others that pass their inputs on, as adapter libraries wrap them


def layers_of_wrapping(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the model, then each model inside that receives its wrapper's inputs unchanged; the innermost last.

    That is the only child with parameters, where the wrapper has none of its own, and either takes any arguments, or
    takes any keyword and shows the child's config as its own.
    """
    yield model
    children = [child for child in model.children() if next(child.parameters(), None) is not None]
    if len(children) != 1 or any(parameter is not None for parameter in model._parameters.values()):
        return
    kinds = {parameter.kind for parameter in _arguments(model)}
    takes_anything = kinds == {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    config = getattr(model, "config", None)
    shows_config = config is not None and getattr(children[0], "config", None) is config
    if takes_anything or (inspect.Parameter.VAR_KEYWORD in kinds and shows_config):
        yield from layers_of_wrapping(children[0])


def core_of(model: nn.Module) -> nn.Module:
    """Return the innermost wrapped model, the one that a config builds."""
    *_, core = layers_of_wrapping(model)
    return core


# --- map the keys of a batch to the arguments of a model's forward

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
        found: dict[str, None] = {}
        for layer in layers_of_wrapping(model):
            given = _arguments(layer)
            found |= dict.fromkeys(p.name for p in given if p.kind not in _VARIADIC)
            if any(p.kind is p.VAR_KEYWORD for p in given):  # reads switches from its config, or its text's
                config: Any = getattr(layer, "config", None)
                parts = (config, config.get_text_config()) if hasattr(config, "get_text_config") else (config,)
                switches = (name for name in SWITCHED_OFF if any(isinstance(getattr(p, name, 0), bool) for p in parts))
                found |= dict.fromkeys(switches)
        names = tuple(found)
        takes = {key: next((s for s in spellings if s in names), None) for key, spellings in SPELLINGS.items()}
        if takes["tokens"] is None and names:
            takes["tokens"] = names[0]
        return cls(
            names,
            takes,
            required=tuple(p.name for p in _arguments(model) if p.default is p.empty and p.kind not in _VARIADIC),
        )

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


_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _arguments(model: nn.Module) -> list[inspect.Parameter]:
    return list(inspect.signature(model.forward).parameters.values())


# --- find the logits in a model's output


def logits_of(output: Any) -> Tensor:
    """Return the logits of a forward's output; UnsupportedError, if none or several values could be, proposes which.

    The logits are a tensor output itself, its ``logits``, or its only floating (rows, seq, vocabulary).
    """
    if isinstance(output, Tensor):
        return output
    named = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    if isinstance(named, Tensor):
        return named
    values = (
        tuple(output.values()) if isinstance(output, Mapping) else output if isinstance(output, (tuple, list)) else ()
    )
    found = [value for value in values if isinstance(value, Tensor) and value.is_floating_point() and value.dim() == 3]
    if len(found) == 1:
        return found[0]
    kinds = [f"{tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__ for value in values]
    parts = list(map(str, output)) if isinstance(output, Mapping) else kinds
    is_of_parts = isinstance(output, (Mapping, tuple, list))
    words = f"a {type(output).__name__}" + (f" of {', '.join(parts) or 'nothing'}" if is_of_parts else "")
    raise UnsupportedError(
        f"the model's forward returns {words}, in which {len(found) or 'no'} tensors could be the logits"
        " (rows, seq, vocabulary). Return the logits alone, or in an object or a dict under the name logits, or as the"
        " only floating tensor of three dims."
    )


def with_logits(output: Any, logits: Tensor) -> Any:
    """Return a forward's output with other logits in the place of those that ``logits_of`` finds."""
    found = logits_of(output)
    if found is output:
        return logits
    if isinstance(output, (tuple, list)):
        return type(output)(logits if value is found else value for value in output)
    if not isinstance(output, Mapping):
        output = copy.copy(output)
        output.logits = logits
        return output
    output = copy.copy(output)
    output[next(key for key, value in output.items() if value is found)] = logits  # type: ignore[index]
    return output
