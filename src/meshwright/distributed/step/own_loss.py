"""Check before the first step that a user's loss is a sum that layouts can share, and refuse losses in the output."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.core.errors import ConfigError, UnsupportedError
from meshwright.core.losses import Loss, PreferenceLoss
from meshwright.introspection.facts import ModelFacts
from meshwright.planning.plan import Plan

ROWS, SEQ, SOME_IDS = 2, 3, 11
CLOSE = 1e-3
"""Relative tolerance; a loss in bfloat16 is no more exact."""


def refuse_dropped(facts: ModelFacts) -> None:
    """Raise UnsupportedError for a model with its own loss in the output, which a step on the logits would drop."""
    if losses := facts.measurements.premises().losses:
        raise UnsupportedError(
            f"the output of {facts.kind} has a loss of its own beside the logits ({', '.join(losses)}), and a step"
            f" would train a loss of the logits alone. Return the logits only; or declare the loss of the model:"
            f" loss_fn=meshwright.Loss(reduction='mean'); or give a function as loss_fn=, which says that logits and"
            f" labels are all of it."
        )


def check(
    loss_fn: Callable[[Tensor, Tensor], Tensor] | PreferenceLoss | Loss | Mapping[str, Loss] | None,
    vocab_size: int | None,
    device: torch.device,
    plan: Plan,
) -> bool:
    """Check a loss before the first batch, and return whether it was seen to add up; else the first batch shows it.

    A function of logits and labels is called with a few made-up ones, and with the same rows twice.

    Raises:
        ConfigError: the loss is to be computed in chunks, is a mean, does not add up over rows, or over the tokens of
            cut rows, or has parameters that are trained.
        UnsupportedError: the layout cuts what a declared loss needs whole.
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
                _refuse_cut(loss, plan)
        return False
    _refuse_trained(loss_fn)
    return _adds_up(loss_fn, vocab_size, device, cuts_rows=plan.context is not None)


def _refuse_cut(loss: Loss, plan: Plan) -> None:
    if plan.context is not None:
        raise UnsupportedError(
            "loss_fn=meshwright.Loss(...) reads whole outputs and batches, and layout.cp cuts rows over ranks. Set"
            " layout.cp = 1, or give loss_fn as a function (logits, labels) -> sum over tokens."
        )
    if plan.pipeline is not None and loss.fn is None:
        raise UnsupportedError(
            "loss_fn=meshwright.Loss() trains the loss that the forward itself computes, and a pipeline calls the"
            " forward in parts, of which the first know no logits. Set layout.pp = 1, or give Loss a function (output,"
            " batch)."
        )


def _refuse_trained(loss_fn: Any) -> None:
    for module in _modules_in(loss_fn):
        if trained := [name for name, parameter in module.named_parameters() if parameter.requires_grad]:
            raise ConfigError(
                f"loss_fn is a {type(module).__name__} with parameters that are trained ({', '.join(trained[:3])}): no"
                " layout would add up their gradients, and no optimizer group or checkpoint knows them. Make them part"
                " of the model, or freeze them."
            )


def _adds_up(
    loss_fn: Callable[[Tensor, Tensor], Tensor], vocab_size: int | None, device: torch.device, *, cuts_rows: bool
) -> bool:
    """Return whether the loss of made-up rows adds up; False if it cannot be called with them.

    Args:
        cuts_rows: ranks compute the loss of some tokens of each row.
    """
    generator = torch.Generator().manual_seed(0)
    ids = vocab_size or SOME_IDS
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


def _near(found: float, wanted: float) -> bool:
    return abs(found - wanted) <= CLOSE * max(abs(wanted), 1e-6)


def _modules_in(loss_fn: Any) -> Iterator[nn.Module]:
    if isinstance(loss_fn, functools.partial):
        for inner in (loss_fn.func, *loss_fn.args, *loss_fn.keywords.values()):
            yield from _modules_in(inner)
    elif isinstance(loss_fn, nn.Module):
        yield loss_fn
    elif isinstance(owner := getattr(loss_fn, "__self__", None), nn.Module):
        yield owner
