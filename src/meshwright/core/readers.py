"""Let those who still read a model's weights finish before the weights change, such as a snapshot being copied."""

from __future__ import annotations

from collections.abc import Callable

_readers: list[Callable[[], None]] = []


def add(finish: Callable[[], None]) -> None:
    """Register a reader: ``finish`` returns when weights and optimizer state may change."""
    _readers.append(finish)


def remove(finish: Callable[[], None]) -> None:
    """Forget a reader; one that is gone already is passed over."""
    if finish in _readers:
        _readers.remove(finish)


def finish_all() -> None:
    """Wait for all readers. Whoever writes weights or optimizer state in place calls this first."""
    for finish in list(_readers):
        finish()
