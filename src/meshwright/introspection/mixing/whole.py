"""Compute what modules are given for pairs of tokens, of whole rows, as far as no weight and no token has a say in it.

Masks, and biases that depend on distances (ALiBi, arXiv 2108.12409), cannot be put together from what ranks make of
their own tokens. The model's own code makes them of whole rows: on a copy whose weights have no values, so that
nothing is computed but what follows from places, positions, padding and buffers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from meshwright.core.errors import UnsupportedError
from meshwright.core.names import clean
from meshwright.core.torch_private import EagerDispatchMode, schema_of, tree_leaves, tree_map, tree_map_with_path
from meshwright.introspection.signature import Signature
from meshwright.introspection.small.copies import meta_copy_of
from meshwright.introspection.structure.experts import find_stacks

META = torch.device("meta")


class _Reached(Exception):
    """All modules were called whose arguments are asked for."""


class WithoutWeights(EagerDispatchMode):
    """Computes an operator with values where all its tensors have some, on one device; else without."""

    def __init__(self, device: torch.device):
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        named: dict[str, Any] = dict(kwargs or {})
        tensors = [leaf for leaf in tree_leaves((args, named)) if isinstance(leaf, Tensor)]
        lacking = sum(tensor.is_meta for tensor in tensors)
        if not lacking and named.get("device") is not None:  # of a tensor without values
            named["device"] = self.device
        if 0 < lacking < len(tensors):
            self._refuse_writes(func, args, named)
            args, named = tree_map(_emptied, args), tree_map(_emptied, named)
        return func(*args, **named)

    def _refuse_writes(self, func: Any, args: tuple, named: dict[str, Any]) -> None:
        for number, argument in enumerate(schema_of(func).arguments):
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            given = args[number] if number < len(args) else named.get(argument.name)
            if is_written and any(isinstance(leaf, Tensor) and not leaf.is_meta for leaf in tree_leaves(given)):
                raise UnsupportedError(f"{func} writes what depends on weights to a tensor that did not")


def _emptied(leaf: Any) -> Any:
    return leaf.to(META) if isinstance(leaf, Tensor) else leaf


def copy_without_values(model: nn.Module) -> nn.Module:
    """Copy a model to meta, where stacks of experts compute nothing."""
    made = meta_copy_of(model)
    for path in find_stacks(made):
        made.get_submodule(path).forward = lambda x, *args, **kwargs: torch.zeros_like(x)
    return made


def whole_arguments(
    model: nn.Module,
    buffers: Mapping[str, Tensor],
    batch: Mapping[str, Tensor],
    wanted: Mapping[str, Iterable[str]],
    device: torch.device,
) -> dict[str, dict[str, Any]]:
    """Run a model without values, and return what its modules are given.

    Args:
        model: made by ``copy_without_values``.
        buffers: their values, as far as they are known.
        batch: of whole rows; which tokens it has does not matter, but for their number.
        wanted: by module, arguments by their paths, such as "[1]['attention_mask']".
        device: where values are; meta: there are none.

    Returns:
        By module, the arguments of its first call. An argument that depends on weights is on meta.

    Raises:
        Exception: whatever the model's code raises that looks at values of weights.
    """
    found: dict[str, dict[str, Any]] = {}

    def note(path: str, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if path not in found:
            found[path] = given = {}
            tree_map_with_path(given.__setitem__, (args, kwargs))
            found[path] = {key: given[key] for key in wanted[path] if key in given}
        if len(found) == len(wanted):
            raise _Reached

    hooks = [
        module.register_forward_pre_hook(partial(note, path), with_kwargs=True)
        for raw, module in model.named_modules()
        if (path := clean(raw)) in wanted
    ]
    tokens = torch.zeros_like(batch["tokens"])
    inputs = Signature.of(model).inputs({**batch, "tokens": tokens}, device)
    try:
        with torch.no_grad(), WithoutWeights(device):
            functional_call(model, dict(buffers), (), inputs)
    except _Reached:
        pass
    finally:
        for hook in hooks:
            hook.remove()
    return found
