"""Tell what parameters are for, from the modules that hold them."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshwright.core.dtypes import torch_dtype
from meshwright.core.names import around, clean, is_within, owner, pattern
from meshwright.core.torch_private import tree_leaves
from meshwright.introspection.blocks import CONTAINERS, repeated_blocks
from meshwright.introspection.calls import watching
from meshwright.introspection.module_kinds import module_kinds
from meshwright.introspection.small.copies import copy_of
from meshwright.introspection.small.sample import Sample
from meshwright.introspection.structure.experts import find_stacks

# --- find the linear layers whose weights other code reads in a forward, beside the layers themselves

MAY_READ = ("meshwright.", "torch.distributed.", "torch.nn.modules.module", "torch._", "torch.fx.")
"""Modules whose code does not compute with the weights that it reads."""
OWN = "torch.nn.modules.linear"


def reader_of(frame: Any, *others: str) -> str:
    """Return the module and function that a frame belongs to; "" if it, or one of ``others``, may read a weight."""
    module = frame.f_globals.get("__name__", "")
    return "" if f"{module}.".startswith((*MAY_READ, *others)) else f"{module}: {frame.f_code.co_name}"


class _Watched(nn.Linear):
    """A linear layer that notes in ``read_by`` who reads its weight."""

    read_by: str = ""

    def __getattr__(self, name: str) -> Any:
        if name == "weight" and (reader := reader_of(sys._getframe(1), OWN)):
            self.__dict__["read_by"] = reader
        return super().__getattr__(name)


def find_readers(sample: Sample) -> dict[str, str]:
    """Map patterns of linear layers' paths to code that reads their weights; empty where the sample's forwards fail."""
    model = copy_of(sample.model)
    watched = {clean(raw): module for raw, module in model.named_modules() if type(module) is nn.Linear}
    for module in watched.values():
        module.__class__ = _Watched
    if not _runs(model, sample):  # the layers themselves refuse readers of bytes
        return {}
    return {pattern(path): module.read_by for path, module in watched.items() if module.read_by}  # type: ignore[union-attr]


# --- find the linear layers of a model's blocks, and the routers among them


def linears_of_blocks(model: nn.Module, blocks: tuple[str, ...]) -> dict[str, nn.Linear]:
    """Map paths to the linear layers inside blocks."""
    named = {clean(raw): module for raw, module in model.named_modules() if isinstance(module, nn.Linear)}
    return {path: module for path, module in named.items() if any(is_within(path, block) for block in blocks)}


def routers_among(model: nn.Module, linears: dict[str, nn.Linear]) -> Iterator[str]:
    """Yield layers beside a stack, an output per expert, alone in their module (shared experts are several)."""
    for stack in find_stacks(model).values():
        beside = owner(stack.path)
        place = {path: path.removeprefix(f"{beside}.").partition(".")[0] for path in linears if is_within(path, beside)}
        alone = Counter(place.values())
        yield from (
            path for path, child in place.items() if alone[child] == 1 and linears[path].out_features == stack.experts
        )


# --- find the modules during whose calls parameters are used, and the dtypes of what modules take and return


class _Uses(TorchFunctionMode):
    """Notes for each parameter the modules that were being called at each of its uses."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.names: dict[int, str] = {}
        self.calling: list[str] = []
        self.homes: dict[str, set[str]] = {}
        for path, module in model.named_modules():
            here = clean(path)
            module.register_forward_pre_hook(lambda *_, here=here: self.calling.append(here))
            module.register_forward_hook(lambda *_: (self.calling.pop(), None)[1], always_call=True)
            for name, parameter in module.named_parameters(recurse=False):
                self.names.setdefault(id(parameter), f"{here}.{name}" if here else name)

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(isinstance(leaf, Tensor) for leaf in tree_leaves(result)):  # else its shape or dtype was asked for
            for name in {self.names[id(leaf)] for leaf in tree_leaves((args, kwargs)) if id(leaf) in self.names}:
                around = {pattern(path) for path in self.calling if is_within(name, path)}
                self.homes[pattern(name)] = self.homes.get(pattern(name), around) & around
        return result


def find_homes(sample: Sample) -> dict[str, str]:
    """Map patterns of parameters to those of the innermost modules during whose calls alone they are used.

    Empty where the sample's forwards fail.
    """
    model = copy_of(sample.model)
    with _Uses(model) as uses:
        if not _runs(model, sample):  # parameters are then taken to be used by the modules that hold them
            return {}
    return {name: max(around, key=len, default="") for name, around in uses.homes.items()}


def dtypes_of_calls(sample: Sample, dtypes: Mapping[str, str]) -> dict[str, frozenset[str]]:
    """Map patterns of modules to the floating dtypes of what they take and return; empty where a forward fails.

    Args:
        dtypes: pattern of a parameter or buffer -> dtype in which it computes.
    """
    model, found = copy_of(sample.model), dict[str, frozenset[str]]()
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if (dtype := dtypes.get(pattern(clean(name)))) is not None and tensor.is_floating_point():
            tensor.data = tensor.data.to(torch_dtype(dtype))

    def note(path: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        leaves = [leaf for leaf in tree_leaves((args, kwargs, output)) if isinstance(leaf, Tensor)]
        named = {str(leaf.dtype).removeprefix("torch.") for leaf in leaves if leaf.is_floating_point()}
        found[pattern(path)] = found.get(pattern(path), frozenset()) | named

    with watching(model.named_modules(), after=note):
        return found if _runs(model, sample) else {}  # its author alone knows which dtypes it takes


def _runs(model: nn.Module, sample: Sample) -> bool:
    """Run a model on the sample's inputs; return whether no forward fails."""
    with torch.no_grad(), contextlib.suppress(Exception):  # whatever the model's code raises
        for inputs in sample.inputs:
            model(**inputs)
        return True
    return False


# --- find the hidden matrices of a model


def hidden_matrices(model: nn.Module) -> frozenset[str]:
    """Name the matrices inside the repeated blocks: weights of linear layers, and stacks of them, one per expert.

    The rest are embeddings, heads, norms, biases, parameters that no linear layer multiplies by, matrices of one row
    or column, and routers: the linear layers beside a stack or a list of experts that have a row for each of them.
    """
    blocks, kinds, stacks = frozenset(repeated_blocks(model)), module_kinds(model), find_stacks(model)
    lists = {clean(raw): len(module) for raw, module in model.named_modules() if isinstance(module, CONTAINERS)}
    inside = {path: number for path, number in lists.items() if number > 1 and not blocks.isdisjoint(around(path))}
    experts_in: dict[str, list[tuple[str, int]]] = {}  # by module around them, in a stack or in a list
    for path, number in {**{path: stack.experts for path, stack in stacks.items()}, **inside}.items():
        experts_in.setdefault(owner(path), []).append((path, number))
    names: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    for raw, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(clean(raw))
        tensors[id(parameter)] = parameter

    def is_matrix(name: str, shape: tuple[int, ...]) -> bool:
        path = owner(name)
        if blocks.isdisjoint(around(path)) or min(shape[-2:]) == 1:
            return False
        if path in stacks:
            return len(shape) == 3
        is_router = any(
            shape[0] == experts and not is_within(path, place)
            for outer in ("", *around(path))
            for place, experts in experts_in.get(outer, ())
        )
        # a module that stands at several places has its kind at the first of them
        return (
            kinds.get(path, "linear layer") == "linear layer"
            and name.endswith("weight")
            and len(shape) == 2
            and not is_router
        )

    return frozenset(
        known[0]
        for key, known in names.items()
        if tensors[key].dim() > 1 and all(is_matrix(name, tuple(tensors[key].shape)) for name in known)
    )
