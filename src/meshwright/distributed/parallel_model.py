"""ParallelModel: a model on a mesh, and the one step that every layout shares."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from meshwright.core.errors import ConfigError
from meshwright.core.names import clean
from meshwright.introspection.facts import ModelFacts
from meshwright.introspection.signature import Signature
from meshwright.planning.plan import Plan

from . import accumulation, agree, audit, describe, documents, fully_sharded, generation, step_batch
from .grad_clip import EPSILON, local_gradients, scale_gradients, total_norm
from .mesh import data_groups
from .parameter_groups import make_parameter_groups
from .tensor.objective import LossFunction, Objective
from .tensor.parallel import sums_of
from .tensor.runtime import runtime_of
from .tensor.sums import summing


@dataclass(frozen=True)
class StepLoss:
    """``loss``: mean over all real tokens of the step on all ranks, in nats, 0-dim float64, equal on every rank; ``tokens``: how many."""

    loss: Tensor
    tokens: int

    def __float__(self) -> float:
        return float(self.loss)


@dataclass(frozen=True)
class StepResult:
    """``grad_norm``: global 2-norm before clipping; ``skipped``: the weights were left alone (non-finite loss or gradient)."""

    grad_norm: float
    skipped: bool


class ParallelModel:
    """A model laid onto a mesh by a plan. Make it with ``parallelize``.

    Attributes:
        module: what is called (a DDP wrapper, or the model itself).
        plan: what was applied.
        facts: what the model was before.
        mesh: the device mesh, None in one process.
        skipped_steps: optimizer steps that were skipped so far.
    """

    def __init__(
        self,
        module: nn.Module,
        plan: Plan,
        facts: ModelFacts,
        mesh: DeviceMesh | None,
        *,
        loss_fn: LossFunction | None = None,
        microbatch_rows: int = 0,
    ):
        self.module, self.plan, self.facts, self.mesh = module, plan, facts, mesh
        self.microbatch_rows = microbatch_rows
        self.skipped_steps = 0
        self._model = module.module if isinstance(module, DistributedDataParallel) else module
        self._signature = Signature.of(self._model)
        self._last_loss: Tensor | None = None
        self._data_groups = data_groups(mesh)
        self._objective = Objective(self._model, plan, loss_fn, lambda loss: fully_sharded.begin_backward_at(self._model, loss))

    # --- what it consists of

    @property
    def parts(self) -> list[nn.Module]:
        """The local modules (one; pipeline layouts will have several)."""
        return [self._model]

    @property
    def device(self) -> torch.device:
        """Where the computation runs."""
        return torch.device("cuda", torch.cuda.current_device()) if self.plan.device == "cuda" else torch.device("cpu")

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(global name, parameter), tied ones once. Sharded parameters are DTensors."""
        for name, parameter in self._model.named_parameters():
            yield clean(name), parameter

    def parameters(self) -> Iterator[nn.Parameter]:
        for _, parameter in self.named_parameters():
            yield parameter

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """(global name, buffer) of the buffers that belong to a checkpoint."""
        persistent = {fact.name for fact in self.facts.buffers if fact.persistent}
        for name, buffer in self._model.named_buffers():
            if clean(name) in persistent:
                yield clean(name), buffer

    def make_parameter_groups(
        self, *, weight_decay: float = 0.1, overrides: Sequence[tuple[str, dict[str, Any]]] = ()
    ) -> list[dict[str, Any]]:
        """Optimizer groups: matrices decay, vectors do not, overrides by name. See ``parameter_groups``."""
        return make_parameter_groups(self.named_parameters(), weight_decay=weight_decay, overrides=overrides)

    def learn_documents(self) -> None:
        """Find out whether packed documents stay apart in a model that takes positions and no document_ids. Collective: a small forward."""
        if self._signature.takes["document_ids"] is None and self._signature.takes["positions"] is not None:
            with self._evaluating():
                apart = not agree.any_rank(not documents.stay_apart(self._logits))
            self._signature = replace(self._signature, positions_part_documents=apart)

    def _logits(self, batch: step_batch.Batch) -> Tensor:
        output = self._model(**self._signature.inputs(batch, self.device))
        return output if isinstance(output, Tensor) else output.logits

    # --- the step

    def accumulation_context(self, is_last_microbatch: bool) -> AbstractContextManager[None]:
        """No gradient communication inside until the last microbatch, unless ``sync_grad_accum``; restored also on an exception."""
        return accumulation.context(self.module, self.plan, is_last_microbatch)

    def forward_backward(self, batch: step_batch.Batch | Sequence[step_batch.Batch] | Exception) -> StepLoss:
        """Forward and backward of this rank's share of one optimizer step; gradients add up in ``.grad``.

        Args:
            batch: one dict of (rows, seq) tensors, cut into microbatches here, or a list of microbatches. Keys: tokens, labels
                (already shifted, -100: no loss), optional loss_mask, positions, document_ids, and arguments of the model. Where
                this rank could not read its batch: the error, so that all ranks hear of it.

        The loss is a sum over real tokens divided by their number in the whole step on all data ranks, so accumulation over
        unequal microbatches and unequal ranks is exact.

        Raises:
            ConfigError: the batch does not fit some rank, whose error is raised on every rank before any model code runs.
        """
        pieces, tokens = self._open_step(batch)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        with self._summing_over_tensor_ranks():
            for number, piece in enumerate(pieces):
                with self.accumulation_context(number == len(pieces) - 1):
                    loss = self._loss_sum(piece) / max(tokens, 1)
                    loss.backward()
                total += loss.detach()
        self._last_loss = self._sum_over_data_ranks(total)
        return StepLoss(self._last_loss, tokens)

    def optimizer_step(self, optimizer: torch.optim.Optimizer, max_norm: float | None = None) -> StepResult:
        """Clip by the global norm, step the optimizer, clear the gradients.

        A non-finite loss or gradient on any rank skips the update on all: both numbers are global sums, so every rank sees it.

        Args:
            max_norm: largest global 2-norm of the gradients; None or 0: no clipping.
        """
        parts = local_gradients(self._model.parameters())
        norm = float(total_norm(parts))
        skipped = not math.isfinite(norm) or not parts or (self._last_loss is not None and not math.isfinite(float(self._last_loss)))
        if skipped:
            self.skipped_steps += 1
        else:
            if max_norm and norm > max_norm:
                scale_gradients(parts, max_norm / (norm + EPSILON))
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return StepResult(norm, skipped)

    def _open_step(self, batch: step_batch.Batch | Sequence[step_batch.Batch] | Exception) -> tuple[list[step_batch.Batch], int]:
        """Check on every rank, agree, and count the real tokens of the whole step: one small all-reduce per data axis."""
        pieces: list[step_batch.Batch] = []
        refusal: Exception | None = None
        tokens = 0
        try:
            if isinstance(batch, Exception):
                raise batch
            pieces = step_batch.microbatches(batch, self.microbatch_rows)
            for piece in pieces:
                step_batch.check(piece, self._signature, self.facts.max_seq_len, self.facts.vocab_size)
            tokens = step_batch.count(pieces)
        except Exception as error:  # noqa: BLE001  (raised below, once the other ranks know)
            refusal = error
        words = torch.tensor([tokens, len(pieces), len(pieces) ** 2, refusal is not None], dtype=torch.int64)
        words = agree.total(words, self._data_groups)
        tokens, number, squares, refused = words.tolist()
        if refused:
            agree.raise_first(refusal, self._data_groups)
        ranks = self.plan.data_ranks
        if number * number != squares * ranks:
            raise ConfigError(
                f"ranks brought different numbers of microbatches ({number} on {ranks} data ranks, here {len(pieces)}): give all as many"
            )
        return pieces, tokens

    def _loss_sum(self, piece: step_batch.Batch) -> Tensor:
        labels = step_batch.labels_of(piece).to(self.device, non_blocking=True)
        return self._objective(lambda: self.module(**self._signature.inputs(piece, self.device)), labels)

    def _summing_over_tensor_ranks(self) -> AbstractContextManager[None]:
        """Gradients that the plan says to be sums over the tensor axis are summed when it ends, in one message."""
        runtime = runtime_of(self._model)
        return nullcontext() if runtime is None else summing(sums_of(self._model, self.plan), runtime.group)

    def _sum_over_data_ranks(self, value: Tensor) -> Tensor:
        for group in self._data_groups:
            dist.all_reduce(value, group=group)
        return value

    # --- without gradients

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Evaluation mode without gradients; afterwards every module is in the mode it was in, and nothing gathered goes stale."""
        modes = [(module, module.training) for module in self.module.modules()]
        self.module.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            for module, training in modes:
                module.training = training
            fully_sharded.reshard(self._model)

    def evaluate(self, batch: step_batch.Batch | Sequence[step_batch.Batch]) -> StepLoss:
        """The loss of a batch (as in ``forward_backward``) without gradients, in evaluation mode."""
        pieces, tokens = self._open_step(batch)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        with self._evaluating():
            for piece in pieces:
                total += self._loss_sum(piece)
        return StepLoss(self._sum_over_data_ranks(total) / max(tokens, 1), tokens)

    def generate(
        self, prompt: Sequence[int], tokens: int, *, temperature: float = 1.0, seed: int = 0, stop: int | None = None
    ) -> list[int]:
        """Continue a prompt. Every rank must call it with the same arguments, and gets the same ids. See ``generation``."""
        options: dict[str, Any] = {"temperature": temperature, "seed": seed, "stop": stop}
        with self._evaluating():
            return generation.generate(self._next_logits, prompt, tokens, self.facts.max_seq_len, **options)

    def _next_logits(self, window: Tensor) -> Tensor:
        return self._logits({"tokens": window})[0, -1]

    def __str__(self) -> str:
        """What IS on this rank, read off the model: placements, dtypes, bytes, what was applied where. ``plan`` says what was wished."""
        return describe.describe(self._model, self.plan)

    def audit(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Check that the model is what the plan says: written, placed, tied, frozen, and equal on replicas; and that an optimizer, where
        one is given, holds exactly its trained parameters. Collective.

        Raises:
            IntegrityError: it is not; the text names the parameters.
        """
        audit.audit(self._model, self.facts, self.plan, self._data_groups, optimizer)
