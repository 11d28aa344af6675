"""Find the modules during whose calls parameters are used, and the dtypes of what modules take and return."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshwright.core.dtypes import torch_dtype
from meshwright.core.names import clean, is_within, pattern
from meshwright.core.torch_private import tree_leaves
from meshwright.introspection.small.copies import copy_of
from meshwright.introspection.small.sample import Sample


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
    with torch.no_grad(), _Uses(model) as uses:
        for inputs in sample.inputs:
            try:
                model(**inputs)
            except Exception:  # noqa: BLE001  (parameters are then taken to be used by the modules that hold them)
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
    for path, module in model.named_modules():
        here = pattern(clean(path))

        def note(_: Any, args: Any, kwargs: Any, output: Any, here: str = here) -> None:
            leaves = [leaf for leaf in tree_leaves((args, kwargs, output)) if isinstance(leaf, Tensor)]
            named = {str(leaf.dtype).removeprefix("torch.") for leaf in leaves if leaf.is_floating_point()}
            found[here] = found.get(here, frozenset()) | named

        module.register_forward_hook(note, with_kwargs=True)
    with torch.no_grad():
        for inputs in sample.inputs:
            try:
                model(**inputs)
            except Exception:  # noqa: BLE001  (its author alone knows which dtypes it takes)
                return {}
    return found
