"""Run one rank's part of a pipeline's step, in the order of its program.

Each of the two stages has its own copy. Both start with the same values and get the sum of both gradients, so they stay
equal to the last bit, and so do their optimizer states.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.core.axes import Axis
from meshwright.core.dtypes import torch_dtype
from meshwright.core.errors import MeshwrightError, UnsupportedError
from meshwright.core.losses import IGNORED, PADDING
from meshwright.distributed.data import fully_sharded
from meshwright.distributed.exchange import share_of_sequence
from meshwright.distributed.loss.declared import Blank, DeclaredLosses
from meshwright.distributed.loss.preference import CountedPairs, log_probs_of
from meshwright.distributed.step.deferred import DeferredGradients, defer_linear
from meshwright.distributed.step.objective import LossFunction, objective_of
from meshwright.distributed.step.part import Batch, Inputs, ModelPart
from meshwright.distributed.tensor.layers import runtime_of
from meshwright.distributed.tensor.parallel import gradients_aside, summing, sums_of
from meshwright.distributed.torch_private import local_part
from meshwright.introspection.signature import logits_of
from meshwright.planning.pipeline.orders import forwards
from meshwright.planning.pipeline.plan import PipelinePlan
from meshwright.planning.pipeline.schedule import (
    Action,
    Content,
    Message,
    Receive,
    Send,
    Step,
    Work,
    message_after,
    message_before,
    programs,
)
from meshwright.planning.plan import Plan

from .split import StagePart, arguments_of

sends_complete: ContextVar[bool] = ContextVar("sends_complete", default=False)
"""Whether messages count as sent at once. Where peers are absent their works never say so: as gloo's, unlike NCCL's."""


class StageLost(MeshwrightError):
    """Raised if a message was not received or not taken: another rank ended, or does not answer."""

    is_echo = True


class Mail:
    """Sends and receives messages of one rank without waiting for them.

    Args:
        group: process group of the pipeline axis.
        plan: the pipeline, whose stages are named in errors.
    """

    def __init__(self, group: dist.ProcessGroup, plan: PipelinePlan):
        self.group, self.plan = group, plan
        self._sent: list[tuple[dist.Work, Tensor, int]] = []
        self._coming: dict[Message, tuple[dist.Work | None, Tensor, int]] = {}

    def send(self, message: Message, peer: int, tensor: Tensor) -> None:
        """Begin to send a tensor. Raises StageLost: the receiving rank is gone."""
        tensor = tensor.detach().contiguous()
        if sends_complete.get():
            self._sent.clear()
        self._sent = [(other, kept, to) for other, kept, to in self._sent if not other.is_completed()]
        with self._losses(lambda: self._untaken(peer)):
            work = dist.isend(tensor, group=self.group, group_dst=peer, tag=_tag(message))
        assert work is not None  # this rank is in the group
        self._sent.append((work, tensor, peer))

    def receive(self, message: Message, peer: int, room: Tensor) -> None:
        """Begin to receive into ``room``. Raises StageLost: the sending rank is gone."""
        with self._losses(lambda: self._not_given(message, peer)):
            work = dist.irecv(room, group=self.group, group_src=peer, tag=_tag(message))
        self._coming[message] = work, room, peer

    def hand_over(self, message: Message, tensor: Tensor) -> None:
        """Pass a tensor to another stage on this rank."""
        self._coming[message] = None, tensor.detach(), dist.get_rank(self.group)

    def take(self, message: Message) -> Tensor:
        """Wait for a message and return its tensor; raise StageLost if the sending rank is gone or silent."""
        work, tensor, peer = self._coming.pop(message)
        if work is not None:
            with self._losses(lambda: self._not_given(message, peer)):
                work.wait()
        return tensor

    def finish(self) -> None:
        """Wait until all messages are sent. Raises StageLost: a receiving rank is gone or silent."""
        for work, _, peer in self._sent:
            with self._losses(partial(self._untaken, peer)):
                work.wait()
        self._sent.clear()

    def forget(self) -> None:
        """Drop all pending messages after an error."""
        self._sent.clear()
        self._coming.clear()

    @contextmanager
    def _losses(self, describe: Callable[[], str]) -> Iterator[None]:
        """Turn torch's error for a lost connection into ``StageLost``."""
        try:
            yield
        except RuntimeError as error:
            why = str(error).strip().split("\n")[0]
            raise StageLost(
                f"{describe()}: its process ended, or does not answer ({why}). Look at what that rank said last."
            ) from error

    def _not_given(self, message: Message, peer: int) -> str:
        stage = message.stage - 1 if message.content is Content.ACTIVATION else message.stage + 1
        blocks = self.plan.stages[stage].blocks
        where = f"stage {stage} ({blocks[0]} to {blocks[-1]}, on {self._name(peer)})"
        return f"{where} sent no {message.content} of microbatch {message.microbatch}"

    def _untaken(self, peer: int) -> str:
        return f"{self._name(peer)} ({self.plan.part_of(peer)}) accepted no further message"

    def _name(self, peer: int) -> str:
        return f"rank {dist.get_global_rank(self.group, peer)}"


def _tag(message: Message) -> int:
    """Return a tag by which gloo tells messages apart; NCCL ignores it, and matches messages by their order."""
    return (message.microbatch << 12) | (message.stage << 1) | (message.content is Content.GRADIENT)


class Ties:
    """The tied parameters of this rank's stages."""

    def __init__(self, parts: Sequence[ModelPart], plan: PipelinePlan, group: dist.ProcessGroup):
        self.group = group
        by_stage = {part.stage: part.module for part in parts}
        self.first_rank, self.last_rank = plan.stages[0].rank, plan.stages[-1].rank
        self._modules = by_stage.get(0), by_stage.get(len(plan.stages) - 1)
        self._names = plan.tied

    @property
    def pairs(self) -> list[tuple[nn.Parameter | None, nn.Parameter | None]]:
        """The shared parameters on the first and on the last stage; None if that stage is on another rank."""
        first, last = self._modules
        if first is None and last is None:
            return []
        return [(first and first.get_parameter(one), last and last.get_parameter(other)) for one, other in self._names]

    @torch.no_grad()
    def copy(self) -> None:
        """Copy the values of the first stage to the last."""
        for first, last in self.pairs:
            if first is not None and last is not None:
                local_part(last).copy_(local_part(first))
            elif first is not None:
                dist.send(local_part(first).contiguous(), group=self.group, group_dst=self.last_rank)
            elif last is not None:
                room = torch.empty_like(local_part(last), memory_format=torch.contiguous_format)
                dist.recv(room, group=self.group, group_src=self.first_rank)
                local_part(last).copy_(room)

    @contextmanager
    def summing(self) -> Iterator[None]:
        """Sum over both stages, on exit, the shared gradients that the step inside adds."""
        with gradients_aside(p for pair in self.pairs for p in pair if p is not None and p.requires_grad):
            yield
            with torch.no_grad():
                for first, last in self.pairs:
                    if any(p is not None and p.requires_grad for p in (first, last)):
                        self._sum(first, last)

    def _sum(self, first: nn.Parameter | None, last: nn.Parameter | None) -> None:
        if first is not None and last is not None:
            total = local_part(_gradient(first)).add_(local_part(_gradient(last)))
            local_part(_gradient(last)).copy_(total)
            return
        mine, peer = (first, self.last_rank) if first is not None else (last, self.first_rank)
        assert mine is not None
        own = local_part(_gradient(mine))
        other = torch.empty_like(own, memory_format=torch.contiguous_format)
        sides = [
            dist.P2POp(dist.isend, own.contiguous(), group=self.group, group_peer=peer),
            dist.P2POp(dist.irecv, other, group=self.group, group_peer=peer),
        ]
        for work in dist.batch_isend_irecv(sides):
            work.wait()
        own.add_(other)  # a + b is b + a to the last bit


def _gradient(parameter: nn.Parameter) -> Tensor:
    """Return a parameter's gradient; make it zeros if the stage computed none."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


Take = Callable[[StagePart], Tensor]
"""Run the last stage's forward, and return what is wanted of it."""


@dataclass
class StageActivations:
    """The tensors that a forward keeps for its backward."""

    entered: Tensor | None
    left: Tensor | None


class Pipeline:
    """A ``Runner`` of this rank's stages.

    Attributes:
        spans: every action of the last step, with its begin and end (``time.perf_counter``).
        most_kept: largest number of (stage, microbatch) pairs of the last step with activations in memory at one time.
    """

    def __init__(
        self,
        parts: Sequence[StagePart],
        plan: Plan,
        mesh: DeviceMesh,
        loss_fn: LossFunction | CountedPairs | DeclaredLosses | None,
        inputs: Inputs,
        device: torch.device,
        enter: Callable[[Batch], None],
    ):
        assert plan.pipeline is not None
        self.plan, self.pipeline, self.device, self._inputs = plan, plan.pipeline, device, inputs
        self._enter = enter
        self.parts = {part.stage: part for part in parts}
        self.group = mesh.get_group(Axis.PP.value)
        self.rank = mesh.get_local_rank(Axis.PP.value)
        self.last_rank = self.pipeline.stages[-1].rank
        self.spans: list[tuple[Action, float, float]] = []
        self.most_kept = 0
        self._mail = Mail(self.group, self.pipeline)
        self._ties = Ties(parts, self.pipeline, self.group)
        self._deferred = {stage: DeferredGradients() for stage in self.parts}
        self._kept: dict[tuple[int, int], StageActivations] = {}
        self._to_come: dict[int, int] = {}
        self._programs: dict[tuple[int, bool], tuple[Step, ...]] = {}
        self._sums = {part.stage: sums_of(part.module, part.plan) for part in parts}
        self._objective, self._is_declared = None, isinstance(loss_fn, DeclaredLosses)
        self._scale = 1.0
        if (last := self.parts.get(len(self.pipeline.stages) - 1)) is not None:
            starts = lambda loss: fully_sharded.begin_backward_at(last.module, loss)  # noqa: E731
            self._objective = objective_of(last.module, last.plan, loss_fn, starts)
        for part in parts if self.pipeline.splits_backward else ():
            if (runtime := runtime_of(part.module)) is not None:
                runtime.sequence.deferred = self._deferred[part.stage]
                continue
            for block in self.pipeline.stages[part.stage].blocks:
                module = part.module.get_submodule(block)
                for path, transposed in self.pipeline.kind_of(block).linears:
                    defer_linear(module.get_submodule(path), transposed, self._deferred[part.stage])

    # --- public methods

    def forward_backward(self, pieces: Sequence[Batch], weight: float, scale: float = 1.0) -> Tensor:
        number, self._scale = self.pipeline.legal(len(pieces)), scale
        if number < len(pieces):
            raise UnsupportedError(
                f"the schedule {self.pipeline.schedule} is for {number} microbatches, and the step has {len(pieces)}"
            )
        # microbatches without a loss, up to a number that the schedule accepts: a last short step stays exact
        if self._is_declared:
            blank: Any = Blank(pieces[-1])
        else:
            labels, tokens = pieces[-1]["labels"], pieces[-1]["tokens"]
            blank = copy.copy(dict(pieces[-1]) if not isinstance(pieces[-1], dict) else pieces[-1])
            blank |= {"labels": torch.full_like(labels, IGNORED), "document_ids": torch.full_like(tokens, PADDING)}
        pieces = [*pieces, *[blank] * (number - len(pieces))]
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        self.spans, self.most_kept = [], 0
        self._to_come = dict.fromkeys(self.parts, len(pieces))
        with ExitStack() as stack:  # completes gradients that are sums over ranks
            stack.enter_context(self._ties.summing())
            for stage, part in self.parts.items():
                if (runtime := runtime_of(part.module)) is not None:
                    stack.enter_context(summing(self._sums[stage], runtime.group))
                stack.enter_context(fully_sharded.postponing(part.module, part.plan))
            try:
                for step in self._program(len(pieces), is_forward=False):
                    total += self._do(step, pieces, weight)
                self._mail.finish()
                for part in self.parts.values():
                    fully_sharded.reduce_gradients(part.module)
            except BaseException:
                self._mail.forget()
                self._kept.clear()
                for deferred in self._deferred.values():
                    deferred.forget()
                raise
        return total

    def evaluate(self, pieces: Sequence[Batch]) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for step in self._program(len(pieces), is_forward=True):
            total += self._do(step, pieces, 1)
        self._finish_forwards()
        return total

    def logits(self, batch: Batch) -> Tensor:
        return self._from_last(batch, lambda part: logits_of(part.module(**self._given(part, batch))))

    def row_log_probs(self, batch: Batch) -> Tensor:
        def of(part: StagePart) -> Tensor:
            forward = lambda: part.module(**self._given(part, batch))  # noqa: E731
            return log_probs_of(self._objective, part.model, forward, batch, self.device)

        return self._from_last(batch, of)

    def _from_last(self, batch: Batch, take: Callable[[StagePart], Tensor]) -> Tensor:
        """Return what the last stage takes from its forward of a microbatch, on all ranks."""
        found: list[Tensor] = []

        def taken(part: StagePart) -> Tensor:
            found.append(take(part))
            return found[0]

        for step in self._program(1, is_forward=True):
            self._do(step, [batch], 1, taken)
        self._finish_forwards()
        tensor = found[0].detach().contiguous() if found else None
        box = [None if tensor is None else (tuple(tensor.shape), tensor.dtype)]
        dist.broadcast_object_list(box, group_src=self.last_rank, group=self.group, device=self.device)
        assert box[0] is not None
        tensor = torch.empty(box[0][0], dtype=box[0][1], device=self.device) if tensor is None else tensor
        dist.broadcast(tensor, group_src=self.last_rank, group=self.group)
        return tensor

    def action_times(self) -> list[tuple[Action, float, float]]:
        since = time.time() - time.perf_counter()
        return [(action, begin + since, end + since) for action, begin, end in self.spans]

    def copy_shared(self) -> None:
        self._ties.copy()

    # --- one step of the program

    def _do(self, step: Step, pieces: Sequence[Batch], weight: float, take: Take | None = None) -> Tensor | float:
        """Run one step of the program, and return its loss, or 0."""
        if isinstance(step, Receive):
            shape, dtype = self._boundary(pieces[step.message.microbatch]), torch_dtype(self.pipeline.dtype)
            self._mail.receive(step.message, step.peer, torch.empty(shape, dtype=dtype, device=self.device))
            return 0.0
        if isinstance(step, Send):
            message, is_activation = step.message, step.message.content is Content.ACTIVATION
            key = message.stage + (-1 if is_activation else 1), message.microbatch
            kept = self._kept[key]
            sent = kept.left if is_activation else _gradient_of(kept)
            assert sent is not None
            if is_activation:
                is_done = not torch.is_grad_enabled()
            else:
                kept.entered, is_done = None, message.microbatch not in self._deferred[key[0]].waiting
            if is_done:
                del self._kept[key]
            self._mail.send(message, step.peer, sent)
            return 0.0
        message = message_before(step, len(self.pipeline.stages))
        given = None if message is None else self._mail.take(message)
        begin, loss = time.perf_counter(), 0.0
        if step.work is Work.FORWARD:
            loss = self._forward(step, given, pieces[step.microbatch], weight, take)
        elif step.work is Work.WEIGHT:
            self._deferred[step.stage].do(step.microbatch)
            del self._kept[step.stage, step.microbatch]
        else:
            self._enter(pieces[step.microbatch])  # recomputed forwards read this microbatch
            self._backward(step, given)
            self._to_come[step.stage] -= 1
            if self.plan.data.sync_grad_accum and self._to_come[step.stage]:  # gradients accumulate as shards
                fully_sharded.reduce_between(self.parts[step.stage].module, self.plan)
        if torch.is_grad_enabled():
            self.spans.append((step, begin, time.perf_counter()))
        return loss

    def _forward(
        self, action: Action, entered: Tensor | None, piece: Batch, weight: float, take: Take | None
    ) -> Tensor | float:
        part = self.parts[action.stage]
        if entered is not None and torch.is_grad_enabled():
            entered.requires_grad_()
        part.passage.shape, part.passage.entering = tuple(piece["tokens"].shape), entered
        if action.stage and (runtime := runtime_of(part.module)) is not None:
            runtime.sequence.begin(*piece["tokens"].shape)
        result: Tensor | float = 0.0
        left: Tensor | None
        if action.stage < len(self.pipeline.stages) - 1:
            part.module(**self._given(part, piece))
            left = part.passage.leaving
            assert left is not None
            wanted, dtype = self._boundary(piece), torch_dtype(self.pipeline.dtype)
            if tuple(left.shape) != wanted or left.dtype != dtype:
                raise UnsupportedError(
                    f"{self.plan.model} cannot be cut behind {self.pipeline.stages[action.stage].blocks[-1]}: the block"
                    f" gives {tuple(left.shape)} of {left.dtype}, and the plan expects {wanted} of {dtype}. Set"
                    f" layout.pp = 1."
                )
            fully_sharded.begin_backward_at(part.module, left)
        elif take is not None:
            left = take(part)
        else:
            assert self._objective is not None
            targets = self._objective.targets(piece, self.device)
            left = self._objective(lambda: part.module(**self._given(part, piece)), *targets) / weight
            result = left.detach()
        part.passage.entering = part.passage.leaving = None
        if torch.is_grad_enabled():
            self._kept[action.stage, action.microbatch] = StageActivations(entered, left)
            self.most_kept = max(self.most_kept, len(self._kept))
        elif action.stage < len(self.pipeline.stages) - 1:
            self._kept[action.stage, action.microbatch] = StageActivations(None, left)
        if (given := message_after(action, len(self.pipeline.stages))) is not None and self._is_here(given):
            self._mail.hand_over(given, left)
        return result

    def _backward(self, action: Action, gradient: Tensor | None) -> None:
        kept = self._kept[action.stage, action.microbatch]
        assert kept.left is not None
        deferred = self._deferred[action.stage]
        if action.work is Work.INPUT:
            deferred.begin(action.microbatch)
        if kept.left.requires_grad:
            if gradient is None and self._scale != 1.0:  # of a loss that is scaled
                gradient = torch.full_like(kept.left, self._scale)
            torch.autograd.backward(kept.left, gradient)
        deferred.end()
        kept.left = None
        given = message_after(action, len(self.pipeline.stages))
        if given is not None and self._is_here(given):
            self._mail.hand_over(given, _gradient_of(kept))
        if action.work is Work.BACKWARD and (given is None or self._is_here(given)):
            del self._kept[action.stage, action.microbatch]

    # --- helpers

    def _given(self, part: StagePart, piece: Batch) -> dict[str, Any]:
        """Return the arguments of a stage's forward."""
        return arguments_of(part.stage, self._inputs(piece))

    def _finish_forwards(self) -> None:
        self._mail.finish()
        self._kept.clear()

    def _program(self, microbatches: int, *, is_forward: bool) -> tuple[Step, ...]:
        key = microbatches, is_forward
        if key not in self._programs:
            ranks, order = tuple(stage.rank for stage in self.pipeline.stages), self.pipeline.order
            schedule = forwards(ranks, microbatches) if is_forward else order(microbatches)
            self._programs[key] = programs(schedule)[self.rank]
        return self._programs[key]

    def _boundary(self, piece: Batch) -> tuple[int, int, int]:
        """Return (rows, this rank's tokens, features) of the tensor between stages."""
        rows, length = piece["tokens"].shape
        if (tensor := self.plan.tensor) is not None and tensor.sequence_parallel:
            length = share_of_sequence(length, tensor.ranks)
        return rows, length, self.pipeline.width

    def _is_here(self, message: Message) -> bool:
        return self.pipeline.stages[message.stage].rank == self.rank


def _gradient_of(kept: StageActivations) -> Tensor:
    """Return the gradient of a stage's input; zeros if nothing before the stage is trained."""
    assert kept.entered is not None
    return torch.zeros_like(kept.entered) if kept.entered.grad is None else kept.entered.grad
