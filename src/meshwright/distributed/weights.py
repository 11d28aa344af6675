"""Weights come into being: each rank makes its own share, and every layout starts bitwise equal.

The law: a parameter's values are a function of (seed, global name, position). It is cut into blocks of whole rows, at most
``BLOCK_ELEMENTS`` each (one row at least), and each block is drawn from a generator seeded by (seed, name, block number), in fp32, on
the parameter's device (or another: a CPU and a GPU draw different values from one seed). A rank draws the blocks that overlap its
shard, so its peak is its own share plus one block.
Buffers come from their module's own initialiser. Models without ``weight_law`` keep their own initialisers (see ``module_weights``).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from meshwright.core.errors import ConfigError
from meshwright.core.names import clean

from .module_weights import initialise_by_modules
from .shards import apply_to_tensors, pieces, seed_of

BLOCK_ELEMENTS = 2**20

Weights = Callable[[nn.Module], set[str]]
"""Writes every parameter and persistent buffer of a model that lies where it belongs; returns their names. Collective."""


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
            written = initialise_by_modules(model, seed, buffers_only=True) | weights(model)
            if left := [clean(name) for name, _ in model.named_parameters() if clean(name) not in written]:
                raise ConfigError(f"weights= wrote no {', '.join(left[:4])} ({len(left)} parameters in all): it must write every one")
            return written
        return _by_law(model, seed, draw_on) if hasattr(model, "weight_law") else initialise_by_modules(model, seed)


def _tie(model: nn.Module, ties: dict[str, str]) -> None:
    """``to_empty`` gives every name a tensor of its own; make the tied ones one again."""
    for alias, first in ties.items():
        path, _, name = alias.rpartition(".")
        setattr(model.get_submodule(path), name, model.get_parameter(first))


def _by_law(model: nn.Module, seed: int, draw_on: str | None) -> set[str]:
    written = initialise_by_modules(model, seed, buffers_only=True)  # the law is about parameters
    for raw, parameter in model.named_parameters():
        name = clean(raw)
        kind, value = model.weight_law(name)  # type: ignore[operator]
        if kind not in ("constant", "normal"):
            raise ConfigError(f"weight_law({name!r}) of {type(model).__name__} says {kind!r}: legal are 'normal' and 'constant'")
        for piece in pieces(parameter):
            if kind == "constant":
                piece.local.fill_(value)
            else:
                fill_normal(piece.local, piece.offset, tuple(parameter.shape), value, seed, name, draw_on)
        written.add(name)
    return written


def fill_normal(
    local: Tensor, offset: tuple[int, ...], shape: tuple[int, ...], std: float, seed: int, name: str, draw_on: str | None = None
) -> None:
    """Write the normal values of the law into ``local``, the part at ``offset`` of a parameter of global ``shape``."""
    if local.numel() == 0:
        return
    row = max(1, int(torch.Size(shape[1:]).numel()))
    rows_per_block = max(1, BLOCK_ELEMENTS // row)
    device = local.device if draw_on in (None, local.device.type) else torch.device(draw_on)
    generator = torch.Generator(device)
    first, last = offset[0], offset[0] + local.shape[0]
    rest = tuple(slice(o, o + n) for o, n in zip(offset[1:], local.shape[1:], strict=True))
    for number in range(first // rows_per_block, -(-last // rows_per_block)):
        start = number * rows_per_block
        rows = min(rows_per_block, shape[0] - start)
        generator.manual_seed(seed_of(seed, name, number))
        block = torch.empty((rows, *shape[1:]), dtype=torch.float32, device=device).normal_(0.0, std, generator=generator)
        low, high = max(first, start), min(last, start + rows)
        local[low - first : high - first].copy_(block[(slice(low - start, high - start), *rest)])
