"""Choose the documents that are held out for validation.

No seed enters: the same files and rows are held out in every run.
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
            f"data.validation_fraction = {fraction}: it is the part of the bytes that is held out, at least 0 (none)"
            f" and below 1, like 0.01"
        )


def hold_out(names: Sequence[str], sizes: Sequence[int], fraction: float) -> np.ndarray:
    """Choose documents whose sizes add up to about ``fraction`` of all.

    Documents stand in the order of a keyed hash of their names, and each is held out that still fits into what is
    wanted. Where none fits, the smallest is held out, so that several documents always leave something on either
    side. One document alone is
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


def hold_out_rows(digests: Sequence[str], counts: Sequence[int], fraction: float) -> list[np.ndarray]:
    """Choose ``fraction`` of all rows of all files, at least one where there are two: those with the smallest keyed
    hash.

    Args:
        digests: of the files, as hex digits. counts: their rows. fraction: 0 (none) or more, below 1.

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
    """Tell where a corpus of one document is cut: characters before it train, the rest (at least one, where there are
    two) is held out.
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
