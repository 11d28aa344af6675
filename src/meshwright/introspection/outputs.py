"""Find the logits in a model's output."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from meshwright.core.errors import UnsupportedError


def logits_of(output: Any) -> Tensor:
    """Return the logits of a forward's output.

    The logits are a tensor output itself, its ``logits``, or its only floating (rows, seq, vocabulary).

    Raises:
        UnsupportedError: none or several values could be the logits; the text proposes what to return.
    """
    if isinstance(output, Tensor):
        return output
    named = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    if isinstance(named, Tensor):
        return named
    values = (
        tuple(output.values()) if isinstance(output, Mapping) else output if isinstance(output, (tuple, list)) else ()
    )
    found = [value for value in values if isinstance(value, Tensor) and value.is_floating_point() and value.dim() == 3]
    if len(found) == 1:
        return found[0]
    raise UnsupportedError(
        f"the model's forward returns {_words(output)}, in which {len(found) or 'no'} tensors could be the logits"
        " (rows, seq, vocabulary). Return the logits alone, or in an object or a dict under the name logits, or as the"
        " only floating tensor of three dims."
    )


def with_logits(output: Any, logits: Tensor) -> Any:
    """Return a forward's output with other logits in the place of those that ``logits_of`` finds."""
    found = logits_of(output)
    if found is output:
        return logits
    if isinstance(output, (tuple, list)):
        return type(output)(logits if value is found else value for value in output)
    if not isinstance(output, Mapping):
        output = copy.copy(output)
        output.logits = logits
        return output
    output = copy.copy(output)
    output[next(key for key, value in output.items() if value is found)] = logits  # type: ignore[index]
    return output


def _words(output: Any) -> str:
    """Return what it consists of."""
    if isinstance(output, Mapping):
        return f"a {type(output).__name__} of {', '.join(map(str, output)) or 'nothing'}"
    if isinstance(output, (tuple, list)):
        kinds = (f"{tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__ for value in output)
        return f"a {type(output).__name__} of {', '.join(kinds) or 'nothing'}"
    return f"a {type(output).__name__}"
