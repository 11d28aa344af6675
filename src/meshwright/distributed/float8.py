"""Convert linear layers to float8 training (arXiv 2209.05433) with torchao."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from meshwright.core.devices import CUDA
from meshwright.core.errors import ConfigError, MissingExtraError, UnsupportedError, quieten_torchao
from meshwright.core.names import owner
from meshwright.core.record import remember
from meshwright.planning.float8 import Float8Plan
from meshwright.planning.plan import Plan

CAPABILITY = (8, 9)
"""Compute capability of the first NVIDIA GPUs that multiply in float8."""


def apply(model: nn.Module, plan: Plan) -> nn.Module:
    """Convert the planned linear layers in place: parameter objects, names, hooks and modes stay as they are.

    Raises:
        MissingExtraError, UnsupportedError: see ``refuse_absent``.
        ConfigError: another technique has replaced a layer's forward, and the conversion would drop that forward.
    """
    assert plan.float8 is not None
    refuse_absent(plan)
    config = config_of(plan.float8)
    made: dict[nn.Module, nn.Module] = {}
    for path in plan.float8.modules:
        linear = model.get_submodule(path)
        if "forward" in vars(linear):
            raise ConfigError(
                f"{path} has a forward that was put there from outside, and float8 would drop it. Apply float8 first."
            )
        made[linear] = converted = _torchao(plan.float8).convert_to_float8_training(linear, config=config)
        # torchao takes over only the parameters: hooks and other attributes of the instance come along
        own, given = vars(converted), vars(linear)
        own.update({k: v for k, v in given.items() if k not in own or "hook" in k or k == "training"})
    for path, module in list(model.named_modules(remove_duplicate=False)):
        if module in made:
            model.get_submodule(owner(path)).add_module(path.rpartition(".")[2], made[module])
    remember(model, plan.float8)
    return model


def refuse_absent(plan: Plan) -> None:
    """Refuse float8 without torchao, or on a GPU of this process that is too old. Needs no process group."""
    if plan.float8 is None:
        return
    _torchao(plan.float8)
    module = torch.get_device_module(CUDA)
    if plan.device != CUDA or not module.is_available():  # a dry run for CUDA, on a machine without it
        return
    if (found := module.get_device_capability()) < CAPABILITY:
        raise UnsupportedError(
            f"techniques.float8 = {plan.float8.recipe} needs a GPU of compute capability"
            f" {'.'.join(map(str, CAPABILITY))} or newer, and"
            f" {module.get_device_name()} has {'.'.join(map(str, found))}. Set techniques.float8 = none."
        )


def config_of(plan: Float8Plan) -> Any:
    """Return torchao's config of a plan. Raises MissingExtraError without torchao."""
    config = _torchao(plan).Float8LinearConfig.from_recipe_name(plan.recipe)
    # pad_inner_dim: a weight's gradient is a product over tokens, whose number need not be a multiple of 16
    return replace(config, emulate=plan.emulated, pad_inner_dim=not plan.emulated)


def _torchao(plan: Float8Plan) -> Any:
    try:
        quieten_torchao()
        import torchao.float8
    except ImportError as error:
        raise MissingExtraError(f"techniques.float8 = '{plan.recipe}'", "torchao", "float8") from error
    return torchao.float8
