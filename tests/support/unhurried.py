"""Compare memory on a busy machine: wait behind messages, and take the least of equal steps.

A thread of gloo holds a message's tensors until it runs again, which may be late on a busy machine, and is never early.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Protocol

from meshwright.core.torch_private import TorchDispatchMode

PAUSE_S = 0.003


class Unhurried(TorchDispatchMode):
    """Waits after each message, so that gloo's threads let go of its tensors."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional"):
            time.sleep(PAUSE_S)
        return made


class WatchedStep(Protocol):
    """An account of a step's bytes by kind: the most of each, and those at the time with most of all."""

    most: Any
    peak: Any


def least_of(watches: Sequence[WatchedStep]) -> tuple[Mapping[Any, int], Mapping[Any, int]]:
    """Return the most bytes of each kind, and those at the peak, in the least of equal steps."""
    kinds: dict[Hashable, int] = {kind: min(watch.most.get(kind, 0) for watch in watches) for kind in watches[0].most}
    return kinds, min((watch.peak for watch in watches), key=lambda peak: sum(peak.values()))
