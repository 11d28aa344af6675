"""Apply expert parallelism, and route the tokens of a step.

Both depend on counts over all data ranks and microbatches of the step: routed tokens, and tokens per expert.

Each token's row is sent once for each of its experts on another rank: there is no padding, and no token is dropped.
One small all-to-all of counts tells each rank how many rows to send and receive; the host waits for it once per layer.
A rank or an expert without tokens still takes part in every collective and in the backward.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from meshwright.core.axes import Axis
from meshwright.core.losses import PADDING
from meshwright.core.names import clean, owner
from meshwright.core.record import remember, wrap
from meshwright.core.torch_private import has_no_values, uncompiled
from meshwright.distributed.exchange import linear_map, own_share
from meshwright.distributed.process import agree
from meshwright.distributed.recompute.kept import exchanged
from meshwright.distributed.step.part import Batch
from meshwright.distributed.tensor.layers import LocalView, runtime_of, use_local_parameters
from meshwright.distributed.weights.parts_tensor import distribute
from meshwright.introspection.structure.experts import RouterLogits, RouterLoss, Stack, asked_for, find_stacks
from meshwright.models.layers import Router, is_recomputing, tokens_per_expert
from meshwright.planning.plan import Plan

# --- weight the router losses of a step, and update the router biases


def routers_of(models: Iterable[nn.Module]) -> list[Router]:
    """List the routers in the order of the models' modules, which is the same on all ranks that hold them."""
    return [module for model in models for module in model.modules() if isinstance(module, Router)]


def count_routed(pieces: Sequence[Batch]) -> int:
    """Count the tokens that are not padding."""
    real = [(piece["tokens"], routed_tokens(piece)) for piece in pieces]
    return sum(tokens.numel() if mask is None else int(mask.sum()) for tokens, mask in real)


def routed_tokens(piece: Batch) -> Tensor | None:
    """Return (rows, seq) bool, False for padding by document_ids or an attention mask of the tokens' shape.

    Return None if the batch has neither.
    """
    documents, mask = piece.get("document_ids"), piece.get("attention_mask")
    real = None if documents is None else documents != PADDING
    if mask is None or mask.shape != piece["tokens"].shape:
        return real
    return mask.bool() if real is None else real & mask.bool()


def begin_step(
    routers: Sequence[Router | SharedRouterLoss], tokens: int, device: torch.device, scale: float = 1.0
) -> None:
    """Set the weight of one token's auxiliary loss, before the first forward of a step.

    The auxiliary losses become means over ``tokens``, the routed tokens on all data ranks, times ``scale``.
    """
    if routers:
        share = torch.full((), scale / max(tokens, 1), dtype=torch.float64, device=device)
        for router in routers:
            router.loss_share = share


def share_microbatches(routers: Sequence[Router], groups: Sequence[dist.ProcessGroup]) -> None:
    """Let losses per microbatch count the tokens of all ranks of ``groups``, which share a microbatch."""
    for router in routers if groups else ():
        router.everywhere = _Everywhere(groups)


class _Everywhere:
    """Sums counts over all groups.

    This is not a function with the groups bound to it: code compiled around its call would hold the groups forever.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup]):
        self._groups = list(groups)

    @uncompiled
    def __call__(self, counted: Tensor) -> Tensor:
        total = counted.sum(0, keepdim=True)
        return exchanged(sum_over, self._groups, total, into=total)


def sum_over(groups: Sequence[dist.ProcessGroup], counts: Tensor) -> Tensor:
    """Sum in place over the ranks of all groups."""
    for group in groups:
        dist.all_reduce(counts, group=group)
    return counts


def end_step(routers: Sequence[Router], groups: Sequence[dist.ProcessGroup], *, skipped: bool) -> None:
    """Update the biases by the tokens that each expert received since the last step, unless it is skipped or failed.

    Collective over ``groups``, along which ranks hold other tokens.
    """
    balanced = [router for router in routers if router.bias is not None]
    if balanced and not skipped:
        none = lambda of: torch.zeros(of.config.n_experts, dtype=torch.int64, device=of.weight.device)  # noqa: E731
        each = [none(router) if router.counts is None else router.counts for router in balanced]
        counts = sum_over(groups, torch.stack(each))
        for router, found in zip(balanced, counts, strict=True):
            router.balance(found)
    for router in routers:
        router.counts = None


# --- distribute experts over ranks


def apply(model: nn.Module, plan: Plan, expert_mesh: DeviceMesh) -> nn.Module:
    """Distribute the plan's stacks of experts over the mesh's ``ep`` axis, in place. ``model`` may be on meta."""
    assert plan.experts is not None
    axis = expert_mesh[Axis.EP.value]
    group = axis.get_group()

    def dispatching(stack: Stack, forward: Callable[..., Any]) -> Callable[..., Any]:
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

    # gradients are means over the tokens of all data ranks; FSDP2 would divide by its own number of ranks
    factor = 1 / plan.shares.batch_ranks if plan.data.reduction == "mean" else 1.0
    for planned in plan.experts.stacks:
        module = model.get_submodule(planned.path)
        for name in planned.parameters:
            module._parameters[name] = distribute(module.get_parameter(name), axis, Shard(0))
        for name in planned.counts:
            setattr(module, name, planned.experts // plan.experts.ranks)
        use_local_parameters(module, LocalView.of(module, gradient_factor=factor))
        wrap(module, dispatching(planned, module.forward), f"experts distributed over ep {plan.experts.ranks}")
    remember(model, plan.experts)
    return model


MEANWHILE = "meanwhile"
"""Name of an optional argument of a stack of experts: a function without arguments, to run while rows are dispatched.
"""


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


def _counts_of_all(mine: Tensor, group: dist.ProcessGroup) -> Tensor:
    theirs = torch.empty_like(mine)
    dist.all_to_all_single(theirs, mine, group=group)
    return theirs


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
    """An asynchronous all-to-all of rows: the first ``sends[0]`` go to the first rank, and so on."""

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


def _exchange(
    rows: Tensor,
    sends: list[int],
    receives: list[int],
    group: dist.ProcessGroup,
    meanwhile: Callable[[], object] | None = None,
) -> Tensor:
    """Send rows, and return those received; the backward sends their gradients the opposite way."""
    journey = _Journey(group)

    def leave(rows: Tensor) -> Tensor:
        journey.begin(rows, sends, receives)
        return rows.view_as(rows)

    leaving = linear_map(rows, leave, lambda gradient: journey.end())
    if meanwhile is not None:
        meanwhile()
    # the backward begins here, and returns the buffer that receives the gradients of the sent rows
    return linear_map(leaving, lambda rows: journey.end(), lambda gradient: journey.begin(gradient, receives, sends))


class SharedRouterLoss:
    """Computes a model's own router loss over several ranks' tokens, each with a weight of ``loss_share``."""

    def __init__(self, loss: RouterLoss, model: nn.Module, groups: Sequence[dist.ProcessGroup]):
        """Record the router logits of ``model``. ``groups``: of the axes along which ranks hold other tokens."""
        self.loss_share: Tensor | None = None
        self._loss, self._groups, self.logits = loss, groups, RouterLogits(model, loss)
        runtime = runtime_of(model)
        self._sequence = runtime.sequence if runtime is not None and runtime.sequence.cut else None

    def __call__(self, batch: Batch) -> Tensor:
        """Return this rank's partial sum of the router loss of the last forward's microbatch, 0-dim.

        It combines the choices of all ranks' tokens with the probabilities of this rank's tokens.
        """
        logits = self.logits.take()
        real, sequence = routed_tokens(batch), self._sequence
        if sequence is not None and (real is not None or sequence.filled):  # False for padding of the shard, too
            whole = torch.ones(batch["tokens"].shape, dtype=torch.bool) if real is None else real
            real = own_share(whole, sequence.group.rank, sequence.group.size)
        real = None if real is None else real.flatten().to(logits[0].device)
        chosen, probabilities = self._loss.terms(logits, real)
        tokens = chosen.new_tensor([logits[0].flatten(0, -2).shape[0]]) if real is None else real.sum().view(1)
        chosen, tokens = sum_over(self._groups, torch.cat([chosen, tokens])).split([self._loss.experts, 1])
        shares = chosen.double() / (tokens.clamp(min=1) * len(logits))
        assert self.loss_share is not None
        return (
            self._loss.coefficient * self._loss.experts * self.loss_share * (shares * probabilities).sum() / len(logits)
        )


@dataclass(frozen=True)
class LayerLoad:
    """The load of one layer's experts, over all ranks.

    Attributes:
        path: path of the experts' module.
        tokens: number of tokens that each expert received.
        dropped: number of choices that reached no expert: padding, and tokens beyond an expert's capacity.
        router_z: mean over the routed tokens of log²(Σ exp(logits)) of the layer's router; None unless the router is
            a ``models.layers.Router``.
    """

    path: str
    tokens: tuple[int, ...]
    dropped: int
    router_z: float | None = None

    @property
    def max_over_mean(self) -> float:
        """Largest over mean number of tokens: 1 for a balanced load, the number of experts if one receives all."""
        total = sum(self.tokens)
        return max(self.tokens) * len(self.tokens) / total if total else 1.0

    @property
    def entropy(self) -> float:
        """Entropy of the experts' shares of tokens, over its maximum: 1 if all are equal, 0 if one receives all."""
        shares = torch.tensor(self.tokens, dtype=torch.float64)
        shares = shares / shares.sum().clamp(min=1)
        return float(torch.special.entr(shares).sum()) / math.log(len(self.tokens))


class ExpertLoad:
    """Counts the tokens of every stack of experts of some modules, in training forwards."""

    def __init__(self, models: Sequence[nn.Module]):
        self._counts: dict[str, Tensor] = {}
        self._routers: dict[str, Router] = {}

        def counting(stack: Stack) -> Any:
            @torch.compiler.disable
            def count(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
                if not module.training or is_recomputing():
                    return
                numbers = asked_for(stack, args, kwargs)
                if numbers is None:
                    return
                index = numbers.flatten()
                before = self._counts.get(stack.path)
                if before is None:
                    before = torch.zeros(stack.experts + 1, dtype=torch.int64, device=index.device)
                    self._counts[stack.path] = before
                before.scatter_add_(0, index, torch.ones_like(index))

            return count

        for model in models:
            beside = {owner(clean(raw)): module for raw, module in model.named_modules() if isinstance(module, Router)}
            self._routers |= {path: beside[owner(path)] for path in find_stacks(model) if owner(path) in beside}
            for path, found in find_stacks(model).items():
                model.get_submodule(path).register_forward_pre_hook(counting(found), with_kwargs=True, prepend=True)

    def take(self, groups: Sequence[dist.ProcessGroup], pipeline: Sequence[dist.ProcessGroup]) -> list[LayerLoad]:
        """Return the counts since the last call, over all ranks. Collective.

        Args:
            groups: groups of the axes along which ranks hold other tokens.
            pipeline: groups of the axes along which ranks hold other layers.
        """
        found: list[LayerLoad] = []
        if self._counts:
            total = agree.total(torch.cat([*self._counts.values()]), list(groups))
            none, routers = torch.zeros(2, dtype=torch.float64), self._routers
            z = [none if router.z is None else router.z.cpu() for router in routers.values()]
            sums = zip(routers, agree.total(torch.stack(z), list(groups)) if z else (), strict=True)
            sizes = {path: (size / tokens.clamp(min=1)).item() for path, (size, tokens) in sums}
            for router in routers.values():
                router.z = None
            for path, counts in zip(self._counts, total.split([len(c) for c in self._counts.values()]), strict=True):
                *tokens, dropped = counts.tolist()
                found.append(LayerLoad(path, tuple(tokens), dropped, sizes.get(path)))
                self._counts[path].zero_()
        if pipeline:
            found = list({load.path: load for loads in agree.everybody_says(found) for load in loads}.values())
        return found
