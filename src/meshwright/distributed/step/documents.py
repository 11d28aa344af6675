"""Ask a model itself whether it keeps packed documents apart if it gets positions only.

transformers masks by positions that restart at each document, but not in every model, and not in every version.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from meshwright.distributed.process.absent_peers import peers_are_absent

HALF = 4
"""Tokens of each of a row's two documents."""
LEAKS = 1e-3
"""The share of an earlier document's influence above which a later one sees it; rounding is far below."""


def stay_apart(logits: Callable[[Mapping[str, Tensor]], Tensor]) -> bool:
    """Return whether a row's second document is computed independently of the first.

    Args:
        logits: batch (tokens, positions: (2, seq) int64) -> (2, seq, vocab), without gradients.

    Where peers are absent, no logits are the model's, and the answer is taken to be yes.
    """
    if peers_are_absent():
        return True
    tokens = torch.tensor([[3, 1, 2, 1, 2, 3, 1, 3], [1, 2, 1, 3, 2, 3, 1, 3]])  # the second halves are alike
    running = torch.arange(2 * HALF).expand(2, -1)
    seen, kept = (
        _influence(logits({"tokens": tokens, "positions": positions})) for positions in (running, running % HALF)
    )
    return kept <= LEAKS * seen and seen > 0


def _influence(logits: Tensor) -> float:
    """Return the distance between the second halves of two rows whose first halves differ."""
    one, other = logits[:, HALF:].double().unbind()
    return float((one - other).norm())
