"""Open an optimizer step: check each rank's batch, agree, and count what the losses of all ranks are divided by.

transformers masks by positions that restart at each document, but not in every model, and not in every version.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.core.axes import Axis
from meshwright.core.errors import ConfigError
from meshwright.core.names import clean
from meshwright.core.torch_private import parameters_in
from meshwright.distributed import experts
from meshwright.distributed.context import runtime
from meshwright.distributed.context.rows import PLACES, CutBatch
from meshwright.distributed.context.runtime import ContextRuntime
from meshwright.distributed.data import fully_sharded
from meshwright.distributed.loss import preference
from meshwright.distributed.loss.declared import DeclaredLosses
from meshwright.distributed.process import agree
from meshwright.distributed.process.absent_peers import peers_are_absent
from meshwright.distributed.torch_private import gathered
from meshwright.introspection.facts import ModelFacts
from meshwright.introspection.signature import REFERENCE, Signature
from meshwright.planning.plan import Plan

from . import batch as step_batch
from .part import ModelPart, OpenedStep

HALF = 4
"""Tokens of each of a row's two documents."""
LEAKS = 1e-3
"""The share of an earlier document's influence above which a later one sees it; rounding is far below."""


def stay_apart(logits: Callable[[Mapping[str, Tensor]], Tensor]) -> bool:
    """Return whether a row's second document is computed independently of the first.

    Where peers are absent, no logits are the model's, and the answer is taken to be yes.
    """
    if peers_are_absent():
        return True
    tokens = torch.tensor([[3, 1, 2, 1, 2, 3, 1, 3], [1, 2, 1, 3, 2, 3, 1, 3]])  # the second halves are alike
    running = torch.arange(2 * HALF).expand(2, -1)
    influence = []  # the distance between the second halves, whose first halves differ
    for positions in (running, running % HALF):
        one, other = logits({"tokens": tokens, "positions": positions})[:, HALF:].double().unbind()
        influence.append(float((one - other).norm()))
    seen, kept = influence
    return kept <= LEAKS * seen and seen > 0


def parameters_of(parts: Sequence[ModelPart]) -> dict[int, nn.Parameter]:
    """Return a rank's parameters by their identities, which no other one takes over while they are held."""
    return {id(parameter): parameter for part in parts for parameter in parameters_in(part.module)}


def refuse_others(parts: Sequence[ModelPart], laid: Mapping[int, nn.Parameter]) -> None:
    """Raise ConfigError if a rank's parameters are not those that were laid out: the mesh would train them apart."""
    if parameters_of(parts).keys() == laid.keys():
        return
    now = {clean(name): parameter for part in parts for name, parameter in part.model.named_parameters()}
    groups = [group for part in parts for group in fully_sharded.parameter_groups(part.model)]
    # an evaluation may have left gathered ones in their places
    known = {*laid, *(id(gathered(one)) for group in groups for one in group.fsdp_params)}
    others = [name for name, parameter in now.items() if id(parameter) not in known]
    if others := others + [fact.name for part in parts for fact in part.facts.parameters if fact.name not in now]:
        raise ConfigError(
            f"{others[0]} was added, replaced, tied or taken away behind parallelize: the layout has not placed what is"
            f" there now, and each rank would train its own. Make the change in the model that parallelize is given."
        )


@dataclass
class StepCounts:
    """The message that opens a step: one rank's counts, or the sums of all.

    Attributes:
        tokens: tokens that have a loss.
        weight: sum of the weights of these tokens' losses.
        routed: tokens that are no padding.
        refused: ranks that refuse the step.
        mark: fingerprint of the first step's rows.
        microbatches_squared, mark_squared: show, beside the plain sums, whether all ranks have the same number.
        bring_parts: ranks whose batch has a part of each row; None, and not sent, where none can have.
        lack_reference: ranks whose pairs bring no reference; None, and not sent, where all have to.
        losses: count of each declared loss.
    """

    tokens: float
    weight: float
    routed: float
    microbatches: float
    microbatches_squared: float = 0
    refused: float = 0
    mark: float = 0
    mark_squared: float = 0
    bring_parts: float | None = None
    lack_reference: float | None = None
    losses: list[float] = field(default_factory=list)

    def total(self, groups: list[dist.ProcessGroup]) -> StepCounts:
        """Sum all counts over ranks, in one message; sums stay below 2^53 (collective)."""
        single: dict[str, Any] = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "losses"}
        single = {name: value for name, value in single.items() if value is not None}
        words = agree.total(torch.tensor([*single.values(), *self.losses], dtype=torch.float64), groups).tolist()
        return StepCounts(**dict(zip(single, words, strict=False)), losses=words[len(single) :])


@dataclass
class StepOpening:
    """The facts and groups by which a model's steps are opened.

    Attributes:
        signature: the arguments of the model's forward.
        own_loss: the loss is a function of the user's, of logits and labels.
        of_pairs: the loss compares pairs of rows.
        may_lack_reference: adapters can be switched off where a batch of pairs brings no reference.
        declared: the losses that the user declared, if any.
        context: runtimes of this rank's parts where rows are cut.
        data_groups: process groups whose ranks have other rows or other tokens of them.
        row_groups: process groups whose ranks must bring the same rows.
        counts_routed: some loss is a mean over the tokens that are no padding.
    """

    plan: Plan
    facts: ModelFacts
    signature: Signature
    own_loss: bool
    of_pairs: bool
    may_lack_reference: bool
    declared: DeclaredLosses | None
    context: Sequence[ContextRuntime]
    data_groups: list[dist.ProcessGroup]
    row_groups: list[dist.ProcessGroup]
    counts_routed: bool
    is_first: bool = field(default=True, init=False)
    """Whether no step was taken yet: the first one's batches are compared, those of an evaluation may be alike."""
    needs_tokens: str = field(init=False)
    """The part of the layout that knows batches by their tokens, or ""."""

    def __post_init__(self) -> None:
        sizes = {"layout.cp": bool(self.context), "layout.pp": self.plan.pipeline is not None}
        self.needs_tokens = next((name for name, is_so in sizes.items() if is_so), "")
        if self.counts_routed and not self.needs_tokens:
            self.needs_tokens = "the routers' loss"

    def named(self, batch: step_batch.Brought) -> step_batch.Brought:
        """Return a batch, or microbatches, under the keys of this library, with its images counted by rows."""
        return step_batch.named(batch, self.signature, self.facts.images)

    def open(self, bring: Callable[[], list[step_batch.Batch]], *, trains: bool = True) -> OpenedStep:
        """Check batches, agree, and count tokens that have a loss, their weight, and tokens that are no padding.

        One small all-reduce per data axis gives all ranks the counts of the whole step. ``bring`` returns this rank's
        microbatches, or raises why there are none.
        """
        pieces: list[step_batch.Batch] = []
        refusal: Exception | None = None
        own, rows_word = self._count([], 0), None
        try:
            pieces = bring()
            is_part = runtime.are_parts(pieces, cuts_rows=bool(self.context))
            for piece in pieces:
                self._check(runtime.without_places(piece))
            rows_word = None if is_part or not self.row_groups else step_batch.fingerprint(pieces)
            pairs = self._pairs(pieces, is_part=is_part)
            for context in () if is_part else self.context[:1]:  # a rank's stages have the same tokens
                pieces = [cut(context, piece, self.signature) for piece in pieces]
            own = self._count(pieces, pairs)
            if self.context:
                own.bring_parts = int(is_part)
            if self.may_lack_reference:
                own.lack_reference = int(preference.lack_reference(pieces))
            own.mark = step_batch.fingerprint(pieces) % 2**20 if self.is_first and trains and not is_part else 0
        except Exception as error:  # noqa: BLE001  (raised below, once the other ranks know)
            refusal = error
        self.is_first = self.is_first and not trains
        return self._agreed(pieces, own, rows_word, refusal)

    def _agreed(
        self, pieces: list[step_batch.Batch], own: StepCounts, rows_word: int | None, refusal: Exception | None
    ) -> OpenedStep:
        """Return the step with the counts of all ranks, or raise on all what one of them refuses (collective)."""
        same_rows = agree.is_equal(rows_word if refusal is None else None, self.row_groups)
        if refusal is None and not same_rows:
            refusal = runtime.other_rows(self.plan.size(Axis.CP))
        own.refused = int(refusal is not None)
        own.microbatches_squared, own.mark_squared = own.microbatches**2, own.mark**2
        total, ranks = own.total(self.data_groups), self.plan.shares.batch_ranks
        if total.refused:
            agree.raise_first(refusal, self.data_groups)
        are_alike = int(total.mark) ** 2 == int(total.mark_squared) * ranks
        if own.mark and ranks > 1 and are_alike and not peers_are_absent() and dist.get_rank() == 0:
            warnings.warn(
                f"all {ranks} data ranks brought the same rows in the first step, so each computes the same gradients:"
                f" the losses are right, and the work is done {ranks} times. Give each rank its share of a batch:"
                f" {{key: rows[model.data_rank :: model.data_ranks] for key, rows in batch.items()}}, or a"
                f" DistributedSampler(data, model.data_ranks, model.data_rank)",
                stacklevel=2,
            )
        preference.refuse_some(int(total.lack_reference or 0), ranks)
        runtime.refuse_some(int(total.bring_parts or 0), ranks)
        if total.microbatches**2 != total.microbatches_squared * ranks:
            raise ConfigError(
                f"ranks brought different numbers of microbatches ({total.microbatches:.0f} on {ranks} data ranks, here"
                f" {len(pieces)}): give as many"
            )
        if own.bring_parts:
            try:
                known = self.context[0], self.signature, self.facts.max_seq_len
                pieces = [runtime.join(piece, *known) for piece in pieces]
            except Exception as error:  # noqa: BLE001  (raised below, once the other ranks know)
                refusal = error
            if agree.total(torch.tensor([refusal is not None], dtype=torch.int64), self.data_groups).item():
                agree.raise_first(refusal, self.data_groups)
        if self.declared is not None:
            self.declared.begin(total.losses)
            total.weight = 1.0  # each loss is divided by its own count
        return OpenedStep(pieces, int(total.tokens), total.weight, int(total.routed))

    def cut_alike(self, pieces: list[step_batch.Batch]) -> list[step_batch.Batch]:
        """Return this rank's tokens of microbatches of whole rows, which all ranks that share rows bring (collective).

        Raises:
            ConfigError: they bring other rows, or parts of rows.
        """
        if runtime.are_parts(pieces, cuts_rows=bool(self.context)):
            raise ConfigError(f"whole rows are needed, and batch['{PLACES}'] says that a rank has a part of each")
        if not agree.is_equal(step_batch.fingerprint(pieces) if self.row_groups else None, self.row_groups):
            raise runtime.other_rows(self.plan.size(Axis.CP))
        for context in self.context[:1]:
            pieces = [cut(context, piece, self.signature) for piece in pieces]
        return pieces

    def _check(self, piece: step_batch.Batch) -> None:
        known = (self.signature, self.facts.max_seq_len, self.facts.vocab_size)
        if self.needs_tokens and "tokens" not in piece:
            raise ConfigError(
                f"the batch has no 'tokens' (rows, seq), by which {self.needs_tokens} cuts rows or counts, but only"
                f" {sorted(piece)}: bring tokens, or leave that to the data axes (layout.dp_replicate, layout.dp_shard)"
            )
        if self.declared is not None:
            step_batch.check_declared(piece, *known)
            keys = {key for key in piece if self.signature.argument_of(key) is None}
            if keys and all(loss.fn is None for loss in self.declared.losses.values()):
                raise ConfigError(
                    f"batch['{min(keys)}'] is not an argument of the model's forward{self.signature.arguments}, whose"
                    f" own loss is trained"
                )
            return
        if self.of_pairs:
            piece = preference.without_reference(piece, may_lack=self.may_lack_reference)
        step_batch.check(piece, *known, label_ids=self.facts.label_ids, own_loss=self.own_loss)
        if self.context and piece["labels"].shape != piece["tokens"].shape:
            raise ConfigError(
                f"batch['labels'] has shape {tuple(piece['labels'].shape)}, but tokens have"
                f" {tuple(piece['tokens'].shape)}, and layout.cp cuts rows over ranks: set layout.cp = 1"
            )

    def _pairs(self, pieces: list[step_batch.Batch], *, is_part: bool) -> int:
        """Count pairs with a label; of ranks that share rows, the first counts them."""
        if not self.of_pairs:
            return 0
        if is_part:
            raise ConfigError(
                f"batch['{PLACES}'] says that a rank has a part of each row, and PreferenceLoss counts pairs of whole"
                f" rows: bring these, the same on all ranks of the cp axis, without '{PLACES}'"
            )
        return 0 if any(context.group.rank for context in self.context) else preference.count(pieces)

    def _count(self, pieces: list[step_batch.Batch], pairs: int) -> StepCounts:
        routed = experts.count_routed(pieces) if self.counts_routed else 0
        some: dict[str, Any] = {
            "bring_parts": 0 if self.context else None,
            "lack_reference": 0 if self.may_lack_reference else None,
        }
        if self.declared is None:
            weight = pairs if self.of_pairs else step_batch.weight(pieces)
            return StepCounts(step_batch.count(pieces), weight, routed, len(pieces), **some)
        losses = [float(sum(self.declared.count(name, piece) for piece in pieces)) for name in self.declared.losses]
        self.declared.refuse_without_graph(pieces)
        return StepCounts(int(losses[0]), 0.0, routed, len(pieces), losses=losses, **some)


def cut(context: ContextRuntime, piece: step_batch.Batch, signature: Signature) -> CutBatch:
    """Return this rank's tokens of a microbatch of whole rows; a number for each row stays."""
    made = context.cut({key: value for key, value in piece.items() if key != REFERENCE}, signature)
    made.update({key: value for key, value in piece.items() if key == REFERENCE})
    return made
