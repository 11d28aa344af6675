"""Reach private parts of transformers, which no other module touches; functions name the public way they await."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

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


def build_again(kind: Any, config: Any) -> nn.Module:
    """Build a model of a class from its config, as its constructor does. Waits for: a ``from_config`` of all."""
    return kind._from_config(copy.deepcopy(config))


def tensor_plan_of(module: nn.Module) -> Mapping[str, str] | None:
    """Return a module's own tensor-parallel plan. Waits for: a ``tp_plan`` of every class (some have one)."""
    plan = getattr(module, "_tp_plan", None)
    return plan if isinstance(plan, Mapping) else None


def attention_of(model: nn.Module) -> str:
    """Return the name of the implementation that computes a model's attention. Waits for: a public getter."""
    return name_of_attention(getattr(model, "config", None))


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
