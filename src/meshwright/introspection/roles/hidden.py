"""Find the hidden matrices of a model: the parameters that an optimizer of whole matrices steps."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from meshwright.core.names import clean, is_within, owner
from meshwright.introspection.blocks import CONTAINERS, repeated_blocks
from meshwright.introspection.module_kinds import module_kinds
from meshwright.introspection.structure.experts import find_stacks


def hidden_matrices(model: nn.Module) -> frozenset[str]:
    """Name the matrices inside the repeated blocks: weights of linear layers, and stacks of them, one per expert.

    The rest are embeddings, heads, norms, biases, parameters that no linear layer multiplies by, matrices of one row
    or column, and routers: the linear layers beside a stack or a list of experts that have a row for each of them.
    """
    blocks, kinds, stacks = frozenset(repeated_blocks(model)), module_kinds(model), find_stacks(model)
    experts_in = _experts_in(model, blocks, {path: stack.experts for path, stack in stacks.items()})
    names: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    for raw, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(clean(raw))
        tensors[id(parameter)] = parameter

    def is_matrix(name: str, shape: tuple[int, ...]) -> bool:
        path = owner(name)
        if blocks.isdisjoint(_around(path)) or min(shape[-2:]) == 1:
            return False
        if path in stacks:
            return len(shape) == 3
        is_router = any(
            shape[0] == experts and not is_within(path, place)
            for outer in _around(path)
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


def _experts_in(
    model: nn.Module, blocks: frozenset[str], stacks: Mapping[str, int]
) -> dict[str, list[tuple[str, int]]]:
    """Map modules to (path, number) of the experts that they hold, stacked or in a list inside a block."""
    lists = {clean(raw): len(module) for raw, module in model.named_modules() if isinstance(module, CONTAINERS)}
    inside = {path: number for path, number in lists.items() if number > 1 and not blocks.isdisjoint(_around(path))}
    found: dict[str, list[tuple[str, int]]] = {}
    for path, number in {**stacks, **inside}.items():
        found.setdefault(owner(path), []).append((path, number))
    return found


def _around(path: str) -> list[str]:
    """List a module's path and those of the modules around it: large models have too many to compare with each."""
    parts = path.split(".")
    return ["", *(".".join(parts[: place + 1]) for place in range(len(parts)))]
