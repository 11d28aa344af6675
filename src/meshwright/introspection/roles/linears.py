"""Find the linear layers of a model's blocks, and the routers among them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import nn

from meshwright.core.names import clean, is_within, owner
from meshwright.introspection.structure.experts import find_stacks


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
