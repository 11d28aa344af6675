"""Tell a default from a value that somebody chose: a default that facts may replace is marked."""

from __future__ import annotations

from typing import Any, TypeVar

Value = TypeVar("Value", int, float, str)


class Unset:
    """Marks a number or text that nobody chose. It computes, compares and prints as the plain value does."""


class _UnsetInt(Unset, int):
    pass


class _UnsetFloat(Unset, float):
    pass


class _UnsetText(Unset, str):
    pass


_KINDS: tuple[tuple[type, type], ...] = ((int, _UnsetInt), (float, _UnsetFloat), (str, _UnsetText))


def unset(value: Value) -> Value:
    """Return a default that is still to be chosen: by the user, or else by what is known of model and data."""
    return next(marked(value) for plain, marked in _KINDS if isinstance(value, plain))


def is_unset(value: object) -> bool:
    """Return whether nobody chose a value."""
    return isinstance(value, Unset)


def without_mark(value: Any) -> Any:
    """Return the plain value, as if it had been chosen."""
    return next(plain(value) for plain, marked in _KINDS if isinstance(value, marked)) if is_unset(value) else value
