"""Find a model's repeated blocks from its structure alone."""

from __future__ import annotations

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from meshwright.core.names import clean, is_within

from .hints import blocks_in, hints_of

CONTAINERS = (nn.ModuleList, nn.ModuleDict)
"""Modules that only hold others and are never called."""


def repeated_blocks(model: nn.Module) -> tuple[str, ...]:
    """List the paths of the repeated blocks, in registration (= forward) order.

    A block is a child of a ``ModuleList`` or ``ModuleDict`` (or of a ``Sequential`` whose children are all of one
    class) that has parameters and submodules of its own. The outermost such containers count, so the experts inside
    a block do not. A container of containers only names its parts: ``nn.ModuleDict(dict(wte=..., h=...))``. If the
    model's hints name blocks, those are the blocks. Blocks that share a parameter with the rest of the model, or
    appear twice, are left out: they cannot be units of their own.
    """
    found: dict[str, nn.Module] = {}
    if (hints := hints_of(model)).blocks:
        return blocks_in(model, hints)

    def walk(path: str, module: nn.Module) -> None:
        if isinstance(module, (*CONTAINERS, nn.Sequential)):
            holds_containers = any(isinstance(child, CONTAINERS) for child in module.children())
            children = {
                name: child for name, child in module.named_children() if _is_block(child) and not holds_containers
            }
            uniform = len({type(child) for child in children.values()}) == 1 and len(children) > 1
            if children and (uniform or not isinstance(module, nn.Sequential)):
                found.update({f"{path}.{name}" if path else name: child for name, child in children.items()})
                return
        for name, child in module.named_children():
            walk(f"{path}.{name}" if path else name, child)

    walk("", model)
    uses: dict[int, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    return tuple(clean(path) for path, block in found.items() if not _shares(block, uses))


def attention_modules(model: nn.Module, blocks: tuple[str, ...]) -> tuple[str, ...]:
    """List the outermost modules within the blocks that are called attention and have matrices, by path."""
    found: list[str] = []
    for raw, module in model.named_modules():
        path = clean(raw)
        inside = any(is_within(path, block) and path != block for block in blocks)
        if not inside or any(is_within(path, earlier) for earlier in found):
            continue
        words = f"{path.rpartition('.')[2]} {type(module).__name__}".lower()
        has_linear = any(p.dim() >= 2 for p in module.parameters())
        if has_linear and ("attn" in words or "attention" in words):
            found.append(path)
    return tuple(found)


def _is_block(module: nn.Module) -> bool:
    if isinstance(module, ParametrizationList):  # how one weight is computed
        return False
    return next(module.parameters(), None) is not None and next(module.children(), None) is not None


def _shares(block: nn.Module, uses: dict[int, int]) -> bool:
    inside: dict[int, int] = {}
    for _, parameter in block.named_parameters(remove_duplicate=False):
        inside[id(parameter)] = inside.get(id(parameter), 0) + 1
    return any(uses[key] != count for key, count in inside.items())
