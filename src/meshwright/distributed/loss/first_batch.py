"""Check a declaration on the first batch: rows together must give what the same rows in two parts give."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from meshwright.core.devices import is_accelerator
from meshwright.core.dtypes import dtype_bytes
from meshwright.core.errors import ConfigError
from meshwright.core.losses import IGNORED
from meshwright.distributed.step import batch as step_batch
from meshwright.distributed.step.part import Batch, Runner
from meshwright.introspection.constructor import seeded
from meshwright.introspection.images import rows_of
from meshwright.introspection.premises.playing import FixedDraws
from meshwright.planning.plan import Plan

from .declared import DeclaredLosses

PLAIN = "loss_fn"
CLOSE, CLOSE_ON_DEVICE, CLOSE_16 = 1e-5, 1e-3, 1e-2
"""Relative tolerances: of at least float32 on a CPU, on accelerators, whose convolutions may round it, and of 16 bits.

Values of losses differ little between rows before training, so a wrong count shows in few digits.
"""
FIRST, LAST = 2, 3
"""Labels with a loss that a row of the first and of the second part keeps, so that counts differ."""


CHANGES = {
    "a sum": "Declare a sum: meshwright.Loss(fn, reduction='sum'); or return the mean",
    "a mean over its count": "Declare a mean: loss_fn=meshwright.Loss(fn, reduction='mean'), with fn(output, batch); or"
    " write the loss with reduction='sum'",
    "a mean over rows": "Declare the count: meshwright.Loss(fn, reduction='mean', count='rows')",
    "a mean over the labels that are not -100": "Declare the count: meshwright.Loss(fn, reduction='mean',"
    " count='labels')",
    "": "Rows of the batch depend on each other in the model or in the loss, or the mean is over something else:"
    " compute each row's loss from that row alone, and state its count (Loss(fn, reduction='mean', count=...))",
}
"""The change to make, by the law that a loss follows instead of the declared one."""


@dataclass(frozen=True)
class Reading:
    """The value of one loss for some rows, as its function returned it, and numbers that it may be a mean over."""

    value: float
    count: float
    rows: float
    labels: float


class FirstBatch:
    """A check of a model's losses on its first microbatch, without gradients and in evaluation mode.

    Args:
        losses: the declared ones; None: a loss that must be a sum over labels.
    """

    def __init__(self, runner: Runner, losses: DeclaredLosses | None, plan: Plan):
        self._runner, self._losses = runner, losses
        narrow = dtype_bytes(plan.precision.compute) < 4 or plan.float8 is not None
        self.tolerance = CLOSE_16 if narrow else CLOSE_ON_DEVICE if is_accelerator(plan.device) else CLOSE
        self._draws_stay = not plan.compiled  # a mode would have to look into compiled code

    def problem(self, pieces: Sequence[Batch]) -> Exception | None:
        """Return why a declaration does not hold; None also on a rank that does not compute the loss.

        Each rank runs three forwards, whatever its rows: others may wait for its messages.
        """
        piece = pieces[0]
        if _rows(piece) < 2:
            piece = {key: torch.cat((value, value)) for key, value in piece.items()}
        whole = self._thinned(piece)
        parts = [rows_of(whole, 0, 1), rows_of(whole, 1, _rows(whole))]
        readings: list[dict[str, Reading]] = []
        problem: Exception | None = None
        for batch in (whole, *parts):
            try:
                readings.append(self._read(batch))
            except Exception as error:  # noqa: BLE001  (raised on all ranks, behind the forwards that they wait for)
                problem = problem or error
        if self._losses is not None:
            self._losses.totals = {}
            try:
                self._losses.refuse_without_graph(pieces)
            except ConfigError as error:
                problem = problem or error
        if problem is not None:
            return problem
        together, *apart = readings
        found = (self._verdict(name, together[name], [part[name] for part in apart]) for name in together)
        return next((ConfigError(text) for text in found if text), None)

    def _read(self, batch: Batch) -> dict[str, Reading]:
        still: AbstractContextManager[object] = FixedDraws() if self._draws_stay else nullcontext()
        losses = self._losses
        if losses is not None:
            losses.latest = {}
        with seeded(0), still:
            total = self._runner.evaluate([batch])
        labels, rows = batch.get("labels"), float(_rows(batch))
        real = math.nan if labels is None else float((labels != IGNORED).sum())
        if losses is None:
            return {PLAIN: Reading(float(total), step_batch.count([batch]), rows, real)}
        return {
            name: Reading(float(value), losses.count(name, batch), rows, real) for name, value in losses.latest.items()
        }

    def _thinned(self, piece: Batch) -> Batch:
        """Leave a few labels with a loss in each row, other numbers of them in the two parts."""
        labels = piece.get("labels")
        counted = self._losses is None or any(self._losses.counts_labels(name, piece) for name in self._losses.losses)
        if labels is None or labels.dim() < 2 or labels.is_floating_point() or not counted:
            return piece
        thin, flat = labels.clone(), labels.flatten(1)
        for row in range(len(labels)):
            real = (flat[row] != IGNORED).nonzero().flatten()
            kept = real[:FIRST] if row == 0 else real[-LAST:]
            only = torch.full_like(flat[row], IGNORED)
            only[kept] = flat[row][kept]
            thin[row] = only.view_as(labels[row])
        return {**piece, "labels": thin}

    def _verdict(self, name: str, whole: Reading, parts: list[Reading]) -> str:
        """Return what is wrong with a loss; "" if nothing is, or no number is finite to judge by."""
        loss = None if self._losses is None else self._losses.losses[name]
        is_mean = loss is not None and loss.reduction == "mean"
        where = PLAIN if name in (PLAIN, "loss") else f"loss_fn['{name}']"

        def adds_up(over: Callable[[Reading], float]) -> bool:
            def summed(one: Reading) -> float:
                return one.value * over(one) if over(one) else 0.0

            apart, together = [summed(part) for part in parts], summed(whole)
            size = max(sum(map(abs, apart)), abs(together))
            return abs(sum(apart) - together) <= self.tolerance * size  # never, if a count is not known

        laws: Mapping[str, Callable[[Reading], float]] = {
            "a sum": lambda one: 1.0,
            "a mean over its count": lambda one: one.count,
            "a mean over rows": lambda one: one.rows,
            "a mean over the labels that are not -100": lambda one: one.labels,
        }
        said = "a mean over its count" if is_mean else "a sum"
        if not all(math.isfinite(one.value) for one in (whole, *parts)) or adds_up(laws[said]):
            return ""
        seen = [f"{one.value:.5g} for {one.rows:.0f} rows (count {one.count:g})" for one in (*parts, whole)]
        values = f"{where} gives {seen[0]}, {seen[1]}, and together {seen[2]}"
        is_so = next((law for law, over in laws.items() if law != said and adds_up(over)), "")
        is_what = f"it is {is_so}, not {said}" if is_so else f"it is not {said}"
        return f"{values}: {is_what}. {CHANGES[is_so]}."


def _rows(batch: Batch) -> int:
    return len(batch["tokens"] if "tokens" in batch else next(iter(batch.values())))
