"""Which documents are held out for validation. No seed enters: the same files are held out in every run."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from meshwright.core.errors import ConfigError

_KEY = b"meshwright held-out documents"


def check_fraction(fraction: float) -> None:
    """Raise ConfigError unless 0 <= ``fraction`` < 1."""
    if not 0 <= fraction < 1:
        raise ConfigError(
            f"data.validation_fraction = {fraction}: it is the part of the bytes that is held out, at least 0 (none) and below 1, like 0.01"
        )


def hold_out(names: Sequence[str], sizes: Sequence[int], fraction: float) -> np.ndarray:
    """Choose documents whose sizes add up to about ``fraction`` of all.

    Documents stand in the order of a keyed hash of their names, and each is held out that still fits into what is wanted. Where
    none fits, the smallest is held out, so that several documents always leave something on either side. One document alone is
    not chosen: see ``cut_point``.

    Args:
        names: one per document. sizes: bytes, all above 0. fraction: 0 (none) or more, below 1.

    Returns:
        bool of shape (documents,), True where held out; never all True.

    Raises:
        ConfigError: a fraction outside [0, 1).
    """
    check_fraction(fraction)
    chosen = np.zeros(len(names), dtype=bool)
    if fraction == 0 or len(names) < 2:
        return chosen
    wanted, held = fraction * sum(sizes), 0
    for i in sorted(range(len(names)), key=lambda i: (_rank(names[i]), i)):
        if held + sizes[i] <= wanted:
            chosen[i] = True
            held += sizes[i]
    if not held:
        chosen[int(np.argmin(sizes))] = True
    return chosen


def cut_point(n_characters: int, fraction: float) -> int:
    """Where a corpus of one document is cut: characters before it train, the rest (at least one, where there are two) is held out."""
    check_fraction(fraction)
    if fraction == 0 or n_characters < 2:
        return n_characters
    return min(max(1, round(n_characters * (1 - fraction))), n_characters - 1)


def _rank(name: str) -> bytes:
    # surrogateescape: a file name on disk need not be UTF-8
    return hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=16, key=_KEY).digest()
