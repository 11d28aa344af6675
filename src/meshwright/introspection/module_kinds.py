"""What the modules of a model are, as far as it decides how they can be cut."""

from __future__ import annotations

from typing import Literal

from torch import nn

from meshwright.core.names import clean

ModuleKind = Literal["linear layer", "embedding", "norm", "container", "parameter", "module of its own kind"]


def module_kinds(model: nn.Module) -> dict[str, ModuleKind]:
    """Path -> kind, of every module; parameters that are no weight or bias (stacked experts) by their own names."""
    found: dict[str, ModuleKind] = {}
    for raw, module in model.named_modules():
        path = clean(raw)
        found[path] = _kind(module)
        for name, parameter in module._parameters.items():
            if parameter is not None and name not in ("weight", "bias"):
                found[f"{path}.{name}" if path else name] = "parameter"
    return found


def _kind(module: nn.Module) -> ModuleKind:
    own = [parameter for parameter in module._parameters.values() if parameter is not None]
    weight = module._parameters.get("weight")
    if not own:
        return "container"
    if isinstance(module, nn.Embedding):
        return "embedding"
    if weight is not None and weight.dim() == 2:
        return "linear layer"
    return "norm" if all(parameter.dim() < 2 for parameter in own) else "module of its own kind"


def tied_modules(model: nn.Module) -> list[tuple[str, ...]]:
    """Paths of modules that share their weight, together."""
    found: dict[int, list[str]] = {}
    for raw, module in model.named_modules():
        weight = module._parameters.get("weight")
        if weight is not None:
            found.setdefault(id(weight), []).append(clean(raw))
    return [tuple(paths) for paths in found.values() if len(paths) > 1]
