"""Hand out the outputs of a laid-out model's forward, from which no backward may start."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from meshwright.core.errors import UnsupportedError
from meshwright.core.torch_private import tree_map_only


def without_backward(output: Any) -> Any:
    """Let a backward from any tensor of an output raise UnsupportedError."""
    return tree_map_only(
        Tensor,
        lambda leaf: _Outside.apply(leaf, torch.zeros((), requires_grad=True)) if leaf.is_floating_point() else leaf,
        output,
    )


class _Outside(torch.autograd.Function):
    """Passes an output on, and refuses a backward from it."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, anchor: Tensor) -> Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> NoReturn:
        raise UnsupportedError(
            "model(...) computes without gradients: over ranks, its backward would add up losses that were divided by"
            " each rank's own count. Train by forward_backward(batch), with loss_fn=meshwright.Loss(...)"
        )
