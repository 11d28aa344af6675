"""Hold what a judge finds: tensors that differ, and the first difference of a run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from .traces import Place

SMALL = 0.1
"""Relative error that a loss which is no sum over rows may have where microbatches are others."""
FLOORS = 12.0
"""Multiple of the error between runs of one process that still counts as rounding."""


@dataclass(frozen=True)
class Finding:
    """The first difference of a run from one process, or that there is none.

    Attributes:
        verdict: "fault" or "sound".
        place: a module or parameter, as one process names it; ".+" where everything differs at once.
        step: the first step, 1 the first.
        ranks: the ranks with the difference.
        words: the finding in a sentence.
        unknown: parameters that were not compared, since their place in one process's is unknown.
    """

    verdict: str
    place: str = ""
    step: int = 0
    ranks: tuple[int, ...] = ()
    kind: str = ""
    words: str = "equal up to rounding"
    unknown: tuple[str, ...] = ()


@dataclass(frozen=True)
class Off:
    """One tensor of one rank that differs."""

    name: str
    rank: int
    found: Tensor | None
    whole: Tensor | None
    error: float
    place: Place | None


def is_small(off: Off, share: float = 1e-6) -> bool:
    return off.found is not None and off.whole is not None and float(off.found.norm()) < share * float(off.whole.norm())


def near(value: float | None, n: int) -> bool:
    return value is not None and abs(value - n) < 1e-2 * n


def ranks_of(off: Iterable[Off]) -> tuple[int, ...]:
    return tuple(sorted({o.rank for o in off}))


def is_router(name: str) -> bool:
    """Return whether a module's loss of balance is no sum over rows, by its name."""
    return any(word in name.lower() for word in ("router", "gate."))


def is_position(name: str) -> bool:
    return any(word in name.lower() for word in ("pos", "rope", "rotary", "wpe", "relative"))
