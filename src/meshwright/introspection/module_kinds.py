"""Tell kinds of modules and tensors, and read the tensor-parallel plan that a model of transformers brings along."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from torch import Tensor, nn

from meshwright.core.names import clean, selected
from meshwright.core.private_names import found

# --- reach private parts of transformers, which no other module touches

KERNEL_KEYS = "_implementation"
"""Suffix of a config's keys that name a kernel: ``_attn_implementation``, ``experts_implementation``."""
ABOUT_THE_FILE = ("transformers_version", "_name_or_path", "dtype", "torch_dtype", "use_cache")
"""Keys of a config that do not describe the model."""


def brings_initialiser(module: nn.Module) -> bool:
    """Return whether a module is a pretrained model that its config can rebuild. Waits for: a public base class."""
    kind = type(module)  # wrappers show the methods of what is inside as their own
    return all(callable(getattr(kind, name, None)) for name in ("_init_weights", "_from_config")) and hasattr(
        module, "config"
    )


@contextmanager
def whole_rows() -> Iterator[None]:
    """Let transformers find one document in each row, as it does where positions have values and nobody gave any.

    Waits for: an argument for documents.
    """
    find = found("transformers.masking_utils.find_packed_sequence_indices")
    module = sys.modules[find.__module__]
    setattr(module, find.__name__, lambda *positions: None)
    try:
        yield
    finally:
        setattr(module, find.__name__, find)


def build_again(kind: Any, config: Any) -> nn.Module:
    """Build a model of a class from its config, as its constructor does. Waits for: a ``from_config`` of all."""
    return kind._from_config(copy.deepcopy(config))


def tensor_plan_of(module: nn.Module) -> Mapping[str, str] | None:
    """Return a module's own tensor-parallel plan. Waits for: a ``tp_plan`` of every class (some have one)."""
    plan = getattr(module, "_tp_plan", None)
    return plan if isinstance(plan, Mapping) else None


def name_of_attention(config: Any) -> str:
    """Return the name in a config of the implementation that computes attention. Waits for: a public getter."""
    name = getattr(config, "_attn_implementation", None)
    return name if isinstance(name, str) else ""


def name_attention(config: Any, name: str) -> None:
    """Write the name of the implementation that computes attention. Waits for: a public setter of modules."""
    config._attn_implementation = name


def compute_experts_one_by_one(config: Any) -> None:
    """Choose the kernel of experts that supports fp64. Waits for: a setter on the built model."""
    if hasattr(config, "_experts_implementation"):
        config._experts_implementation = "eager"


def names_to_ignore(model: nn.Module) -> Sequence[str]:
    """Return patterns of names in older files that the model has no tensors for. Waits for: a public list."""
    return getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()


def has_model(auto: Any, config: Any) -> bool:
    """Return whether an auto class builds a model of a config. Waits for: a public list of what it builds."""
    return type(config) in auto._model_mapping


# --- tell kinds of modules and tensors

BATCH_NORMS = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm
DROPOUTS = nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout

ModuleKind = Literal["linear layer", "embedding", "norm", "container", "parameter", "module of its own kind"]


def module_kinds(model: nn.Module) -> dict[str, ModuleKind]:
    """Map paths of modules to kinds; parameters that are no weight or bias (stacked experts) have their own keys."""
    found: dict[str, ModuleKind] = {}
    for raw, module in model.named_modules():
        path = clean(raw)
        own = [parameter for parameter in module._parameters.values() if parameter is not None]
        weight = module._parameters.get("weight")
        if isinstance(module, nn.Embedding) or not own:
            found[path] = "embedding" if own else "container"
        elif weight is not None and weight.dim() == 2:
            found[path] = "linear layer"
        else:
            found[path] = "norm" if all(parameter.dim() < 2 for parameter in own) else "module of its own kind"
        for name, parameter in module._parameters.items():
            if parameter is not None and name not in ("weight", "bias"):
                found[f"{path}.{name}" if path else name] = "parameter"
    return found


def tied_modules(model: nn.Module) -> list[tuple[str, ...]]:
    """List groups of paths of modules that share their weight."""
    found: dict[int, list[str]] = {}
    for raw, module in model.named_modules():
        weight = module._parameters.get("weight")
        if weight is not None:
            found.setdefault(id(weight), []).append(clean(raw))
    return [tuple(paths) for paths in found.values() if len(paths) > 1]


def is_rounded(tensor: Tensor) -> bool:
    """Return whether a tensor is in float8 already."""
    loaded = sys.modules.get("torchao.float8.float8_training_tensor")
    return loaded is not None and isinstance(tensor, loaded.Float8TrainingTensor)


def children_of(module: nn.Module) -> dict[str, nn.Module]:
    """Return a module's children by name; one that has two names is there twice."""
    inside = module.named_modules(remove_duplicate=False)
    return {name: child for name, child in inside if name and "." not in name}


def config_at(module: nn.Module) -> Any:
    """Return torchao's config of a module that was converted to float8; None for any other."""
    loaded = sys.modules.get("torchao.float8.float8_linear")
    return module.config if loaded is not None and isinstance(module, loaded.Float8Linear) else None


def own_tensor_plan(model: nn.Module) -> dict[str, str]:
    """Collect the ``_tp_plan`` of a model and its submodules, and their configs' ``base_model_tp_plan``.

    Keys are names in ``model``. A plan serves several shapes of a family: patterns that match nothing in this model
    are left out. Where a plan names only one module of a tied weight, the other is added.
    """
    found: dict[str, str] = {}
    for raw, module in model.named_modules():
        path = clean(raw)
        base = getattr(module, "base_model_prefix", None)
        inner = path if not base or not hasattr(module, base) else ".".join(filter(None, (path, base)))
        of_config = getattr(getattr(module, "config", None), "base_model_tp_plan", None) if base is not None else None
        for prefix, plan in ((path, tensor_plan_of(module)), (inner, of_config)):
            if isinstance(plan, Mapping):
                for key, style in plan.items():
                    found.setdefault(f"{prefix}.{key}" if prefix else key, style)
    names = module_kinds(model)
    kept = {key: style for key, style in found.items() if selected(key, names)}
    tied: dict[str, str] = {}
    for paths in tied_modules(model):
        for path in (path for path in paths if path not in kept and any(other in kept for other in paths)):
            is_embedding = isinstance(model.get_submodule(path), nn.Embedding)
            tied[path] = "embedding_rowwise" if is_embedding else "colwise_gather_output"
    return kept | tied
