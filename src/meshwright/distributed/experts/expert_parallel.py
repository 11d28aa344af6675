"""Distribute experts over ranks (arXiv 2006.16668): dispatch tokens to their experts, and combine the results.

Each token's row is sent once for each of its experts on another rank: there is no padding, and no token is dropped.
One small all-to-all of counts tells each rank how many rows to send and receive; the host waits for it once per layer.
A rank or an expert without tokens still takes part in every collective and in the backward.
"""

from __future__ import annotations

import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from meshwright.core.axes import Axis
from meshwright.core.record import remember, wrap
from meshwright.core.torch_private import has_no_values
from meshwright.distributed.recompute.kept import exchanged
from meshwright.distributed.tensor.runtime import LocalView, use_local_parameters
from meshwright.distributed.weights.parts_tensor import distribute
from meshwright.introspection.structure.experts import Stack
from meshwright.models.moe import tokens_per_expert
from meshwright.planning.plan import Plan


def apply(model: nn.Module, plan: Plan, expert_mesh: DeviceMesh) -> nn.Module:
    """Distribute the plan's stacks of experts over the mesh's ``ep`` axis, in place. ``model`` may be on meta."""
    assert plan.experts is not None
    axis = expert_mesh[Axis.EP.value]
    # gradients are means over the tokens of all data ranks; FSDP2 would divide by its own number of ranks
    factor = 1 / plan.shares.batch_ranks if plan.data.reduction == "mean" else 1.0
    for stack in plan.experts.stacks:
        module = model.get_submodule(stack.path)
        for name in stack.parameters:
            module._parameters[name] = distribute(module.get_parameter(name), axis, Shard(0))
        for name in stack.counts:
            setattr(module, name, stack.experts // plan.experts.ranks)
        use_local_parameters(module, LocalView.of(module, gradient_factor=factor))
        wrap(
            module,
            functools.partial(_dispatching, stack, axis.get_group()),
            f"experts distributed over ep {plan.experts.ranks}",
        )
    remember(model, plan.experts)
    return model


MEANWHILE = "meanwhile"
"""Name of an optional argument of a stack of experts: a function without arguments, to run while rows are dispatched.
"""


def _dispatching(stack: Stack, group: dist.ProcessGroup, forward: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(forward)

    def call(given: dict[str, Tensor]) -> Any:
        # by position: a kernel with this signature may have other argument names
        bound = inspect.BoundArguments(signature, OrderedDict(given))
        return forward(*bound.args, **bound.kwargs)

    @torch.compiler.disable
    def dispatched_experts_forward(*args: Any, **kwargs: Any) -> Tensor:
        arguments = signature.bind(*args, **kwargs).arguments
        rows, index, weights = stack.arguments(arguments)
        compute = functools.partial(stack.compute, call)
        made = _everywhere(compute, stack, group, rows, index, arguments.get(MEANWHILE))
        shape = arguments[stack.rows].shape
        # sum and cast return no view: an in-place addition to a view would lose FSDP2's hook
        return (made * weights.unsqueeze(-1)).view(*shape[:-1], index.shape[1], shape[-1]).sum(-2).to(rows.dtype)

    return dispatched_experts_forward


def _everywhere(
    compute: Callable[[Tensor, Tensor], Tensor],
    stack: Stack,
    group: dist.ProcessGroup,
    rows: Tensor,
    index: Tensor,
    meanwhile: Callable[[], object] | None = None,
) -> Tensor:
    """Return (n, k, dim): each token's outputs from its experts on all ranks; zeros where ``index`` names no expert.

    Args:
        compute: rows (m, dim) and the local numbers (m,) of their experts on this rank → (m, dim).
        rows: (n, dim).
        index: (n, k) int64 experts; ``stack.experts`` means no expert.
        meanwhile: called while rows are sent to experts. Its backward runs while their gradients are sent back:
            autograd runs nodes that are ready in the reverse order of the forward.
    """
    n, k = index.shape
    ranks, flat = group.size(), index.flatten()
    order = flat.argsort(stable=True)  # by expert, so by rank; no expert: last
    mine = tokens_per_expert(flat, stack.experts)
    theirs = exchanged(_counts_of_all, mine, group)  # (ranks, experts of this rank)
    sends, receives = _rows_by_rank(mine, theirs, ranks, len(flat))
    order = order[: sum(sends)]
    given = _exchange(rows[order // k], sends, receives, group, meanwhile)
    own = stack.experts // ranks
    numbers = torch.arange(own, device=rows.device).repeat(ranks).repeat_interleave(theirs, output_size=sum(receives))
    if not len(given):  # the experts' parameters need a gradient nevertheless: other ranks reduce with this one
        given, numbers = given.new_zeros(1, rows.shape[1]) + given.sum(), numbers.new_zeros(1)
    made = _exchange(compute(given, numbers)[: sum(receives)], receives, sends, group)
    return made.new_zeros(n * k, made.shape[1]).index_copy(0, order, made).view(n, k, made.shape[1])


def _rows_by_rank(mine: Tensor, theirs: Tensor, ranks: int, rows: int) -> tuple[list[int], list[int]]:
    """Return the number of rows for each rank, and from each rank. The only point where the host waits for the device.

    A dry run has no values: routers are taken to spread their choices evenly.
    """
    if has_no_values(mine):
        even = [rows // ranks + (rank < rows % ranks) for rank in range(ranks)]
        return even, even
    sends, receives = torch.stack([mine.view(ranks, -1).sum(1), theirs.view(ranks, -1).sum(1)]).tolist()
    return sends, receives


@dataclass
class _Journey:
    """An asynchronous all-to-all of rows: the first ``sends[0]`` go to the first rank, and so on.

    Its backward sends the gradients the opposite way.
    """

    sends: list[int]
    receives: list[int]
    group: dist.ProcessGroup
    _under_way: tuple[dist.Work, Tensor] | None = None
    _found: Tensor | None = None

    def begin(self, rows: Tensor, sends: list[int], receives: list[int]) -> Tensor:
        """Start to send ``rows``, and return the receive buffer, which is valid once ``end`` has returned."""

        def send() -> Tensor:
            found, sent = rows.new_empty(sum(receives), rows.shape[1]), rows.contiguous()
            work = dist.all_to_all_single(found, sent, receives, sends, group=self.group, async_op=True)
            assert work is not None
            self._under_way = work, sent
            return found

        self._found = exchanged(send)
        return self._found

    def end(self) -> Tensor:
        found = self._found
        assert found is not None
        if self._under_way is not None:
            self._under_way[0].wait()
        self._under_way = self._found = None
        return found


def _counts_of_all(mine: Tensor, group: dist.ProcessGroup) -> Tensor:
    theirs = torch.empty_like(mine)
    dist.all_to_all_single(theirs, mine, group=group)
    return theirs


class _Begin(torch.autograd.Function):
    """Start to send rows, and return them unchanged. The backward waits for their gradients."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, journey: _Journey) -> Tensor:
        ctx.journey = journey
        journey.begin(rows, journey.sends, journey.receives)
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor):
        return ctx.journey.end(), None


class _End(torch.autograd.Function):
    """Wait for the received rows, and return them in place of the sent ones.

    The backward starts to send their gradients, and returns the buffer that receives those of the sent rows.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, journey: _Journey) -> Tensor:
        ctx.journey = journey
        return journey.end()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor):
        journey = ctx.journey
        return journey.begin(grad_outputs[0], journey.receives, journey.sends), None


def _exchange(
    rows: Tensor,
    sends: list[int],
    receives: list[int],
    group: dist.ProcessGroup,
    meanwhile: Callable[[], object] | None = None,
) -> Tensor:
    journey = _Journey(sends, receives, group)
    leaving = _Begin.apply(rows, journey)
    if meanwhile is not None:
        meanwhile()
    return _End.apply(leaving, journey)
