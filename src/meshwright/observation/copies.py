"""Find what a script keeps of a model's parameters beside them: a teacher, an average, weights of full precision.

Like the recorder, this file is loaded by its path into whatever environment the script has, so it imports torch alone.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from meshwright.observation.pieces import WRAPPERS, Piece, walk
from meshwright.observation.sketches import local_of

Held = dict[str, tuple[Any, Piece]]
"""Name of a parameter -> the tensor that holds it, and what of it."""
NEAR = 0.5
"""How far a copy is from the parameters at most, as a part of their norm; gradients and moments are no copies."""
MOST_COPIES = 3
MOST_OBJECTS = 10_000
CLOSED = type(sys), weakref.ProxyType, weakref.CallableProxyType
"""Objects in which no copy is looked for: modules of Python, and what stands for another object."""
INSIDE = {attribute for attributes in WRAPPERS.values() for attribute in attributes}


class Copies:
    """What a script keeps of the stepped parameters beside them.

    A copy is a model with names of stepped parameters, of which no optimizer steps one, or a dict by name or a list of
    tensors that are near the parameters.
    """

    def __init__(self) -> None:
        self.models: list[weakref.ref[nn.Module]] = []
        self.are_sought = False

    def find(self, models: Iterable[nn.Module], stepped: Held) -> None:
        """Look for copies among models without stepped parameters, and in dicts and lists."""
        self.models = [
            weakref.ref(model) for model in models if (held := _held_by(model)) and held.keys() <= stepped.keys()
        ]
        self.are_sought = bool(_kept_beside(stepped))

    def now(self, stepped: Held) -> list[tuple[str, Held]]:
        """Return the copies' owners and tensors, for which a script may have put others; nothing if there are many."""
        every = _kept_beside(stepped) if self.are_sought else []
        every += [(model, _held_by(model)) for model in (known() for known in self.models) if model is not None]
        if len(every) > MOST_COPIES:
            return []
        owners = _owners({id(kept) for kept, _ in every}) if every else {}
        return [(owners.get(id(kept), ""), held) for kept, held in every]


def _held_by(model: nn.Module) -> Held:
    found: dict[int, tuple[Any, list[Piece]]] = {}
    walk(model, "", found, {})
    return {piece.name: (tensor, piece) for tensor, pieces in found.values() for piece in pieces}


def _owners(wanted: set[int]) -> dict[int, str]:
    """Name objects as the script reaches them from its variables, like ``trainer.average``, over three attributes."""
    frame, found, seen = sys._getframe(1), dict[int, str](), set[int]()
    every = [*vars(sys.modules["__main__"]).items()]
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] not in ("torch", "meshwright", "_meshwright_recorder"):
            every += frame.f_locals.items()
        frame = frame.f_back
    for _ in range(4):
        inner = []
        for name, value in every:
            if (
                id(value) in seen
                or not isinstance(name, str)
                or name.startswith("_")
                or issubclass(type(value), CLOSED)
            ):
                continue
            seen.add(id(value))
            if id(value) in wanted:
                found[id(value)] = name
            elif len(seen) < MOST_OBJECTS:
                held = value if type(value) is dict else getattr(value, "__dict__", {})
                inner += [(f"{name}.{key}", other) for key, other in [*held.items()] if not str(key).startswith("_")]
        every = inner
    return found


def _kept_beside(stepped: Held) -> list[tuple[Any, Held]]:
    """Find the dicts and lists that are copies of all parameters, or of all that are trained, and their tensors."""
    if any(piece.whole is not None for _, piece in stepped.values()):
        return []  # flat shards have no tensors of their own
    trained = {name: held for name, held in stepped.items() if held[0].requires_grad}
    if len(trained) < 2:
        return []
    kinds, copies = (dict, OrderedDict, list), []
    for kept in gc.get_objects():
        if type(kept) not in kinds or len(kept) < len(trained):
            continue
        first = next(iter(kept if type(kept) is list else kept.values()))
        if isinstance(first, Tensor) and not isinstance(first, nn.Parameter):
            copies.append((kept, _as_copy(kept, stepped if len(kept) == len(stepped) else trained)))
    return [(kept, copy) for kept, copy in copies if copy]


def _as_copy(kept: Any, wanted: Held) -> Held:
    """Return by name what a dict or list of tensors keeps of the wanted parameters, if it keeps all and near them."""
    if type(kept) is list:
        by_name = dict(zip(wanted, kept, strict=True)) if len(kept) == len(wanted) else {}
    else:
        by_name = {".".join(part for part in str(key).split(".") if part not in INSIDE): kept[key] for key in [*kept]}
    if not wanted.keys() <= by_name.keys():
        return {}
    found = {name: (by_name[name], piece) for name, (_, piece) in wanted.items()}
    away, size = 0.0, 0.0
    for name, (tensor, _) in found.items():
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point() or tensor.is_meta:
            return {}
        copied, own = local_of(tensor.detach()), local_of(wanted[name][0].detach())
        if copied.shape != own.shape or copied.untyped_storage().data_ptr() == own.untyped_storage().data_ptr():
            return {}  # the parameters themselves
        away += float((copied.double() - own.double()).square().sum())
        size += float(own.double().square().sum())
    return found if 0 < size and away <= NEAR**2 * size else {}
