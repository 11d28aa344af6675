"""Initialise weights: each rank its own shards, bitwise equal on every layout.

A model that a function, a class or a config builds gets its constructor's values (``constructed``). meshwright's own
decoder has a weight law: a parameter's values are a function of (seed, global name, position). The parameter is cut
into blocks of whole rows, at most ``BLOCK_ELEMENTS`` each (but at least one row), and each block is drawn from a
generator seeded by (seed, name, block number), in fp32, on the parameter's device (or another: a CPU and a GPU draw
different values from one seed). A rank draws the blocks that overlap its shard, so its peak is its own share plus one
block. The decoder's buffers, and all of a model that was built on meta, are initialised by their modules
(``constructed``).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.core.errors import ConfigError
from meshwright.core.names import clean
from meshwright.introspection.adapted_model import base_name, host_of_magnitude, is_adapter

from .constructed import Destinations, initialise_by_modules, write_constructed
from .shards import apply_to_tensors, draw_rows, pieces
from .whole_state import whole_everywhere

Weights = Callable[[nn.Module], set[str]]
"""Writes every parameter and persistent buffer of a laid-out model, and returns their names. Collective."""


def materialise(
    model: nn.Module,
    device: torch.device,
    seed: int,
    ties: dict[str, str],
    draw_on: str | None = None,
    weights: Weights | None = None,
) -> set[str]:
    """Allocate and write the weights of a model on meta (only shards, where it is sharded); return the names written.

    Args:
        ties: other name -> first name of each tied parameter.
        draw_on: device type on which values are drawn; by default the parameters' own.
        weights: function that writes the parameters, instead of an initialiser; adapters among them have their
            constructor's values before.

    Raises:
        UnsupportedError: a module has parameters or buffers and no initialiser.
        ConfigError: a ``weight_law`` returns neither "normal" nor "constant", or ``weights`` leaves out a parameter.
    """
    apply_to_tensors(model, lambda tensor: torch.empty_like(tensor, device=device))
    tie(model, ties)
    names = [clean(raw) for raw, _ in model.named_parameters()]
    adapters = {name for name in names if is_adapter(name) and host_of_magnitude(name) is None}
    with torch.no_grad():
        if weights is not None:
            written = write_constructed(model, seed, draw_on, only=_buffers(model) | adapters)
            written |= initialise_by_modules(model, seed, written, buffers_only=True) | weights(model)
            written |= write_magnitudes(model, written)
            if left := [name for name in names if name not in written]:
                raise ConfigError(
                    f"weights= wrote no {', '.join(left[:4])} ({len(left)} parameters in all): it must write every one"
                )
            return written
        if not hasattr(model, "weight_law"):
            return _initialised(model, seed, draw_on)
        written = write_by_law(model, seed, draw_on) | write_constructed(model, seed, draw_on, only=adapters)
        return written | write_magnitudes(model, written)


def _buffers(model: nn.Module) -> set[str]:
    return {clean(name) for name, _ in model.named_buffers()}


def tie(model: nn.Module, ties: dict[str, str]) -> None:
    """Tie parameters again: the allocation gave every name its own tensor."""
    for alias, first in ties.items():
        path, _, name = alias.rpartition(".")
        setattr(model.get_submodule(path), name, model.get_parameter(first))


def _initialised(model: nn.Module, seed: int, draw_on: str | None = None) -> set[str]:
    """Write the values of known constructors, and the rest by the modules' own initialisers."""
    written = write_constructed(model, seed, draw_on)
    later = {name for raw, _ in model.named_parameters() if host_of_magnitude(name := clean(raw)) is not None} - written
    written |= initialise_by_modules(model, seed, written | later)
    return written | write_magnitudes(model, written)


def write_magnitudes(model: nn.Module, written: set[str]) -> set[str]:
    """Write the magnitudes of DoRA (arXiv 2402.09353) that have no values yet: the lengths of their weights' rows.

    peft computes them where it makes an adapter, from the weights that are there; here adapters are made before. So
    they are computed behind, of whole rows, by peft's own function. Adapters begin with a product of zero, so the
    lengths are those of the weights alone. Collective over each weight's mesh; one whole weight is in memory at a time.

    Args:
        written: names of the parameters that have their values.

    Returns:
        The names written.
    """
    held: dict[str, Tensor] = {clean(raw): parameter for raw, parameter in model.named_parameters()}
    found: set[str] = set()
    for raw, magnitude in model.named_parameters():
        host = host_of_magnitude(name := clean(raw))
        if host is None or name in written:
            continue
        weight = held[host]
        whole = whole_everywhere(weight) if isinstance(weight, DTensor) else weight.detach()
        layer: Any = model.get_submodule(raw.rpartition(".")[0])
        added = torch.zeros_like(whole.T if layer.fan_in_fan_out else whole, memory_format=torch.contiguous_format)
        length = layer.get_weight_norm(whole, added, 1)
        for piece in pieces(magnitude):
            piece.local.copy_(length[piece.slices])
        found.add(name)
    return found


def _normal(block: Tensor, generator: torch.Generator, std: float) -> None:
    block.normal_(0.0, std, generator=generator)


def write_by_law(model: nn.Module, seed: int, draw_on: str | None = None) -> set[str]:
    """Write parameters by a model's ``weight_law``, in place, whole or sharded; return the names written.

    The law knows parameters by their names without adapters, and adapters not at all.
    """
    written = initialise_by_modules(model, seed, buffers_only=True)  # the law covers parameters only
    destinations = Destinations(model)
    for raw, parameter in model.named_parameters():
        if is_adapter(full := clean(raw)):
            continue
        name = base_name(full)
        kind, value = model.weight_law(name)  # type: ignore[operator]
        if kind not in ("constant", "normal"):
            raise ConfigError(
                f"weight_law({name!r}) of {type(model).__name__} says {kind!r}: legal are 'normal' and 'constant'"
            )
        with destinations.opened(parameter) as tensor:
            for piece in pieces(tensor):
                if kind == "constant":
                    piece.local.fill_(value)
                else:
                    shape, drawn = tuple(tensor.shape), partial(_normal, std=value)
                    draw_rows(piece.local, piece.offset, shape, drawn, seed, name, draw_on)
        written.add(full)
    return written
