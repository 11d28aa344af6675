"""Find the hidden matrices of a model: the parameters that an optimizer of whole matrices steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
    blocks, kinds, stacks = repeated_blocks(model), module_kinds(model), find_stacks(model)
    routed = _routed(model, blocks, {path: stack.experts for path, stack in stacks.items()})
    names: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    for raw, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(clean(raw))
        tensors[id(parameter)] = parameter

    def is_matrix(name: str, shape: tuple[int, ...]) -> bool:
        path = owner(name)
        if not any(is_within(name, block) for block in blocks) or min(shape[-2:]) == 1:
            return False
        if path in stacks:
            return len(shape) == 3
        is_router = any(
            shape[0] == experts and is_within(path, owner(place)) and not is_within(path, place)
            for place, experts in routed.items()
        )
        return kinds[path] == "linear layer" and name.endswith("weight") and len(shape) == 2 and not is_router

    return frozenset(
        known[0]
        for key, known in names.items()
        if tensors[key].dim() > 1 and all(is_matrix(name, tuple(tensors[key].shape)) for name in known)
    )


def _routed(model: nn.Module, blocks: Sequence[str], stacks: Mapping[str, int]) -> dict[str, int]:
    """Map paths of experts, stacked or in a list inside a block, to their number."""
    lists = {clean(raw): module for raw, module in model.named_modules() if isinstance(module, CONTAINERS)}
    inside = {path for path in lists if any(is_within(path, block) for block in blocks)}
    return {**stacks, **{path: len(lists[path]) for path in inside if len(lists[path]) > 1}}
