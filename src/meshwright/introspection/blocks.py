"""Find a model's repeated blocks from its structure alone, or from the hints that its code does not show.

Hints come first, measurement second, the model's own plan third; whichever supplies the plan, a rehearsal proves the
layout.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from meshwright.core.errors import ConfigError, nearest
from meshwright.core.names import around, clean, is_within, pattern, selected
from meshwright.core.record import recall, remember

# --- describe a model that measurement cannot read, by the few facts that its code does not show


@dataclass(frozen=True)
class Hints:
    """The facts about a model that its author gives; in patterns of module paths, ``*`` stands for a part of a name.

    Attributes:
        blocks: patterns of the repeated blocks, which are called in the order of their registration. Empty: the
            children of lists of modules.
        residual: argument of a block that is the residual stream (rows, seq, features): its name or position,
            without ``self``. None: the first floating point tensor of three dims.
        regions: pattern of a module -> its style of tensor parallelism, as in ``techniques.tensor_plan``, which
            replaces these. Empty: the regions that measurement finds are cut.
        whole: patterns of modules that stay whole on every rank of the tensor axis.
    """

    blocks: tuple[str, ...] = ()
    residual: int | str | None = None
    regions: Mapping[str, str] = field(default_factory=dict)
    whole: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("blocks", "whole"):
            value = getattr(self, name)
            if isinstance(value, str) or not all(isinstance(text, str) for text in value):
                raise ConfigError(f"hints: {name} = {value!r}: it is a tuple of patterns, such as ('layer_*',)")
            object.__setattr__(self, name, tuple(value))

    def keeps_whole(self, path: str) -> bool:
        """Return whether the module at a path, or one around it, stays whole."""
        return any(selected(text, ("", *around(path))) for text in self.whole)


NONE = Hints()


def hints_of(model: nn.Module) -> Hints:
    """Return the hints that were given for the model."""
    return recall(model, Hints) or NONE


def give(model: nn.Module, hints: Hints) -> None:
    """Give hints for a model, before it is planned or laid out; raise ConfigError if they do not fit it."""
    paths = [clean(path) for path, _ in model.named_modules() if path]
    for name in ("blocks", "whole"):
        for text in getattr(hints, name):
            if not selected(text, paths):
                known = dict.fromkeys(pattern(path) for path in paths)
                raise ConfigError(
                    f"hints: {name}: '{text}' names no module of this {type(model).__name__}.{nearest(text, known)}"
                )
    found = blocks_in(model, hints)
    inside = next((path for path in found for other in found if path != other and is_within(path, other)), None)
    if inside is not None:
        raise ConfigError(f"hints: blocks: {inside} lies inside another block. Name the outer ones or the inner ones.")
    remember(model, hints)


def blocks_in(model: nn.Module, hints: Hints) -> tuple[str, ...]:
    """List the modules that hints name as blocks, in registration order."""
    paths = [clean(path) for path, _ in model.named_modules() if path]
    named = {path for text in hints.blocks for path in selected(text, paths)}
    return tuple(path for path in paths if path in named)


def built_with(hints: Hints, build: Callable[[], Any]) -> Any:
    """Build a model by a function, and give hints for it."""
    made = build()
    if isinstance(made, nn.Module):
        give(made, hints)
    return made


# --- find a model's repeated blocks from its structure alone

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
                name: child
                for name, child in module.named_children()
                if not holds_containers
                and not isinstance(child, ParametrizationList)  # how one weight is computed
                and next(child.parameters(), None) is not None
                and next(child.children(), None) is not None
            }
            uniform = len({type(child) for child in children.values()}) == 1 and len(children) > 1
            if children and (uniform or not isinstance(module, nn.Sequential)):
                found.update({f"{path}.{name}" if path else name: child for name, child in children.items()})
                return
        for name, child in module.named_children():
            walk(f"{path}.{name}" if path else name, child)

    walk("", model)

    def uses(module: nn.Module) -> Counter[int]:
        return Counter(id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False))

    # a block's parameters are used as often in the block as in the model
    whole = uses(model)
    return tuple(clean(path) for path, block in found.items() if all(whole[key] == n for key, n in uses(block).items()))


def attention_modules(model: nn.Module, blocks: tuple[str, ...]) -> tuple[str, ...]:
    """List the outermost modules within the blocks that are called attention and have matrices, by path."""
    found: list[str] = []
    for raw, module in model.named_modules():
        path = clean(raw)
        places = around(path)
        if set(places[1:]).isdisjoint(blocks) or not set(places).isdisjoint(found):
            continue
        words = f"{path.rpartition('.')[2]} {type(module).__name__}".lower()
        has_linear = any(p.dim() >= 2 for p in module.parameters())
        if has_linear and ("attn" in words or "attention" in words):
            found.append(path)
    return tuple(found)
