"""The tensor-parallel plan that a model brings along, as models of transformers do: module patterns -> style words."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from meshwright.core.names import clean, selected
from meshwright.introspection.transformers_private import tensor_plan_of

from .module_kinds import module_kinds, tied_modules


def own_tensor_plan(model: nn.Module) -> dict[str, str]:
    """What ``_tp_plan`` of the model and of its submodules and ``base_model_tp_plan`` of their configs say, by names of ``model``.

    A plan serves several shapes of a family: patterns that name nothing here are left out. Of a tied weight, whose plan names one module
    only, the other is there too.
    """
    found: dict[str, str] = {}
    for raw, module in model.named_modules():
        path = clean(raw)
        base = getattr(module, "base_model_prefix", "")
        inner = path if not base or not hasattr(module, base) else ".".join(filter(None, (path, base)))
        for prefix, plan in ((path, tensor_plan_of(module)), (inner, _of_config(module))):
            if isinstance(plan, Mapping):
                for key, style in plan.items():
                    found.setdefault(f"{prefix}.{key}" if prefix else key, style)
    names = module_kinds(model)
    kept = {key: style for key, style in found.items() if selected(key, names)}
    return kept | _of_tied(model, kept)


def _of_config(module: nn.Module) -> object:
    return getattr(getattr(module, "config", None), "base_model_tp_plan", None) if hasattr(module, "base_model_prefix") else None


def _of_tied(model: nn.Module, plan: dict[str, str]) -> dict[str, str]:
    """Of an embedding or head whose partner is named alone."""
    found: dict[str, str] = {}
    for paths in tied_modules(model):
        if not any(path in plan for path in paths):
            continue
        for path in paths:
            if path not in plan:
                is_embedding = isinstance(model.get_submodule(path), nn.Embedding)
                found[path] = "embedding_rowwise" if is_embedding else "colwise_gather_output"
    return found
