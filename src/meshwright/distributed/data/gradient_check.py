"""Check gradients when a backward ends, and report on all ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.core.errors import ConfigError, NonFiniteError
from meshwright.core.names import clean
from meshwright.core.torch_private import call_behind_backward, tree_leaves
from meshwright.distributed.process import agree
from meshwright.distributed.torch_private import local_part

from .fully_sharded import reduces


class GradientCheck:
    """Raises, on all ranks after a backward, if a gradient that the backward reduces is not finite on any rank.

    Gradients of a microbatch that wait for the next one are not checked: an error in them is in the sum.

    Args:
        groups: groups of all ranks that run the same backward.
    """

    def __init__(self, model: nn.Module, groups: list[dist.ProcessGroup]):
        self.model, self.groups, self._waits = model, groups, False
        model.register_forward_hook(self._begin)

    def _begin(self, model: nn.Module, inputs: tuple, output: Any) -> None:
        """Hook the output after FSDP2's own hooks, so that gradients are reduced before the check."""
        self._waits = False
        if not torch.is_grad_enabled():
            return
        leaves = [*tree_leaves(output), getattr(output, "logits", None)]
        tensors = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad}
        if not tensors:
            raise ConfigError(
                f"check_for_nan_in_grad = True: {type(model).__name__} returns a {type(output).__name__}, in which no"
                " tensor is found whose backward could be waited for. Return logits (or an object with .logits), or set"
                " it to False."
            )
        for tensor in tensors.values():
            tensor.register_hook(self._wait_for_the_end)

    def _wait_for_the_end(self, gradient: Tensor) -> None:
        if not self._waits:
            self._waits = True
            call_behind_backward(self._check)

    def _check(self) -> None:
        self._waits = False
        if not reduces(self.model):
            return
        named = [(clean(name), p) for name, p in self.model.named_parameters() if p.requires_grad]
        none = torch.zeros((), device=named[0][1].device)
        gradients = [none if p.grad is None else local_part(p.grad) for _, p in named]
        words = agree.total(torch.stack([(~each.isfinite().all()).long() for each in gradients]), self.groups)
        if wrong := [name for (name, _), count in zip(named, words.tolist(), strict=True) if count]:
            more = f" and {len(wrong) - 4} more" if len(wrong) > 4 else ""
            raise NonFiniteError(
                f"check_for_nan_in_grad: the gradient of {', '.join(wrong[:4])}{more} is NaN or infinite. The"
                f" optimizer has not stepped."
            )
