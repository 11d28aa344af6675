"""Record the steps of a plan's ranks: the run's own code, on tensors without memory, for one rank of each kind."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from meshwright.core.axes import Axis
from meshwright.core.errors import UnsupportedError
from meshwright.core.torch_private import fake_mode
from meshwright.distributed.context.runtime import first_tokens
from meshwright.distributed.memory.dry_run import (
    KEYS,
    BuildOptimizer,
    DryRun,
    DryRunError,
    default_optimizer,
    imagining,
    make_states,
    quiet,
    untouched,
)
from meshwright.distributed.parallel_model import ParallelModel
from meshwright.distributed.step.part import OpenedStep, StepLoss
from meshwright.introspection.constructor import seeded
from meshwright.introspection.facts import ModelFacts
from meshwright.planning.collectives import resolved
from meshwright.planning.plan import Plan
from meshwright.planning.rank_kinds import coordinates, kinds_of_ranks
from meshwright.planning.values import Batch

from .buckets import reduce_in_buckets
from .operators import Phase, StepOfRank
from .places import places_like
from .recorder import StepRecorder

if TYPE_CHECKING:
    from meshwright.core.torch_private import FakeTensorMode

CLIPPED = 1e-6
"""Norm of the gradients above which they are clipped, where clipping is on: always."""


def record_steps(
    facts: ModelFacts,
    plan: Plan,
    batch: Batch,
    *,
    max_norm: float = 0.0,
    keys: tuple[str, ...] = KEYS,
    build_optimizer: BuildOptimizer | None = None,
) -> tuple[StepOfRank, ...]:
    """Record a step of every rank of a plan, in the order of ranks; without devices or other ranks.

    Ranks with the same work are recorded once. Compiled blocks are recorded as if they were not compiled.

    Args:
        facts: facts of the model before the plan is applied.
        max_norm: norm of the gradients above which they are clipped; 0: never.
        keys: keys of a step's batch.
        build_optimizer: makes the optimizer; by default torch's class for the plan's word.

    Raises:
        UnsupportedError: the model is not at hand, or its code fails on tensors without values.
    """
    if facts.module is None:
        raise UnsupportedError("the model itself is not at hand, and its operators cannot be recorded")
    batch = resolved(plan, batch)
    found: dict[int, StepOfRank] = {}
    try:
        with seeded(0), untouched(facts.module), quiet():
            recording = _Recording(facts, plan, batch, keys, build_optimizer or default_optimizer)
            for kind in kinds_of_ranks(plan, facts, batch):
                first = found[kind.ranks[0]] = recording.of(kind.ranks[0], max_norm)
                for rank in kind.ranks[1:]:
                    place_of = places_like(plan, first.rank, rank)
                    if all(place_of(ranks) for ranks in first.groups):
                        found[rank] = first.moved_to(rank, place_of)
                    else:  # a group that follows no axis
                        found[rank] = recording.of(rank, max_norm)
    except UnsupportedError:
        raise
    except DryRunError as error:
        raise UnsupportedError(f"the operators of {facts.kind} cannot be recorded: {error}") from None
    except Exception as error:
        message = (str(error).splitlines() or [""])[0]
        raise UnsupportedError(
            f"the operators of {facts.kind} cannot be recorded: it does not run on tensors without values"
            f" ({type(error).__name__}: {message})"
        ) from error
    return tuple(found[rank] for rank in range(plan.world))


class _Recording(DryRun):
    def of(self, rank: int, max_norm: float) -> StepOfRank:
        mode = fake_mode()
        recorder = StepRecorder()
        with self.laid_out(rank, mode) as (parts, plan, facts, mesh):
            model = _RecordedModel(parts, plan, facts, mesh, microbatch_rows=self.rows)
            model.mode, model.recorder = mode, recorder
            model.cut_by_places(coordinates(plan, rank)[Axis.CP])
            with self.imagining(mode):
                optimizer = self.build_optimizer(model)
                make_states(optimizer)
            buckets = None
            if self.copies_gradients:
                buckets = reduce_in_buckets(model.parts[0], self.asked, self.microbatches, recorder)
            model.forward_backward(self._whole_batch())
            with self.imagining(mode), recorder:
                model.optimizer_step(optimizer, min(max_norm, CLIPPED))
            del buckets
        return StepOfRank(rank, tuple(recorder.events))

    def _whole_batch(self) -> dict[str, Tensor]:
        rows = max(1, self.batch.global_rows // self.plan.data_ranks)
        return {key: torch.zeros((rows, self.batch.seq_len), dtype=torch.int64) for key in self.keys}


class _RecordedModel(ParallelModel):
    """Opens a step with values, since the host reads them, and runs it without."""

    mode: FakeTensorMode
    recorder: StepRecorder

    def cut_by_places(self, rank: int) -> None:
        """Cut rows over the context axis without the proof that a run begins with, which computes with values."""
        for runtime in self._context:
            setattr(runtime, "cut", partial(_tokens_of, plan=runtime.plan, rank=rank))  # noqa: B010

    def _open_step(self, batch: Any) -> OpenedStep:
        with self.recorder:
            return super()._open_step(batch)

    def run_opened(self, step: OpenedStep) -> StepLoss:
        with imagining(mode=self.mode), self.recorder:
            self.recorder.phase = Phase.BACKWARD
            found = super().run_opened(step)
            self.recorder.phase = Phase.STEP
        return found


def _tokens_of(batch: Any, signature: Any, values: Any = None, *, plan: Any, rank: int) -> Any:
    return first_tokens(batch, plan, signature, rank)
