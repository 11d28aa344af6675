"""Check before the first step that a user's loss is a sum that layouts can share, and refuse losses in the output."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.core.errors import ConfigError, UnsupportedError
from meshwright.introspection.facts import ModelFacts

ROWS, SEQ, SOME_IDS = 2, 3, 11
CLOSE = 1e-3
"""Relative tolerance; a loss in bfloat16 is no more exact."""


def refuse_dropped(facts: ModelFacts) -> None:
    """Raise UnsupportedError for a model with its own loss in the output, which a step on the logits would drop."""
    if losses := facts.measurements.premises().losses:
        raise UnsupportedError(
            f"the output of {facts.kind} has a loss of its own beside the logits ({', '.join(losses)}), and a step"
            f" would train the cross entropy of the logits alone. Return the logits only; or give loss_fn=, which says"
            f" that logits and labels are all of it."
        )


def check(
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    vocab_size: int | None,
    device: torch.device,
    *,
    cuts_rows: bool = False,
) -> None:
    """Call a loss with a few made-up logits, and with the same rows twice; trust one that cannot be called so.

    Args:
        cuts_rows: ranks compute the loss of some tokens of each row.

    Raises:
        ConfigError: the loss is a mean, or does not add up over rows, or over the tokens of cut rows, or has
            parameters that are trained.
    """
    for module in _modules_in(loss_fn):
        if trained := [name for name, parameter in module.named_parameters() if parameter.requires_grad]:
            raise ConfigError(
                f"loss_fn is a {type(module).__name__} with parameters that are trained ({', '.join(trained[:3])}): no"
                " layout would add up their gradients, and no optimizer group or checkpoint knows them. Make them part"
                " of the model, or freeze them."
            )
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
        return
    if not (math.isfinite(once) and math.isfinite(twice)) or _near(twice, 2 * once):
        if cuts_rows and math.isfinite(once) and not _near(sum(parts), once):
            raise ConfigError(
                f"loss_fn gives {once:.5g} for rows of {SEQ} tokens, and {sum(parts):.5g} for their tokens in two"
                f" parts: it does not add up over tokens, and layout.cp cuts rows over ranks. Leave what looks at"
                f" several tokens out of it, or set layout.cp = 1."
            )
        return
    found = f"loss_fn gives {once:.5g} for {ROWS} rows and {twice:.5g} for the same rows twice"
    if _near(twice, once):
        raise ConfigError(
            f"{found}: it is a mean, and parallelize wants the SUM over tokens with a label, which it divides by their"
            " number in the whole step on all ranks. Write it with reduction='sum', such as"
            " F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=-100, reduction='sum')."
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
