"""Freeze parameters: they get no gradient and no optimizer state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.core.names import clean
from meshwright.core.record import recall, remember
from meshwright.introspection.facts import ModelFacts
from meshwright.introspection.wrapped import core_of
from meshwright.planning.plan import Plan


@dataclass(frozen=True)
class _Joined:
    """Marks a model whose frozen token embedding takes part in backward."""


def apply(model: nn.Module, plan: Plan) -> nn.Module:
    """Set ``requires_grad`` as planned. It runs before sharding, which reads it."""
    frozen = set(plan.frozen)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(clean(name) not in frozen)
    return model


def join_backward(model: nn.Module, plan: Plan, facts: ModelFacts) -> None:
    """Let a frozen token embedding's output take part in backward, where what makes images' features is trained.

    A batch without images would else need no gradient in front of its first trained block, and none at all where
    images' modules alone are trained: ranks would end their units' backward in other orders, and sum gradients of
    different weights, or have no backward while others wait.
    """
    frozen = {clean(name) for name, parameter in model.named_parameters() if not parameter.requires_grad}
    frozen |= set(plan.frozen)
    trains_images = any(facts.is_of_images(p.name) and p.name not in frozen for p in facts.parameters)
    find = getattr(core_of(model), "get_input_embeddings", None)
    embedding = find() if trains_images and find is not None else None
    if not isinstance(embedding, nn.Module) or recall(model, _Joined) is not None:
        return

    def join(module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, Tensor) and torch.is_grad_enabled() and not output.requires_grad:
            return output.requires_grad_().clone()  # a model may write images' features into it
        return output

    embedding.register_forward_hook(join)
    remember(model, _Joined())
