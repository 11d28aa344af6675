"""Expert parallelism (arXiv 2006.16668): each rank has its share of every layer's experts, and tokens travel to theirs and back.

A token's row is sent once for each of its experts that is elsewhere, and only then: nothing is filled up, and nothing is dropped. What a
rank sends to each of the others is known from one small message of counts, for which it waits once in a layer. A rank that is given no
token, or an expert that is, still takes part in everything.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from meshwright.core.axes import Axis
from meshwright.introspection.facts import SHARED_OUT_BY
from meshwright.introspection.structure.experts import Stack
from meshwright.models.moe import tokens_per_expert
from meshwright.planning.plan import Plan

from .tensor.placement import distribute
from .tensor.runtime import use_local_parameters, wrap


def apply(model: nn.Module, plan: Plan, expert_mesh: DeviceMesh) -> nn.Module:
    """Share the plan's stacks of experts out over the mesh's ``ep`` axis, in place. ``model`` may be on meta."""
    assert plan.experts is not None
    axis = expert_mesh[Axis.EP.value]
    factor = 1 / plan.data_ranks if plan.data.reduction == "mean" else 1.0  # of all ranks' tokens; FSDP2 would divide by its own ranks
    for stack in plan.experts.stacks:
        module = model.get_submodule(stack.path)
        for name in stack.parameters:
            module._parameters[name] = distribute(module.get_parameter(name), axis, Shard(0))
        for name in stack.counts:
            setattr(module, name, stack.experts // plan.experts.ranks)
        use_local_parameters(module, gradient_factor=factor)
        wrap(module, functools.partial(_dispatching, stack, axis.get_group()))
    model.__dict__[SHARED_OUT_BY] = plan.experts
    return model


def _dispatching(stack: Stack, group: dist.ProcessGroup, forward: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(forward)

    @torch.compiler.disable
    def run(*args: Any, **kwargs: Any) -> Tensor:
        said = signature.bind(*args, **kwargs).arguments
        rows, index, weights = stack.arguments(said)
        made = _everywhere(lambda x, number: stack.compute(lambda given: forward(**given), x, number), stack, group, rows, index)
        shape = said[stack.rows].shape  # no view is returned: FSDP2's hook would be lost where somebody adds to it in place
        return (made * weights.unsqueeze(-1)).view(*shape[:-1], index.shape[1], shape[-1]).sum(-2).to(rows.dtype)

    return run


def _everywhere(compute: Callable[[Tensor, Tensor], Tensor], stack: Stack, group: dist.ProcessGroup, rows: Tensor, index: Tensor) -> Tensor:
    """(n, k, dim): what each token's experts make of it, wherever they are; zeros of those that it does not go to.

    Args:
        compute: rows (m, dim) and the numbers (m,) of their experts among those of this rank → (m, dim).
        rows: (n, dim).
        index: (n, k) int64 experts; ``stack.experts``: nowhere.
    """
    n, k = index.shape
    ranks, flat = group.size(), index.flatten()
    order = flat.argsort(stable=True)  # by expert, so by rank; what goes nowhere comes last
    mine = tokens_per_expert(flat, stack.experts)
    theirs = torch.empty_like(mine)  # (ranks, experts of this rank)
    dist.all_to_all_single(theirs, mine, group=group)
    sends, receives = torch.stack([mine.view(ranks, -1).sum(1), theirs.view(ranks, -1).sum(1)]).tolist()  # the one wait
    order = order[: sum(sends)]
    given = _Exchange.apply(rows[order // k], sends, receives, group)
    own = stack.experts // ranks
    numbers = torch.arange(own, device=rows.device).repeat(ranks).repeat_interleave(theirs, output_size=sum(receives))
    if not len(given):  # the experts' parameters have a gradient nevertheless: other ranks wait for it
        given, numbers = given.new_zeros(1, rows.shape[1]) + given.sum(), numbers.new_zeros(1)
    made = _Exchange.apply(compute(given, numbers)[: sum(receives)], receives, sends, group)
    return made.new_zeros(n * k, made.shape[1]).index_copy(0, order, made).view(n, k, made.shape[1])


class _Exchange(torch.autograd.Function):
    """Rows to other ranks: the first ``sends[0]`` to the first, and so on; its backward brings the gradients back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sends: list[int], receives: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sends, ctx.receives, ctx.group = sends, receives, group
        return _exchanged(rows, sends, receives, group)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor):
        return _exchanged(grad_outputs[0], ctx.receives, ctx.sends, ctx.group), None, None, None


def _exchanged(rows: Tensor, sends: list[int], receives: list[int], group: dist.ProcessGroup) -> Tensor:
    found = rows.new_empty(sum(receives), rows.shape[1])
    dist.all_to_all_single(found, rows.contiguous(), receives, sends, group=group)
    return found
