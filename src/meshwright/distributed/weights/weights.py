"""Make weights: each rank its own share, bitwise equal on every layout.

A model that a function, a class or a config builds gets what its constructor computes (``constructed``). Our own
decoder has a law: a parameter's values are a function of (seed, global name, position). It is cut into blocks of
whole rows, at most ``BLOCK_ELEMENTS`` each (one row at least), and each block is drawn from a generator seeded by
(seed, name, block number), in fp32, on the parameter's device (or another: a CPU and a GPU draw different values from
one seed). A rank draws the blocks that overlap its shard, so its peak is its own share plus one block. Its buffers
come from their modules' own initialisers, as does all of a model that was handed over on meta (``module_weights``).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from meshwright.core.errors import ConfigError
from meshwright.core.names import clean

from .constructed import write_constructed
from .drawing import draw_rows
from .module_weights import initialise_by_modules
from .shards import apply_to_tensors, pieces

Weights = Callable[[nn.Module], set[str]]
"""Writes every parameter and persistent buffer of a model that lies where it belongs; returns their names.
Collective."""


def materialise(
    model: nn.Module,
    device: torch.device,
    seed: int,
    ties: dict[str, str],
    draw_on: str | None = None,
    weights: Weights | None = None,
) -> set[str]:
    """Give a model on meta its weights, shards only where it is sharded already; returns the names written.

    Args:
        ties: other name -> first name, of the parameters that are one.
        draw_on: device type on which values are drawn; by default the parameters' own.
        weights: where the parameters come from, instead of an initialiser.

    Raises:
        UnsupportedError: a module has parameters or buffers and no way to initialise them.
        ConfigError: a ``weight_law`` that says neither "normal" nor "constant", or ``weights`` that are not all.
    """
    apply_to_tensors(model, lambda tensor: torch.empty_like(tensor, device=device))
    _tie(model, ties)
    with torch.no_grad():
        if weights is not None:
            written = _initialised(model, seed, buffers_only=True) | weights(model)
            if left := [clean(name) for name, _ in model.named_parameters() if clean(name) not in written]:
                raise ConfigError(
                    f"weights= wrote no {', '.join(left[:4])} ({len(left)} parameters in all): it must write every one"
                )
            return written
        return (
            write_by_law(model, seed, draw_on) if hasattr(model, "weight_law") else _initialised(model, seed, draw_on)
        )


def _tie(model: nn.Module, ties: dict[str, str]) -> None:
    """``to_empty`` gives every name a tensor of its own; make the tied ones one again."""
    for alias, first in ties.items():
        path, _, name = alias.rpartition(".")
        setattr(model.get_submodule(path), name, model.get_parameter(first))


def _initialised(model: nn.Module, seed: int, draw_on: str | None = None, *, buffers_only: bool = False) -> set[str]:
    """Initialise as the constructor does where that is known, else by the modules' own initialisers."""
    written = write_constructed(model, seed, draw_on, buffers_only=buffers_only)
    return written | initialise_by_modules(model, seed, written, buffers_only=buffers_only)


def _normal(block: Tensor, generator: torch.Generator, std: float) -> None:
    block.normal_(0.0, std, generator=generator)


def write_by_law(model: nn.Module, seed: int, draw_on: str | None = None) -> set[str]:
    """Write what a model's ``weight_law`` says, in place, whole or sharded; returns the names."""
    written = initialise_by_modules(model, seed, buffers_only=True)  # the law is about parameters
    for raw, parameter in model.named_parameters():
        name = clean(raw)
        kind, value = model.weight_law(name)  # type: ignore[operator]
        if kind not in ("constant", "normal"):
            raise ConfigError(
                f"weight_law({name!r}) of {type(model).__name__} says {kind!r}: legal are 'normal' and 'constant'"
            )
        for piece in pieces(parameter):
            if kind == "constant":
                piece.local.fill_(value)
            else:
                shape, drawn = tuple(parameter.shape), partial(_normal, std=value)
                draw_rows(piece.local, piece.offset, shape, drawn, seed, name, draw_on)
        written.add(name)
    return written
