"""Handle gradients of parameters that, by their rows, some ranks use and others do not, under fully_shard.

torch packs a unit's existing gradients in order: ranks that used other parameters would sum gradients of different
ones. So missing gradients are filled with zeros before the reduction, and after the backward the ranks agree on the
parameters that any rank used. An unused one gets no gradient, as in one process, where an optimizer skips it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.core.names import clean
from meshwright.core.torch_private import call_behind_backward, is_in_backward
from meshwright.distributed.mesh import data_groups
from meshwright.distributed.process.agree import word_device
from meshwright.distributed.torch_private import gathered, has_partial_sums
from meshwright.planning.plan import Plan

from .fully_sharded import parameter_groups


def fill(model: nn.Module, plan: Plan, device_mesh: DeviceMesh) -> None:
    """Fill in gradients for the plan's idle parameters of a model whose units are sharded."""
    names = {id(parameter): clean(name) for name, parameter in model.named_parameters()}
    watched = [
        (group, parameter)
        for group in parameter_groups(model)
        for parameter in group.fsdp_params
        if names.get(id(parameter.sharded_param)) in plan.data.idle
    ]
    if watched:
        usage = _Usage([parameter for _, parameter in watched], data_groups(device_mesh))
        for group in dict.fromkeys(group for group, _ in watched):
            group.post_backward = _filling(group, [parameter for other, parameter in watched if other is group], usage)


class _Usage:
    """Tracks the parameters that got a gradient on this rank; the ranks agree on them after each reducing backward."""

    def __init__(self, parameters: Sequence[Any], groups: list[dist.ProcessGroup]):
        self.parameters, self.groups = parameters, groups
        self.used = {id(parameter): False for parameter in parameters}
        self._is_waiting = False

    def note(self, parameter: Any, begins: bool, has_gradient: bool) -> None:
        self.used[id(parameter)] = has_gradient or (self.used[id(parameter)] and not begins)

    def agree_behind_backward(self) -> None:
        if not self._is_waiting:
            self._is_waiting = True
            call_behind_backward(self.agree)

    def agree(self) -> None:
        """Take the zeros of parameters that no rank used away again (collective)."""
        self._is_waiting = False
        words = torch.tensor(
            [self.used[id(parameter)] for parameter in self.parameters], dtype=torch.int64, device=word_device()
        )
        for group in self.groups:
            dist.all_reduce(words, op=dist.ReduceOp.MAX, group=group)
        for parameter, used in zip(self.parameters, words.tolist(), strict=True):
            self.used[id(parameter)] = bool(used)
            if not used:
                parameter.sharded_param.grad = None


def _filling(group: Any, parameters: list[Any], usage: _Usage):
    reduce = group.post_backward

    def post_backward(*unused: Any) -> None:
        if group.reduce_grads:
            for parameter in parameters:
                whole = gathered(parameter)
                has_gradient = parameter.unsharded_accumulated_grad is not None or (
                    whole is not None and whole.grad is not None
                )
                begins = parameter.sharded_param.grad is None and not has_partial_sums(group)
                usage.note(parameter, begins, has_gradient)
                if not has_gradient and whole is not None:
                    whole.grad = torch.zeros_like(whole)
            if group.all_reduce_grads and is_in_backward():
                usage.agree_behind_backward()
        reduce(*unused)
        if group.reduce_grads and group.all_reduce_grads and not is_in_backward():  # of a pipeline's stage
            usage.agree()

    return post_backward
