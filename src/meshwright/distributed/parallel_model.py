"""Run a model on a mesh: ``ParallelModel``, with the one step that every layout shares."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from meshwright.comparison.sketch import TokensOfRank
from meshwright.core.axes import Axis
from meshwright.core.devices import current_device
from meshwright.core.errors import UnsupportedError
from meshwright.core.losses import Loss, PreferenceLoss
from meshwright.core.record import remember
from meshwright.distributed.optimizer.step import LossScale
from meshwright.distributed.step.module import Inference
from meshwright.distributed.step.part import OpenedStep, StepLoss, StepResult
from meshwright.distributed.step.whole_model import runner_of
from meshwright.introspection.facts import ModelFacts
from meshwright.introspection.signature import Signature
from meshwright.planning.layout import TOKENS
from meshwright.planning.pipeline.schedules.simulate import Action
from meshwright.planning.plan import Plan

from . import experts
from .context import runtime
from .context.context_parallel import runtime_of
from .data import accumulation, fully_sharded, replicated
from .experts import ExpertLoad, LayerLoad, SharedRouterLoss
from .loss import preference
from .loss.declared import DeclaredLosses
from .loss.first_batch import FirstBatch
from .mesh import data_groups, data_position, get_pp_rank, groups_of, is_first_of_stage, tensor_position
from .optimizer import step as optimizer_step
from .optimizer.grad_clip import EPSILON, gradients_times, local_gradients, scale_gradients, total_norm
from .order import Applied, applied
from .process import agree
from .step import batch as step_batch
from .step import opening
from .step.objective import LossFunction
from .step.opening import StepOpening
from .step.part import ModelPart
from .weights import audit
from .weights import audit as describe


class ParallelModel(Inference):
    """A model laid onto a mesh by a plan, made by ``parallelize``.

    Attributes:
        module: the module to call (a DDP wrapper, or the model itself).
        plan: the plan that was applied.
        facts: facts about the model before the layout.
        mesh: the device mesh, None in one process.
        skipped_steps: number of optimizer steps that were skipped so far.
        loss_scale: factor of the loss while gradients are computed in float16; None in other dtypes.
        reference_refusal: why batches of pairs need ``reference_log_probs``; "" where adapters are switched off for it.
    """

    def __init__(
        self,
        parts: Sequence[ModelPart],
        plan: Plan,
        facts: ModelFacts,
        mesh: DeviceMesh | None,
        *,
        loss_fn: LossFunction | PreferenceLoss | Loss | Mapping[str, Loss] | None = None,
        microbatch_rows: int = 0,
        adds_up: bool = True,
    ):
        super().__init__(parts)
        self.module, self.plan, self.facts, self.mesh = parts[0].module, plan, facts, mesh
        self.microbatch_rows = microbatch_rows
        self._pairs = preference.PairsOfModel.of(loss_fn, [part.model for part in parts], facts, plan)
        self.reference_refusal = "the loss is not of pairs" if self._pairs is None else self._pairs.switch.refusal
        self.skipped_steps = 0
        remember(self, Applied(applied(parts[0].model)))
        signature = Signature.of(parts[0].model)
        self._declared = DeclaredLosses.of(loss_fn, parts[0].model, signature.takes["tokens"])
        self._adds_up, self._is_checked = adds_up and self._declared is None, False
        self._last_loss: Tensor | None = None
        self._data_groups = data_groups(mesh)
        self._pipeline_groups = groups_of(mesh, Axis.PP)
        self._copy_groups = groups_of(mesh, *plan.shares.copies)
        self._token_groups = groups_of(mesh, *plan.shares.routed)
        self._routers = experts.routers_of(self.parts)
        experts.share_microbatches(self._routers, self._data_groups)
        self._expert_load = ExpertLoad(self.parts) if facts.has_experts else None
        router = plan.router_loss
        self._router_loss = None if router is None else SharedRouterLoss(router, parts[0].model, self._token_groups)
        self._context = [found for part in self.parts if (found := runtime_of(part)) is not None]
        self.loss_scale = LossScale(plan.precision.loss_scale) if plan.precision.loss_scale else None
        self._opening = StepOpening(
            plan,
            facts,
            signature,
            loss_fn is not None,
            self._pairs is not None,
            self._pairs is not None and not self.reference_refusal,
            self._declared,
            self._context,
            self._data_groups,
            groups_of(mesh, *TOKENS),
            bool(self._routers or self._router_loss),
        )
        loss: Any = self._declared or (loss_fn if self._pairs is None else self._pairs.counted)
        self._runner = runner_of(
            self._parts, plan, mesh, loss, self._inputs, self.device, self._router_loss, self._enter
        )

    @property
    def device(self) -> torch.device:
        """The device of the computation."""
        return current_device(self.plan.device)

    @property
    def data_rank(self) -> int:
        """The place of this rank among those that bring other rows; ranks that share rows have the same."""
        return data_position(self.mesh)[0]

    @property
    def data_ranks(self) -> int:
        """Number of shares that a step's rows are dealt to."""
        return data_position(self.mesh)[1]

    def learn_documents(self) -> None:
        """Learn whether positions alone keep packed documents apart in this model (collective: a small forward)."""
        signature = self._opening.signature
        if signature.takes["document_ids"] is None and signature.takes["positions"] is not None:
            with self._evaluating():
                apart = not agree.any_rank(not opening.stay_apart(self._runner.logits))
            self._opening.signature = replace(signature, positions_part_documents=apart)

    def own_tokens(self, batch: step_batch.Batch) -> TokensOfRank:
        """Return which tokens of a step's rows lie on this rank between the model's blocks."""
        length = batch["tokens"].shape[1]
        if runtime.PLACES in batch:
            raise UnsupportedError("a trace compares whole rows: bring them without places, and they are cut here")
        if self._context:
            is_cut = self.plan.tensor is not None and self.plan.tensor.sequence_parallel
            return self._context[0].tokens_of(batch, *(tensor_position(self.mesh) if is_cut else (0, 1)))
        return TokensOfRank.run(*tensor_position(self.mesh), length)

    def accumulation_context(self, is_last_microbatch: bool) -> AbstractContextManager[None]:
        """Delay gradient communication to the last microbatch, unless ``sync_grad_accum``; restored on exceptions."""
        return accumulation.context(self.module, self.plan, is_last_microbatch)

    def forward_backward(self, batch: step_batch.Brought) -> StepLoss:
        """Run forward and backward of this rank's share of one optimizer step; gradients accumulate in ``.grad``.

        Args:
            batch: one dict of (rows, seq) tensors, cut into microbatches by this call, or a list of microbatches.
                Keys: tokens, labels (already shifted, -100: no loss), optional loss_mask (floats other than 0 and 1
                weigh), positions, document_ids, arguments of the model, and, on a context axis, places in whole rows
                (int64), where a rank brings its own tokens. Or the error why this rank has no batch, for all to raise.

        The loss is a sum over real tokens divided by their number in the whole step on all data ranks (with weights:
        by their sum), so accumulation over unequal microbatches and unequal ranks is exact.

        Raises:
            ConfigError: some rank's batch does not fit; raised on every rank before any model code runs.
        """
        return self.run_opened(self._open_step(batch))

    def run_opened(self, step: OpenedStep) -> StepLoss:
        """Run forward and backward of a step whose counts all ranks know (``forward_backward`` opens it)."""
        pieces, tokens, weight, routed = step
        for model in self.parts:
            fully_sharded.reshard(model)  # gathered by somebody else's forward, it would change gradients under tp
        scale = self.loss_scale.value if self.loss_scale is not None else 1.0
        experts.begin_step(self._routers, routed, self.device, scale)
        experts.begin_step([self._router_loss] if self._router_loss is not None else [], routed, self.device)
        try:
            with gradients_times(scale, self.parameters):
                total = self._runner.forward_backward(pieces, weight or 1.0, scale)
        except BaseException:
            experts.forget_step(self._routers)
            if self._router_loss is not None:
                self._router_loss.forget()
            raise
        result = self._of_all_ranks(total, tokens, weight)
        self._last_loss = result.loss
        return result

    def optimizer_step(
        self, optimizer: torch.optim.Optimizer, max_norm: float | None = None, *, skip: bool | None = None
    ) -> StepResult:
        """Clip by the global norm, step the optimizer, clear the gradients.

        A non-finite loss or gradient on any rank skips the update on all: the loss is a global sum, and replicas
        agree on the largest norm (any non-finite one counts as largest), so that no single copy of a weight is
        clipped or skipped.

        Args:
            max_norm: largest global 2-norm of the gradients; None or 0: no clipping.
            skip: a guard's verdict: true on any rank skips the update on all, which give a verdict; None: no guard.

        Raises:
            ConfigError, UnsupportedError: the optimizer does not fit the plan (``plan.optimizer``).
        """
        parts = local_gradients(self._counted_once())
        norm = agree.largest_of_copies(float(total_norm(parts, self._pipeline_groups)), self._copy_groups)
        for context in self._context:
            context.verdicts.raise_known()
        is_finite = (
            math.isfinite(norm)
            and bool(parts or self._pipeline_groups)
            and (self._last_loss is None or math.isfinite(float(self._last_loss)))
        )
        is_refused = skip is not None and agree.any_rank(skip)
        skipped = is_refused or not is_finite
        if skipped:
            self.skipped_steps += 1
        else:
            if max_norm and norm > max_norm:
                scale_gradients(local_gradients(self.parameters()), max_norm / (norm + EPSILON))
            optimizer_step.step(optimizer, self.plan.optimizer, self.device, self.mesh)
        if self.loss_scale is not None:
            self.loss_scale.follow(is_finite=is_finite)
        experts.end_step(self._routers, self._token_groups, skipped=skipped)
        optimizer.zero_grad(set_to_none=True)
        return StepResult(norm, skipped)

    def _open_step(self, batch: step_batch.Brought) -> OpenedStep:
        """Check batches, agree and count (see ``StepOpening``); check a declared loss on the first batch."""

        def bring() -> list[step_batch.Batch]:
            if isinstance(batch, Exception):
                raise batch
            replicated.refuse_other_trained(self.module)
            named = self._opening.named(batch)
            return step_batch.microbatches(named, self.microbatch_rows or self._suggested_rows(named))  # type: ignore[arg-type]

        step = self.refer(self._opening.open(bring))
        is_judged = "tokens" in step.pieces[0] or self.plan.premises_known
        if not self._is_checked and not (self._adds_up and is_judged):
            self._check_first(step.pieces)
        return step

    def refer(self, step: OpenedStep) -> OpenedStep:
        """Give pairs that bring no reference what the model without its adapters gives to them (collective)."""
        if self._pairs is None or not preference.lack_reference(step.pieces):
            return step
        with self._evaluating():
            return step._replace(pieces=self._pairs.refer(step.pieces, self._runner.row_log_probs))

    def _check_first(self, pieces: Sequence[step_batch.Batch]) -> None:
        """Raise ConfigError on all ranks if losses are not as declared, or rows depend on each other (collective)."""
        first = FirstBatch(self._runner, self._declared, self.plan)
        with self._evaluating():
            problem = first.problem(pieces)
        agree.raise_first(problem, [*self._data_groups, *self._pipeline_groups])
        self._is_checked = True

    def _inputs(self, batch: step_batch.Batch) -> dict[str, Any]:
        """Return the arguments of the model's forward, for whole rows or for this rank's part of them."""
        self._enter(batch)
        with_targets = self._declared is not None
        if with_targets and self.plan.pipeline is not None:  # only the last stage could make a loss of its own
            batch = {key: value for key, value in batch.items() if key != "labels"}
        return self._opening.signature.inputs(batch, self.device, with_targets=with_targets)

    def _enter(self, batch: step_batch.Batch) -> None:
        """Let attention reach the other ranks' tokens of this microbatch."""
        for context in self._context:
            context.enter(batch)

    def _suggested_rows(self, batch: Any) -> int:
        """Choose rows per microbatch by default: all, or in a pipeline the number that keeps its ranks busy."""
        tokens = batch.get("tokens") if isinstance(batch, dict) else None
        if self.plan.pipeline is None or not isinstance(tokens, Tensor) or not tokens.shape[:1].numel():
            return 0
        return self.plan.pipeline.rows_per_microbatch(len(tokens), 1 if self._pairs is None else 2)

    def _of_all_ranks(self, value: Tensor, tokens: int, weight: float) -> StepLoss:
        """Sum a loss over ranks, and each of several declared ones, or the figures of pairs (collective)."""
        own = (
            self._pairs.counted.taken(value) if self._pairs else self._declared.shares(value) if self._declared else {}
        )
        words = torch.stack([value, *own.values()])
        for group in (*self._data_groups, *self._pipeline_groups):
            dist.all_reduce(words, group=group)
        if self._pairs is None:
            return StepLoss(words[0], tokens, dict(zip(own, words[1:], strict=True)), weight)
        return StepLoss(words[0], tokens, {}, weight, dict(zip(own, words[1:] / (weight or 1.0), strict=True)))

    def evaluate(self, batch: step_batch.Batch | Sequence[step_batch.Batch]) -> StepLoss:
        """Compute the loss of a batch (as in ``forward_backward``) without gradients, in evaluation mode."""
        pieces, tokens, weight, _ = self._open_step(batch)
        with self._evaluating():
            total = self._runner.evaluate(pieces)
        return self._of_all_ranks(total / (weight or 1.0), tokens, weight)

    def expert_load(self) -> list[LayerLoad]:
        """Report the spread of training tokens over layers' experts, if any, since the last call (collective)."""
        return (
            self._expert_load.take(self._token_groups, self._pipeline_groups) if self._expert_load is not None else []
        )

    def action_times(self) -> tuple[int, list[tuple[Action, float, float]]] | None:
        """Return this rank on the pipeline axis, and its last step's actions with begin and end (epoch seconds).

        None without a pipeline, and on ranks that are not the first of their stage."""
        if self.plan.pipeline is None or self.mesh is None or not is_first_of_stage(self.mesh):
            return None
        return get_pp_rank(self.mesh), self._runner.action_times()

    def copy_shared(self) -> None:
        """Copy a pipeline's shared parameters from the first stage to the last (collective over that axis)."""
        self._runner.copy_shared()

    def __repr__(self) -> str:
        """Describe this rank's model as it is, not as planned: placements, dtypes, bytes, applied techniques."""
        return describe.describe(self.parts, self.plan)

    def audit(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Check the model against the plan, and a given optimizer for exactly the trained parameters (collective).

        Raises:
            IntegrityError: a parameter, by name, that is not as planned, not written, or not equal on replicas.
        """
        parts = (
            self._parts if self.plan.pipeline is not None else [replace(part, plan=self.plan) for part in self._parts]
        )
        audit.audit(parts, self._data_groups, optimizer)
