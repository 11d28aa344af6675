"""Weights of models that bring their own initialisers: ``reset_parameters`` (torch's convention; ``_reset_parameters`` too).

Children come before parents, as in a constructor. A module's initialiser runs on whole CPU stand-ins of its parameters and buffers
and of those inside it (a parent may set its children's), with torch's generator seeded by (seed, path of the module); then each
rank cuts its part. So the values depend on no layout, and one module at a time is whole.

A pretrained model of transformers initialises its modules from outside (``_init_weights(module)``); what that writes is found out on
meta first, so that the outer modules, which hardly write anything, need no stand-ins. What it leaves alone, ``reset_parameters`` makes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshwright.core.errors import UnsupportedError
from meshwright.core.names import clean, owner
from meshwright.introspection.huggingface import brings_initialiser

from .constructed import write_constructed
from .shards import pieces, seed_of


def initialise_by_modules(model: nn.Module, seed: int, *, buffers_only: bool = False) -> set[str]:
    """Write every parameter and buffer of ``model`` in place (whole or sharded); returns their names.

    Args:
        buffers_only: only modules with buffers of their own are initialised; what they write into parameters does not count.

    Raises:
        UnsupportedError: nothing initialises some of them; the text names them and the module that should.
    """
    written, small = write_constructed(model, next(model.parameters()).device, seed)
    wanted = {id(tensor): clean(name) for name, tensor in (model.named_buffers() if buffers_only else _tensors(model))}
    pretrained = _pretrained_owners(model)
    for raw, module in reversed(list(model.named_modules())):
        path, made = clean(raw), set()
        if path in pretrained and not buffers_only:
            made = _run_from_outside(module, pretrained[path], seed_of(seed, path))
        elif path not in pretrained and callable(reset := _reset_of(module)) and (module._buffers or not buffers_only):
            made = _run(module, reset, seed_of(seed, path))
        written |= {wanted[key] for key in made if key in wanted}
    for name in set(small) & set(wanted.values()) - written:
        _write(model.get_parameter(name), small[name])
        written.add(name)
    left = [name for name in wanted.values() if name not in written]
    if left:
        path = owner(left[0])
        names = ", ".join(name.rpartition(".")[2] for name in left if owner(name) == path)
        raise UnsupportedError(
            f"module '{path or 'the model itself'}' ({type(model.get_submodule(path)).__name__}) was built on meta and nothing initialises"
            f" its {names}: give it a reset_parameters() that does, or build the model on the CPU with its weights"
        )
    return written


def _reset_of(module: nn.Module) -> Callable[[], object] | None:
    return getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)


def _pretrained_owners(model: nn.Module) -> dict[str, nn.Module]:
    """Path of every module in a pretrained model -> the innermost pretrained model around it (or itself)."""
    owners: dict[str, nn.Module] = {}
    for raw, module in model.named_modules():
        path = clean(raw)
        if brings_initialiser(module):
            owners[path] = module
        elif path and owner(path) in owners:
            owners[path] = owners[owner(path)]
    return owners


def _run_from_outside(module: nn.Module, pretrained: nn.Module, seed: int) -> set[int]:
    """What ``pretrained`` makes of the parameters of ``module``; buffers are the constructor's."""
    initialise = torch.no_grad()(partial(pretrained._init_weights, module))  # type: ignore[arg-type]
    touched = _touched(module, initialise)
    left = {id(tensor) for tensor in module._parameters.values() if tensor is not None} - touched
    made: set[int] = set()
    if left and callable(reset := _reset_of(module)):
        made |= _run(module, reset, seed, left)
    return made | _run(module, initialise, seed, touched)


def _touched(module: nn.Module, initialise: Callable[[], object]) -> set[int]:
    """Ids of the tensors inside ``module`` that an initialiser writes."""
    with _stand_ins(module, device="meta") as pairs, _Writes() as writes:
        storages = {id(tensor): find().untyped_storage()._cdata for tensor, find in pairs}
        initialise()
    return {key for key, storage in storages.items() if storage in writes.storages}


class _Writes(TorchDispatchMode):
    """Notes the storages that operators write into; so a view, or ``.data``, counts as its tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write and place < len(args):
                self.storages |= {t.untyped_storage()._cdata for t in tree_leaves(args[place]) if isinstance(t, Tensor)}
        return func(*args, **(kwargs or {}))


def _run(module: nn.Module, reset: Callable[[], object], seed: int, only: set[int] | None = None) -> set[int]:
    """Run one initialiser and write what it set; returns the ids of the tensors that it set whole.

    Args:
        only: ids of the tensors inside that get stand-ins; by default all. Then only parameters are written.
    """
    if only is not None and not only:
        return set()
    with _stand_ins(module, only=only) as pairs:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.manual_seed(seed)
            reset()
        made = [(tensor, find().detach()) for tensor, find in pairs]
    whole = set()
    for tensor, value in made:
        untouched = _untouched(value)
        if untouched.all() or (only is not None and not isinstance(tensor, nn.Parameter)):
            continue
        _write(tensor, value, untouched)
        if not untouched.any():
            whole.add(id(tensor))
    return whole


def _write(tensor: Tensor, value: Tensor, untouched: Tensor | None = None) -> None:
    """This rank's part of a whole value, but for the elements that were not touched."""
    for piece in pieces(tensor):
        local, cut = piece.local, piece.slices
        made = value[cut].to(local)
        local.copy_(made if untouched is None else torch.where(untouched[cut].to(local.device), local, made))


@contextmanager
def _stand_ins(
    module: nn.Module, *, only: set[int] | None = None, device: str = "cpu"
) -> Iterator[list[tuple[Tensor, Callable[[], Tensor]]]]:
    """Put unwritten tensors in place of all parameters and buffers inside (or ``only`` of some); gives (original, how to find its
    stand-in)."""
    kept: list[tuple[dict, dict]] = []
    made: dict[int, Tensor] = {}
    pairs: list[tuple[Tensor, Callable[[], Tensor]]] = []
    for part in module.modules():
        for held in cast("list[dict[str, Any]]", [part._parameters, part._buffers]):
            kept.append((held, dict(held)))
            for name, tensor in list(held.items()):
                if tensor is None or (only is not None and id(tensor) not in only):
                    continue
                if id(tensor) not in made:
                    blank = torch.full(tensor.shape, _blank(tensor.dtype), dtype=tensor.dtype, device=device)
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
    """Where a stand-in was not written."""
    if value.is_floating_point() or value.is_complex():
        return torch.isnan(value)
    return ~value if value.dtype == torch.bool else value == _blank(value.dtype)


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()
