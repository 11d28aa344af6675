"""Initialise a model built on meta by its modules' ``reset_parameters`` (or ``_reset_parameters``).

This is for models whose constructor is unknown; other initialisation in it is lost (see ``constructed``).

Children come before parents, as in a constructor. A module's initialiser runs on unsharded CPU stand-ins of its
parameters and buffers and of those inside it (a parent may set its children's), with torch's generator seeded by
(seed, path of the module). Then each rank copies its shards. So the values do not depend on the layout, and only one
module at a time is unsharded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from meshwright.core.errors import UnsupportedError
from meshwright.core.names import clean, owner
from meshwright.core.torch_private import resetting
from meshwright.introspection.source import builder_of

from .destinations import Destinations
from .shards import pieces, seed_of


def initialise_by_modules(
    model: nn.Module, seed: int, done: Collection[str] = (), *, buffers_only: bool = False
) -> set[str]:
    """Write every parameter and buffer of ``model`` in place (whole or sharded) that is not in ``done``.

    Returns the names written.

    Args:
        done: names of parameters and buffers that have their values already.
        buffers_only: initialise only modules with their own buffers; parameters that they write are not reported.

    Raises:
        UnsupportedError: no module initialises some of them; the text names them and the module that should.
    """
    written: set[str] = set()
    every = model.named_buffers() if buffers_only else (*model.named_parameters(), *model.named_buffers())
    wanted = {id(tensor): name for raw, tensor in every if (name := clean(raw)) not in done}
    asked: list[tuple[str, nn.Module, Callable[[], object]]] = []
    last: dict[int, nn.Module] = {}
    for raw, module in reversed(list(model.named_modules())) if wanted else ():
        held = [
            tensor for inner in module.modules() for tensor in (*inner._parameters.values(), *inner._buffers.values())
        ]
        is_asked = any(id(tensor) in wanted for tensor in held) and (module._buffers or not buffers_only)
        if is_asked and callable(reset := resetting(module)):
            asked.append((clean(raw), module, reset))
            last |= {id(tensor): module for tensor in held}
    destinations = Destinations(model)
    for path, module, reset in asked:
        found = _run(module, reset, seed_of(seed, path), destinations)
        written |= {wanted[key] for key in found if key in wanted}
        destinations.close(key for key, closing in last.items() if closing is module)
    left = [name for name in wanted.values() if name not in written]
    if left:
        path = owner(left[0])
        names = ", ".join(name.rpartition(".")[2] for name in left if owner(name) == path)
        other = (
            ""
            if builder_of(model) is not None
            else ", hand over the function that builds the model instead of the model"
        )
        raise UnsupportedError(
            f"module '{path or 'the model itself'}' ({type(model.get_submodule(path)).__name__}) was built on meta"
            f" and nothing initialises its {names}: give it a reset_parameters() that does{other}, or build the model"
            f" on the CPU with its weights"
        )
    return written


def _run(module: nn.Module, reset: Callable[[], object], seed: int, destinations: Destinations) -> set[int]:
    """Run one initialiser and copy the elements that it set; return the ids of the tensors that it set completely."""
    with _stand_ins(module, destinations) as pairs:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.manual_seed(seed)
            reset()
        made = [(tensor, find().detach()) for tensor, find in pairs]
    whole = set()
    for tensor, value in made:
        untouched = _untouched(value)
        if untouched.all():
            continue
        for piece in pieces(destinations.begun(tensor)):
            local, cut = piece.local, piece.slices
            local.copy_(torch.where(untouched[cut].to(local.device), local, value[cut].to(local)))
        if not untouched.any():
            whole.add(id(tensor))
    return whole


@contextmanager
def _stand_ins(module: nn.Module, destinations: Destinations) -> Iterator[list[tuple[Tensor, Callable[[], Tensor]]]]:
    """Replace all parameters and buffers inside by unwritten CPU tensors; restore them on exit.

    Yields pairs of an original and a function that returns its stand-in.
    """
    kept: list[tuple[dict, dict]] = []
    made: dict[int, Tensor] = {}
    pairs: list[tuple[Tensor, Callable[[], Tensor]]] = []
    for part in module.modules():
        for held in cast("list[dict[str, Any]]", [part._parameters, part._buffers]):
            kept.append((held, dict(held)))
            for name, tensor in list(held.items()):
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    shape, dtype = destinations.shape_of(tensor), destinations.dtype_of(tensor)
                    blank = torch.full(shape, _blank(dtype), dtype=dtype, device="cpu")
                    made[id(tensor)] = nn.Parameter(blank, tensor.requires_grad) if held is part._parameters else blank
                    pairs.append((tensor, lambda held=held, name=name: held[name]))
                held[name] = made[id(tensor)]
    try:
        yield pairs
    finally:
        for held, before in kept:
            held.update(before)


def _blank(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return False if dtype == torch.bool else torch.iinfo(dtype).max


def _untouched(value: Tensor) -> Tensor:
    """Return a mask of the elements of a stand-in that were not written."""
    if value.is_floating_point() or value.is_complex():
        return torch.isnan(value)
    return ~value if value.dtype == torch.bool else value == _blank(value.dtype)
