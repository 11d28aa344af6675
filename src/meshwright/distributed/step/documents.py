"""Ask a model whether positions alone keep packed documents apart.

transformers sees from positions that begin again where a document begins, and masks; but not in every model, and not
in every version.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

HALF = 4
"""Tokens of each of two documents in a row."""
LEAKS = 1e-3
"""The part of an earlier document's influence above which it counts as seen; rounding is far below."""


def stay_apart(logits: Callable[[Mapping[str, Tensor]], Tensor]) -> bool:
    """Tell whether a row's second document is computed as if the first were not there.

    Args:
        logits: batch (tokens, positions: (2, seq) int64) -> (2, seq, vocab), without gradients.
    """
    tokens = torch.tensor([[3, 1, 2, 1, 2, 3, 1, 3], [1, 2, 1, 3, 2, 3, 1, 3]])  # the second halves are alike
    running = torch.arange(2 * HALF).expand(2, -1)
    seen, kept = (
        _influence(logits({"tokens": tokens, "positions": positions})) for positions in (running, running % HALF)
    )
    return kept <= LEAKS * seen and seen > 0


def _influence(logits: Tensor) -> float:
    """Tell how far the second halves of two rows are apart whose first halves differ."""
    one, other = logits[:, HALF:].double().unbind()
    return float((one - other).norm())
