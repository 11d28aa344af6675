"""Recompute activations in backward (arXiv 1604.06174), except for some operators' (arXiv 2205.05198)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from meshwright.core.record import wrap
from meshwright.planning.plan import Plan

from .host_activations import HostActivations, offload
from .kept import contexts, leaving
from .operator_policy import OperatorPolicy

RECOMPUTED = "recomputed"
"""The change that is noted on a module."""


def apply(model: nn.Module, plan: Plan) -> nn.Module:
    """Recompute the planned modules in place, or offload the tensors that they save to host memory.

    Names do not change, and random states are preserved.
    """
    if plan.activation_checkpointing == "offload":
        store = HostActivations()
        for number, name in enumerate(plan.checkpointed):
            offload(model.get_submodule(name), number, store)
        return model
    policy = OperatorPolicy(plan.checkpoint_keep, plan.checkpoint_keep_every) if plan.checkpoint_keep else None
    for name in plan.checkpointed:
        recompute(model.get_submodule(name), policy)
    return model


def recompute(module: nn.Module, policy: OperatorPolicy | None = None) -> None:
    """Make a module recompute its activations in backward.

    A call through which no gradient flows (a frozen module on frozen inputs) is not checkpointed: it saves nothing
    anyway.

    Args:
        policy: the results that are saved; None: none.
    """
    options = {} if policy is None else {"context_fn": functools.partial(contexts, policy)}

    def make(forward: Callable[..., Any]) -> Callable[..., Any]:
        region = forward
        if policy is not None:
            region = functools.wraps(forward)(lambda *args, **kwargs: leaving(forward(*args, **kwargs)))

        def recomputed_forward(*args: Any, **kwargs: Any) -> Any:
            if not (torch.is_grad_enabled() and _takes_gradients(module, (*args, *kwargs.values()))):
                return forward(*args, **kwargs)
            return checkpoint(region, *args, use_reentrant=False, **options, **kwargs)

        return recomputed_forward

    wrap(module, make, RECOMPUTED)


def _takes_gradients(module: nn.Module, inputs: tuple) -> bool:
    carried = any(isinstance(value, torch.Tensor) and value.requires_grad for value in inputs)
    return carried or any(parameter.requires_grad for parameter in module.parameters())
