"""Check a loss on made-up rows, and on the first batch: rows together must give what they give in two parts."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.core.devices import is_accelerator
from meshwright.core.dtypes import dtype_bytes
from meshwright.core.errors import ConfigError, UnsupportedError
from meshwright.core.losses import IGNORED, Loss, PreferenceLoss
from meshwright.distributed.context.rows import CutBatch
from meshwright.distributed.loss.declared import DeclaredLosses
from meshwright.distributed.step import batch as step_batch
from meshwright.distributed.step.part import Batch, Runner
from meshwright.introspection.constructor import seeded
from meshwright.introspection.images import rows_of
from meshwright.introspection.premises.playing import FixedDraws
from meshwright.planning.plan import Plan

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


def problem_of(runner: Runner, losses: DeclaredLosses | None, plan: Plan, pieces: Sequence[Batch]) -> Exception | None:
    """Check losses (None: a sum over labels) on a first microbatch, without gradients, in evaluation mode.

    Each rank runs three forwards, whatever its rows: others may wait for its messages. Returns why a declaration does
    not hold; None also on a rank that does not compute the loss.
    """
    piece = pieces[0]
    if len(_tokens(piece)) < 2:
        twice = {key: torch.cat((value, value)) for key, value in piece.items()}
        piece = piece.of(twice, [0, 0]) if isinstance(piece, CutBatch) else twice
    whole, number, labels = piece, len(_tokens(piece)), piece.get("labels")
    counted = losses is None or any(losses.counts_labels(name, piece) for name in losses.losses)
    if counted and labels is not None and labels.dim() > 1 and not labels.is_floating_point():
        # each row keeps a few labels with a loss, and the two parts other numbers of them
        thin = torch.full_like(labels, IGNORED).flatten(1)
        for row, flat in enumerate(labels.flatten(1)):
            real = (flat != IGNORED).nonzero().flatten()
            kept = real[:FIRST] if row == 0 else real[-LAST:]
            thin[row, kept] = flat[kept]
        whole = step_batch.with_value(piece, "labels", thin.view_as(labels))
    parts: list[Batch] = [rows_of(whole, 0, 1), rows_of(whole, 1, number)]
    if isinstance(whole, CutBatch):
        parts = [whole.of(part, chosen) for part, chosen in zip(parts, ([0], [*range(1, number)]), strict=True)]
    readings: list[dict[str, Reading]] = []
    problem: Exception | None = None
    for batch in (whole, *parts):
        try:
            if losses is not None:
                losses.latest = {}
            # a loss may take gradients of what the model is given
            grads = torch.set_grad_enabled(any(value.requires_grad for value in batch.values()))
            draws = nullcontext() if plan.compiled else FixedDraws()  # a mode would have to look into compiled code
            with grads, seeded(0), draws:
                # a copy: a forward or a loss may write into what it is given
                copied: Batch = {key: value.clone() for key, value in batch.items()}
                copied = batch.of(copied, [*range(len(_tokens(batch)))]) if isinstance(batch, CutBatch) else copied
                total = float(runner.evaluate([copied]).detach())
            labels, rows = batch.get("labels"), float(len(_tokens(batch)))
            real = math.nan if labels is None else float((labels != IGNORED).sum())
            if losses is None:
                readings.append({PLAIN: Reading(total, step_batch.count([batch]), rows, real)})
                continue
            values = {name: (float(value), losses.count(name, batch)) for name, value in losses.latest.items()}
            readings.append({name: Reading(*value, rows, real) for name, value in values.items()})
        except Exception as error:  # noqa: BLE001  (raised on all ranks, behind the forwards that they wait for)
            problem = problem or error
    if losses is not None:
        losses.totals = {}
        try:
            losses.refuse_without_graph(pieces)
        except ConfigError as error:
            problem = problem or error
    if problem is not None:
        return problem
    together, *apart = readings
    narrow = dtype_bytes(plan.precision.compute) < 4 or plan.float8 is not None
    close = CLOSE_16 if narrow else CLOSE_ON_DEVICE if is_accelerator(plan.device) else CLOSE
    means = set() if losses is None else {name for name, loss in losses.losses.items() if loss.reduction == "mean"}
    found = (
        _verdict(name, together[name], [part[name] for part in apart], close, is_mean=name in means)
        for name in together
    )
    return next((ConfigError(text) for text in found if text), None)


def _verdict(name: str, whole: Reading, parts: list[Reading], close: float, *, is_mean: bool) -> str:
    """Return what is wrong with a loss; "" if nothing is, or no number is finite to judge by."""
    where = PLAIN if name in (PLAIN, "loss") else f"loss_fn['{name}']"

    def adds_up(over: Callable[[Reading], float]) -> bool:
        def summed(one: Reading) -> float:
            return one.value * over(one) if over(one) else 0.0

        apart, together = [summed(part) for part in parts], summed(whole)
        size = max(sum(map(abs, apart)), abs(together))
        return abs(sum(apart) - together) <= close * size  # never, if a count is not known

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


def _tokens(batch: Batch) -> torch.Tensor:
    """Return the batch's tokens, or another tensor with its rows."""
    return batch["tokens"] if "tokens" in batch else next(iter(batch.values()))


# --- check before the first step that a user's loss is a sum that layouts can share

ROWS, SEQ, SOME_IDS = 2, 3, 11
ROUNDING = 1e-3
"""Relative tolerance; a loss in bfloat16 is no more exact."""


def check(
    loss_fn: Callable[[Tensor, Tensor], Tensor] | PreferenceLoss | Loss | Mapping[str, Loss] | None,
    vocab_size: int | None,
    device: torch.device,
    plan: Plan,
) -> bool:
    """Check a loss before the first batch, and return whether it was seen to add up; else the first batch shows it.

    A function of logits and labels is called with a few made-up ones, and with the same rows twice.
    """
    if loss_fn is None or isinstance(loss_fn, PreferenceLoss):
        return True
    if plan.loss is not None:
        raise ConfigError(
            f"techniques.loss_chunks = {plan.loss.chunks} computes the cross entropy inside the head, and loss_fn= is a"
            f" loss of your own over whole outputs: leave one of them out"
        )
    if isinstance(loss_fn, (Loss, Mapping)):
        for loss in [loss_fn] if isinstance(loss_fn, Loss) else loss_fn.values():
            if isinstance(loss, Loss):
                _refuse_trained(loss.fn)
                if plan.context is not None:
                    raise UnsupportedError(
                        "loss_fn=meshwright.Loss(...) reads whole outputs and batches, and layout.cp cuts rows over"
                        " ranks. Set layout.cp = 1, or give loss_fn as a function (logits, labels) -> sum over tokens."
                    )
                if plan.pipeline is not None and loss.fn is None:
                    raise UnsupportedError(
                        "loss_fn=meshwright.Loss() trains the loss that the forward itself computes, and a pipeline"
                        " calls the forward in parts, of which the first know no logits. Set layout.pp = 1, or give"
                        " Loss a function (output, batch)."
                    )
        return False
    _refuse_trained(loss_fn)
    generator, ids, cuts_rows = torch.Generator().manual_seed(0), vocab_size or SOME_IDS, plan.context is not None
    logits = torch.randn(ROWS, SEQ, ids, generator=generator).to(device)
    labels = torch.randint(0, ids, (ROWS, SEQ), generator=generator).to(device)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            once = float(loss_fn(logits, labels))
            twice = float(loss_fn(torch.cat((logits, logits)), torch.cat((labels, labels))))
            parts = [float(loss_fn(logits[:, part::2], labels[:, part::2])) for part in range(2 * cuts_rows)]
    except Exception:  # noqa: BLE001  (made for other shapes, or other labels: nothing is known then)
        return False
    if not (math.isfinite(once) and math.isfinite(twice)) or _near(twice, 2 * once):
        if cuts_rows and math.isfinite(once) and not _near(sum(parts), once):
            raise ConfigError(
                f"loss_fn gives {once:.5g} for rows of {SEQ} tokens, and {sum(parts):.5g} for their tokens in two"
                f" parts: it does not add up over tokens, and layout.cp cuts rows over ranks. Leave what looks at"
                f" several tokens out of it, or set layout.cp = 1."
            )
        return math.isfinite(once) and math.isfinite(twice)
    found = f"loss_fn gives {once:.5g} for {ROWS} rows and {twice:.5g} for the same rows twice"
    if _near(twice, once):
        raise ConfigError(
            f"{found}: it is a mean, and parallelize wants the SUM over tokens with a label, which it divides by their"
            " number in the whole step on all ranks. Write it with reduction='sum', such as"
            " F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=-100, reduction='sum'); or declare"
            " it: loss_fn=meshwright.Loss(fn, reduction='mean'), with fn(output, batch)."
        )
    raise ConfigError(
        f"{found}: it does not add up over rows (twice would be {2 * once:.5g}), so ranks and microbatches with other"
        " rows cannot share it out. Leave what is not a sum over tokens out of it."
    )


def _refuse_trained(loss_fn: Any) -> None:
    for module in _modules_in(loss_fn):
        if trained := [name for name, parameter in module.named_parameters() if parameter.requires_grad]:
            raise ConfigError(
                f"loss_fn is a {type(module).__name__} with parameters that are trained ({', '.join(trained[:3])}): no"
                " layout would add up their gradients, and no optimizer group or checkpoint knows them. Make them part"
                " of the model, or freeze them."
            )


def _near(found: float, wanted: float) -> bool:
    return abs(found - wanted) <= ROUNDING * max(abs(wanted), 1e-6)


def _modules_in(loss_fn: Any) -> Iterator[nn.Module]:
    if isinstance(loss_fn, functools.partial):
        for inner in (loss_fn.func, *loss_fn.args, *loss_fn.keywords.values()):
            yield from _modules_in(inner)
    elif isinstance(loss_fn, nn.Module):
        yield loss_fn
    elif isinstance(owner := getattr(loss_fn, "__self__", None), nn.Module):
        yield owner
