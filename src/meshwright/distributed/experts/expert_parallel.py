"""Share experts out over ranks (arXiv 2006.16668): tokens travel to their experts and back.

A token's row is sent once for each of its experts that is elsewhere, and only then: nothing is filled up, and nothing
is dropped. What a rank sends to each of the others is known from one small message of counts, for which it waits once
in a layer. A rank that is given no token, or an expert that is, still takes part in everything.
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
from meshwright.distributed.recompute.kept import exchanged
from meshwright.distributed.tensor.runtime import LocalView, use_local_parameters
from meshwright.distributed.weights.placement import distribute
from meshwright.introspection.structure.experts import Stack
from meshwright.models.moe import tokens_per_expert
from meshwright.planning.plan import Plan


def apply(model: nn.Module, plan: Plan, expert_mesh: DeviceMesh) -> nn.Module:
    """Share the plan's stacks of experts out over the mesh's ``ep`` axis, in place. ``model`` may be on meta."""
    assert plan.experts is not None
    axis = expert_mesh[Axis.EP.value]
    # the mean over all ranks' tokens: FSDP2 would divide by its own ranks
    factor = 1 / plan.data_ranks if plan.data.reduction == "mean" else 1.0
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
            f"experts shared out over ep {plan.experts.ranks}",
        )
    remember(model, plan.experts)
    return model


MEANWHILE = "meanwhile"
"""The argument by which a stack of experts may be told what else there is to compute while rows travel: something
without arguments.
"""


def _dispatching(stack: Stack, group: dist.ProcessGroup, forward: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(forward)

    def call(given: dict[str, Tensor]) -> Any:
        # by position: a kernel behind the signature may name them otherwise
        bound = inspect.BoundArguments(signature, OrderedDict(given))
        return forward(*bound.args, **bound.kwargs)

    @torch.compiler.disable
    def dispatched_experts_forward(*args: Any, **kwargs: Any) -> Tensor:
        said = signature.bind(*args, **kwargs).arguments
        rows, index, weights = stack.arguments(said)
        compute = functools.partial(stack.compute, call)
        made = _everywhere(compute, stack, group, rows, index, said.get(MEANWHILE))
        shape = said[
            stack.rows
        ].shape  # no view is returned: FSDP2's hook would be lost where somebody adds to it in place
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
    """Return (n, k, dim): what each token's experts make of it, wherever they are.

    Zeros of those that it does not go to.

    Args:
        compute: rows (m, dim) and the numbers (m,) of their experts among those of this rank → (m, dim).
        rows: (n, dim).
        index: (n, k) int64 experts; ``stack.experts``: nowhere.
        meanwhile: called while rows are on their way to experts. Its backward runs while their gradients are on their
            way back: autograd takes what is ready in the reverse order of the forward.
    """
    n, k = index.shape
    ranks, flat = group.size(), index.flatten()
    order = flat.argsort(stable=True)  # by expert, so by rank; what goes nowhere comes last
    mine = tokens_per_expert(flat, stack.experts)
    theirs = exchanged(lambda: _counts_of_all(mine, group))  # (ranks, experts of this rank)
    sends, receives = torch.stack([mine.view(ranks, -1).sum(1), theirs.view(ranks, -1).sum(1)]).tolist()  # the one wait
    order = order[: sum(sends)]
    given = _exchange(rows[order // k], sends, receives, group, meanwhile)
    own = stack.experts // ranks
    numbers = torch.arange(own, device=rows.device).repeat(ranks).repeat_interleave(theirs, output_size=sum(receives))
    if not len(given):  # the experts' parameters have a gradient nevertheless: other ranks wait for it
        given, numbers = given.new_zeros(1, rows.shape[1]) + given.sum(), numbers.new_zeros(1)
    made = _exchange(compute(given, numbers)[: sum(receives)], receives, sends, group)
    return made.new_zeros(n * k, made.shape[1]).index_copy(0, order, made).view(n, k, made.shape[1])


@dataclass
class _Journey:
    """Rows on their way: the first ``sends[0]`` to the first rank, and so on.

    In the backward gradients on their way back.
    """

    sends: list[int]
    receives: list[int]
    group: dist.ProcessGroup
    _under_way: tuple[dist.Work, Tensor] | None = None
    _found: Tensor | None = None

    def begin(self, rows: Tensor, sends: list[int], receives: list[int]) -> Tensor:
        """Return what comes, when ``end`` has returned."""

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
    """Rows leave; they are also returned. Its backward waits for their gradients."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, journey: _Journey) -> Tensor:
        ctx.journey = journey
        journey.begin(rows, journey.sends, journey.receives)
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor):
        return ctx.journey.end(), None


class _End(torch.autograd.Function):
    """Rows that left → rows that came.

    Its backward sends their gradients off, and returns what will be those of the former.
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
