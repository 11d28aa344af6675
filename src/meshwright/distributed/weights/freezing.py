"""Freeze parameters: they get no gradient and no optimizer state."""

from __future__ import annotations

from torch import nn

from meshwright.core.names import clean
from meshwright.planning.plan import Plan


def apply(model: nn.Module, plan: Plan) -> nn.Module:
    """Set ``requires_grad`` as planned. It runs before sharding, which reads it."""
    frozen = set(plan.frozen)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(clean(name) not in frozen)
    return model
