"""Estimate the memory of one rank's step by a dry run on tensors without memory.

The same code applies the plan's techniques as for the real model. Then forward and backward run, and the live memory
is accounted for as in the first step of a real run.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn

from meshwright.core.axes import Axis
from meshwright.core.dtypes import torch_dtype
from meshwright.core.names import clean
from meshwright.core.parts import take
from meshwright.distributed import order
from meshwright.distributed.context.runtime import first_tokens
from meshwright.distributed.context.runtime import wrap_modules as wrap_callers
from meshwright.distributed.exchange.ranks import share_of_sequence
from meshwright.distributed.experts.router_loss import SharedRouterLoss
from meshwright.distributed.pipeline.absent import on_meta
from meshwright.distributed.pipeline.split import StagePart, split
from meshwright.distributed.step.objective import Objective
from meshwright.distributed.step.part import ModelPart
from meshwright.distributed.tensor.parallel import wrap_modules
from meshwright.distributed.tensor.runtime import runtime_of
from meshwright.introspection.facts import ModelFacts, model_facts
from meshwright.introspection.signature import Signature
from meshwright.planning.memory.step import MemoryEstimate, StageMemory, not_estimated, over_ranks
from meshwright.planning.plan import Plan
from meshwright.planning.traffic import resolved
from meshwright.planning.values import Batch, DataParallel

from .account import MemoryAccount, MemoryUse, dims_of_logits
from .fake import DryRunError, FakeRanks, casting, imagining, same_random_numbers, untouched, without_memory
from .repeated_blocks import RepeatedBlocks

KINDS = (MemoryUse.ACTIVATIONS, MemoryUse.LOGITS)
"""Kinds of memory that are estimated; communication buffers of parameters and gradients are not."""
KEYS = ("tokens", "labels", "positions", "document_ids")
"""Keys of the batches that loaders return."""
BEFORE_THE_CUT, BEHIND_THE_CUT = ("freeze", "float8"), ("fused_loss", "activation_checkpoint")
"""Techniques applied before and after tensor parallelism: those that change the tensors saved by a forward."""
SELDOM = 1 << 30


def estimate_memory(facts: ModelFacts, plan: Plan, batch: Batch, *, keys: tuple[str, ...] = KEYS) -> MemoryEstimate:
    """Estimate the bytes of activations and logits that ranks hold in a step, without a process group.

    The model is not changed. No exception is raised: if the model's code fails on tensors without memory, the result
    has no estimate, and names the reason.

    Args:
        facts: facts of the model before a plan is applied.
        keys: keys of a step's batch.
    """
    if (why := not_estimated(plan)) or facts.module is None:
        return MemoryEstimate((), why or "the model itself is not at hand")
    try:
        with same_random_numbers(), untouched(facts.module):
            player = _Player(facts, plan, resolved(plan, batch), keys)
            with imagining(experts=facts.has_experts), _quiet():
                return player.estimate()
    except DryRunError as error:
        return MemoryEstimate((), f"{facts.kind}: {error}")
    except Exception as error:  # noqa: BLE001  (whatever a model's code raises when its tensors have no values)
        message = (str(error).splitlines() or [""])[0]
        return MemoryEstimate(
            (), f"{facts.kind} cannot be run on tensors without values ({type(error).__name__}: {message})"
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch's log of operators that fail on fake tensors: the estimate reports the error."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


@dataclass
class _Playing:
    """One rank's part of the model, ready for the dry run.

    Attributes:
        repeated: the repeated blocks, some of which are skipped.
        objective: loss of a microbatch; used on the last stage.
        router_loss: the model's own router loss, added to the objective.
    """

    part: ModelPart
    account: MemoryAccount
    repeated: RepeatedBlocks
    objective: Objective
    router_loss: SharedRouterLoss | None


class _Player:
    def __init__(self, facts: ModelFacts, plan: Plan, batch: Batch, keys: tuple[str, ...]):
        assert facts.module is not None
        self.plan, self.batch = plan, batch
        self.sharded = plan.data.technique == "fully_shard"
        self.dtype = torch_dtype(plan.precision.compute if self.sharded else plan.precision.master)
        module = on_meta(facts.module)
        self.facts, self.signature, self.keys = model_facts(module), Signature.of(module), keys
        self.parts = [ModelPart(module, plan, self.facts)]
        if plan.pipeline is not None:
            self.parts = [part for rank in range(plan.pipeline.ranks) for part in split(module, plan, self.facts, rank)]

    def estimate(self) -> MemoryEstimate:
        """Return the estimate; call this inside ``imagining``."""
        batch, pipeline = self.batch, self.plan.pipeline
        own = max(1, batch.global_rows // self.plan.data_ranks)
        rows = min(own, batch.microbatch_rows or own)
        self.piece = self._piece(rows, batch.seq_len)
        self.inputs = self.signature.inputs(self.piece, torch.device("cpu"))
        microbatches = batch.microbatches(self.plan.data_ranks)
        if pipeline is None:
            return MemoryEstimate((_known(self._whole(microbatches)),))
        stages = {part.stage: self._stage(cast("StagePart", part)) for part in self.parts}
        return MemoryEstimate(tuple(map(_known, over_ranks(stages, pipeline.order(pipeline.legal(microbatches))))))

    def _piece(self, rows: int, length: int) -> Mapping[str, Tensor]:
        """Return a microbatch of whole rows of one document, or the first rank's tokens of it."""
        whole = {key: torch.zeros((rows, length), dtype=torch.int64) for key in self.keys}
        if self.plan.context is None:
            return whole
        return first_tokens(whole, self.plan.context, self.signature)

    def _whole(self, microbatches: int) -> Mapping[MemoryUse, int]:
        """Run a whole model: two microbatches if the second adds to the first one's unreduced gradients, else one."""
        playing = self._playing(self.parts[0])
        leaves_reduced = self.sharded and self.plan.data.sync_grad_accum
        with playing.account:
            for _ in range(1 if leaves_reduced else min(microbatches, 2)):
                self._loss(playing).backward()
        return playing.account.most + playing.repeated.kept()

    def _loss(self, playing: _Playing) -> Tensor:
        labels, routers = self.piece["labels"], playing.router_loss
        if routers is not None:
            routers.loss_share = torch.ones((), dtype=torch.float64)
            routers.begin()
        loss = playing.objective(lambda: playing.part.module(**self.inputs), labels) / labels.numel()
        return loss if routers is None else loss + routers(self.piece)

    def _stage(self, part: StagePart) -> StageMemory:
        playing, pipeline = self._playing(part), self.plan.pipeline
        assert pipeline is not None
        is_last = part.stage == len(pipeline.stages) - 1
        account, passage = playing.account, part.passage
        with account:
            entering = self._boundary(account).requires_grad_() if part.stage else None
            passage.shape, passage.entering = tuple(self.piece["tokens"].shape), entering
            if (runtime := runtime_of(part.module)) is not None and part.stage:
                runtime.sequence.begin(*passage.shape)
            left: Tensor | None
            if is_last:
                left = self._loss(playing)
            else:
                part.module(**self.inputs)
                left = passage.leaving
            assert left is not None
            passage.entering = passage.leaving = None
            if not is_last:
                account.note_messages([left])
            forward, kept = account.take(), account.now()
            gradient = None if is_last else self._boundary(account)
            if left.requires_grad:
                torch.autograd.backward(left, gradient)
            backward, more = account.take(), playing.repeated.kept()
        return StageMemory(kept + more, forward + more, backward + more)

    def _boundary(self, account: MemoryAccount) -> Tensor:
        """Return a receive buffer for the boundary tensor of another stage."""
        pipeline, tensor = self.plan.pipeline, self.plan.tensor
        assert pipeline is not None
        rows, length = self.piece["tokens"].shape
        if tensor is not None and tensor.sequence_parallel:
            length = share_of_sequence(length, tensor.ranks)
        room = torch.empty((rows, length, pipeline.width), dtype=torch_dtype(pipeline.dtype))
        account.note_messages([room])
        return room

    def _playing(self, part: ModelPart) -> _Playing:
        """Apply the plan's techniques in their order, without FSDP: a block's weights are whole while it computes."""
        plan, site = replace(part.plan, data=DataParallel("none")), order.Site(None, part.facts)
        without_memory(part.module, self.dtype)
        module = order.apply(part.module, plan, site, only=BEFORE_THE_CUT)
        vocabulary = dims_of_logits(self.facts.vocab_size or 0, self.plan.size(Axis.TP))
        account = MemoryAccount([module], vocabulary, looks_every=SELDOM)
        if plan.tensor is not None:
            ranks = FakeRanks(plan.tensor.ranks, account.note_messages)
            wrap_modules(module, plan.tensor, ranks, sums_at_once=plan.data.reduction == "mean")
        if plan.context is not None:
            peers = FakeRanks(plan.context.ranks, account.note_messages)
            wrap_callers(module, plan.context, peers).enter(self.piece)
        order.apply(module, plan, site, only=BEHIND_THE_CUT)
        objective = Objective(module, plan, None, lambda loss: None)
        self._cut(module, plan)
        self._cast(module, part.plan)
        part.module = module
        routers = None if plan.router_loss is None else SharedRouterLoss(plan.router_loss, module, ())
        repeated = RepeatedBlocks(module, part.plan, part.facts.blocks, account)
        return _Playing(part, account, repeated, objective, routers)

    def _cut(self, module: nn.Module, plan: Plan) -> None:
        if (tensor := plan.tensor) is not None:
            for name, parameter in module.named_parameters():
                if (cut := tensor.cut_of(clean(name), parameter.shape)) is not None:
                    parameter.data = take(parameter.data, *cut, 0, tensor.ranks).clone()

    def _cast(self, module: nn.Module, plan: Plan) -> None:
        precision = plan.precision
        if self.sharded and precision.is_mixed and precision.cast_forward_inputs:
            for unit in plan.units:
                if not unit.experts:
                    casting(module.get_submodule(unit.name), torch_dtype(precision.compute))


def _known(held: Mapping[MemoryUse, int]) -> dict[MemoryUse, int]:
    return {kind: held.get(kind, 0) for kind in KINDS}
