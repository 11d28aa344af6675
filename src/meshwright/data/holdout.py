"""Choose the documents that are held out for validation.

The choice does not depend on a seed: every run holds out the same files and rows.
"""

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
            f"data.validation_fraction = {fraction}: the fraction of the bytes to hold out must be at least 0 (none)"
            f" and below 1, like 0.01"
        )


def hold_out(names: Sequence[str], sizes: Sequence[int], fraction: float) -> np.ndarray:
    """Choose documents whose sizes add up to about ``fraction`` of the total.

    In the order of a keyed hash of their names, each document that still fits into this size is held out. If none
    fits, the smallest is held out, so that two or more documents always leave both parts non-empty. A single document
    is not chosen: see ``cut_point``.

    Args:
        names: one per document.
        sizes: sizes in bytes, all above 0.
        fraction: 0 (none) or more, below 1.

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


def hold_out_rows(digests: Sequence[str], counts: Sequence[int], fraction: float) -> list[np.ndarray]:
    """Choose ``fraction`` of all rows of all files (at least one of two or more rows), by the smallest keyed hashes.

    Args:
        digests: digests of the files, as hex digits.
        counts: numbers of rows of the files.
        fraction: 0 (none) or more, below 1.

    Returns:
        For each file a bool array of shape (rows,), True where held out; never all True.

    Raises:
        ConfigError: a fraction outside [0, 1).
    """
    check_fraction(fraction)
    total = sum(counts)
    if fraction == 0 or total < 2:
        return [np.zeros(count, dtype=bool) for count in counts]
    wanted = min(max(1, round(fraction * total)), total - 1)
    ranks = np.concatenate(
        [np.random.Philox(key=_key_of(digest)).random_raw(count) for digest, count in zip(digests, counts, strict=True)]
    )
    chosen = np.zeros(total, dtype=bool)
    chosen[np.argpartition(ranks, wanted - 1)[:wanted]] = True
    return np.split(chosen, np.cumsum(counts)[:-1])


def cut_point(n_characters: int, fraction: float) -> int:
    """Return the index of the first held-out character of a corpus of one document.

    At least one of two or more characters is held out, and at least one is not.
    """
    check_fraction(fraction)
    if fraction == 0 or n_characters < 2:
        return n_characters
    return min(max(1, round(n_characters * (1 - fraction))), n_characters - 1)


def _key_of(digest: str) -> int:
    return int.from_bytes(hashlib.blake2b(digest.encode(), digest_size=16, key=_KEY).digest(), "little")


def _rank(name: str) -> bytes:
    # surrogateescape: a file name on disk need not be UTF-8
    return hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=16, key=_KEY).digest()
