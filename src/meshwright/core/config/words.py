"""Describe values and types to someone who writes TOML and may not know Python."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin

from .schema import is_fixed, is_section, union_arms

_SCALARS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    type(None): "nothing",
    Any: "anything",
}
_BARE = set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-")
_ESCAPES = {"\\": "\\\\", '"': '\\"', "\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r"}


def type_words(annotation: Any) -> str:
    """Name a type: ``tuple[str, ...]`` -> "a list of text"; ``bool | int`` -> "true or false, or a whole number"."""
    members = union_arms(annotation)
    if len(members) > 1:
        return ", or ".join(type_words(arm) for arm in members if arm is not type(None))
    if annotation in _SCALARS:
        return _SCALARS[annotation]
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return _one_of(args)
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return _one_of([member.value for member in annotation])
    if is_fixed(annotation):
        return f"a list of {len(args)}: " + ", ".join(type_words(arg) for arg in args)
    if origin in (tuple, list):
        return "a list of " + ("tables" if is_section(args[0]) else type_words(args[0]))
    return "a table"


def _one_of(values) -> str:
    shown = [toml_value(value) for value in values]
    return shown[0] if len(shown) == 1 else "one of " + ", ".join(shown)


def kind_words(value: Any) -> str:
    """Name the kind of a value: "text", "a whole number", "a table", ..."""
    if isinstance(value, Mapping):
        return "a table"
    if isinstance(value, (list, tuple)):
        return "a list"
    return _SCALARS.get(type(value), f"a {type(value).__name__}")


def shown(value: Any, limit: int = 60) -> str:
    """Format a value as the user wrote it, shortened to ``limit`` characters."""
    try:
        text = toml_value(value)
    except TypeError:
        text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def toml_key(name: str) -> str:
    return name if name and set(name) <= _BARE else toml_value(name)


def toml_value(value: Any) -> str:
    """Format a value in TOML's spelling, on one line.

    Raises:
        TypeError: TOML has no spelling for the value (None among others).
    """
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            return '"' + "".join(_escaped(char) for char in str(value)) + '"'
        case int():
            return str(int(value))
        case float():
            return repr(float(value))
        case list() | tuple():
            return "[" + ", ".join(toml_value(item) for item in value) + "]"
        case Mapping():
            return "{" + ", ".join(f"{toml_key(key)} = {toml_value(item)}" for key, item in value.items()) + "}"
    raise TypeError(f"TOML has no spelling for {value!r}")


def _escaped(char: str) -> str:
    """Escape the ASCII controls, as TOML requires, and the characters that some editors take for an end of line."""
    if char in _ESCAPES:
        return _ESCAPES[char]
    return f"\\u{ord(char):04x}" if ord(char) < 0x20 or 0x7F <= ord(char) < 0xA0 or char in "\u2028\u2029" else char
