"""Compute without gradients, on any layout: logits, log-probabilities of rows, texts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from meshwright.distributed.data import fully_sharded

from . import batch as step_batch
from .generation.sampling import Heard, Sampling, generate
from .generation.windows import Cacheless, next_logits
from .module import PartsAsModule
from .opening import StepOpening
from .part import ModelPart, Runner


class Inference(PartsAsModule):
    """The forwards of a laid-out model that no step follows."""

    microbatch_rows: int
    _opening: StepOpening
    _runner: Runner
    _inputs: Callable[[step_batch.Batch], dict[str, Any]]

    def __init__(self, parts: Sequence[ModelPart]):
        super().__init__(parts)
        self._cacheless = Cacheless()

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Evaluate the average without gradients; then restore each module's mode, and free gathered parameters."""
        modes = [(module, module.training) for part in self._parts for module in part.module.modules()]
        for part in self._parts:
            part.module.eval()
        try:
            with torch.no_grad(), self.averaged():
                yield
        finally:
            for module, training in modes:
                module.training = training
            for model in self.parts:
                fully_sharded.reshard(model)

    def row_log_probs(self, batch: step_batch.Batch) -> Tensor:
        """Return the sum of the labels' log-probabilities in each row, (rows,), without gradients (collective).

        Data ranks bring equally many rows. ``PreferenceLoss`` compares with those of the first weights.
        """
        named = self._opening.named(batch)
        pieces = self._opening.cut_alike(step_batch.microbatches(named, self.microbatch_rows))  # type: ignore[arg-type]
        with self._evaluating():
            return torch.cat([self._runner.row_log_probs(piece) for piece in pieces])

    def generate(
        self,
        prompt: Sequence[int],
        tokens: int,
        *,
        stop: int | Collection[int] | None = None,
        heard: Heard | None = None,
        **sampling: Any,
    ) -> list[int]:
        """Continue a prompt, on every rank with the same arguments, and return the same ids (see ``generation``).

        ``sampling``: the fields of ``Sampling``: temperature, seed, top_k, top_p."""
        how = Sampling(**sampling)
        of_model = self.parts[0], self.plan, self._opening.signature, self._inputs, self._runner.logits
        with self._evaluating(), next_logits(*of_model, self.facts.max_seq_len, self._cacheless) as following:
            return generate(following, prompt, tokens, how, stop=stop, heard=heard)

    @property
    def recomputes_text(self) -> str:
        """Why ``generate`` computes the whole window for each id; "" where it keeps keys and values."""
        return self._cacheless.reason or ""

    def logits(self, batch: step_batch.Batch) -> Tensor:
        """Return the logits of whole rows, (rows, seq, vocabulary), on all ranks that have these rows (collective)."""
        with self._evaluating():
            return self._runner.logits(self._opening.named(batch))  # type: ignore[arg-type]
