"""Activation checkpointing: drop a module's activations and recompute them in backward (arXiv 1604.06174)."""

from __future__ import annotations

import functools

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from meshwright.planning.plan import Plan


def apply(model: nn.Module, plan: Plan) -> nn.Module:
    """Recompute the planned modules in place; names stay as they are, random states are preserved."""
    for name in plan.checkpointed:
        recompute(model.get_submodule(name))
    return model


def recompute(module: nn.Module) -> None:
    """Make one module recompute; where no gradient flows through it (a frozen one on frozen inputs) it keeps nothing anyway."""
    forward = module.forward

    @functools.wraps(forward)
    def recomputed(*args, **kwargs):
        if not (torch.is_grad_enabled() and _takes_gradients(module, (*args, *kwargs.values()))):
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    recomputed.recomputes = True  # type: ignore[attr-defined]
    module.forward = recomputed


def _takes_gradients(module: nn.Module, inputs: tuple) -> bool:
    carried = any(isinstance(value, torch.Tensor) and value.requires_grad for value in inputs)
    return carried or any(parameter.requires_grad for parameter in module.parameters())
