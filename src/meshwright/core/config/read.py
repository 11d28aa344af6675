"""Read a dict into a dataclass strictly: nothing is ignored or guessed, and an error states what to write."""

from __future__ import annotations

import dataclasses
import difflib
import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

from meshwright.core.errors import ConfigError, MeshwrightError, nearest

from .schema import (
    default_of,
    field_types,
    is_fixed,
    is_section,
    item_types,
    join,
    row_of,
    section_of,
    sections,
    union_arms,
    without_mark,
)

# --- describe values and types to someone who writes TOML and may not know Python

_SCALARS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    Path: "a path",
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


# --- read a dict into a dataclass strictly

T = TypeVar("T")
_NO = object()


def from_dict(
    cls: type[T], data: Mapping[str, Any], *, where: str = "config", lines: Mapping[str, int] | None = None
) -> T:
    """Build a dataclass from nested dicts and lists.

    A whole number serves where a number is wanted; true and false are not numbers, and numbers are not true or false.

    Args:
        cls: a dataclass; its fields may be bool, int, float, str, Literal, an Enum, a dataclass, ``tuple[T, ...]``,
            ``tuple[A, B]``, ``list[T]``, ``dict[str, T]``, or unions of these.
        data: its values; keys left out take their defaults; an instance of a section's class serves as that section.
        where: name of the data in errors: a file name, or "layout".
        lines: dotted key -> line number in the file ``where`` (rows as ``overrides[0].pattern``).

    Raises:
        ConfigError: an unknown or missing key, a value of the wrong type, or a ValueError of the dataclass itself.
    """
    return _ConfigReader(cls, where, lines or {}).section(cls, data, "")


def read_value(cls: type, annotation: Any, value: Any, key: str, *, where: str) -> Any:
    """Return the value of one key of a dataclass, as ``from_dict`` reads it; ConfigError for one of the wrong type."""
    return _ConfigReader(cls, where, {})._value(annotation, value, key)


def to_dict(instance: Any) -> dict[str, Any]:
    """Convert a dataclass to nested dicts, lists and scalars; ``from_dict`` restores it."""
    return {name: plain(getattr(instance, name)) for name in field_types(type(instance))}


def plain(value: Any) -> Any:
    """Convert a field's value to one without dataclasses, tuples and enums."""
    if dataclasses.is_dataclass(value):
        return to_dict(value)
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return value.value if isinstance(value, enum.Enum) else without_mark(value)


def all_set(instance: T) -> T:
    """Return a dataclass whose unset values count as chosen, in its sections too."""
    held: Any = instance
    values = {field.name: getattr(held, field.name) for field in dataclasses.fields(held) if field.init}
    return dataclasses.replace(
        held,
        **{
            name: all_set(value) if dataclasses.is_dataclass(value) else without_mark(value)
            for name, value in values.items()
        },
    )


@dataclass(frozen=True)
class _ConfigReader:
    root: type
    where: str
    lines: Mapping[str, int]

    def section(self, cls: type, data: Any, key: str) -> Any:
        if isinstance(data, cls):
            return data
        if not isinstance(data, Mapping):
            raise self._mismatch(cls, data, key)
        types = field_types(cls)
        for name in data:
            if name not in types:
                raise self._unknown(cls, str(name), key)
        for field in dataclasses.fields(cls):
            if field.init and field.name not in data and default_of(field) is dataclasses.MISSING:
                wanted = type_words(types[field.name])
                raise ConfigError(
                    f"{self._at(key)}: '{join(key, field.name)}' is missing; it is {wanted} and has no default."
                )
        made = {name: self._value(types[name], value, join(key, name)) for name, value in data.items()}
        try:
            return cls(**made)
        except MeshwrightError:
            raise
        except ValueError as error:  # a rule of the class itself
            raise ConfigError(f"{self._at(key)}: {error}") from error

    def _value(self, wanted: Any, value: Any, key: str) -> Any:
        for arm in sorted(union_arms(wanted), key=lambda arm: arm is float):  # int | float: 3 stays a whole number
            found = self._arm(arm, value, key)
            if found is not _NO:
                return found
        for arm in union_arms(wanted) if isinstance(value, str) else ():
            if get_origin(arm) in (tuple, list) and item_types(arm, 1) == (str,):
                return get_origin(arm)([value])  # a list of one
        raise self._mismatch(wanted, value, key)

    def _arm(self, arm: Any, value: Any, key: str) -> Any:
        """Convert ``value`` to this member of the union, or return ``_NO``."""
        origin, args = get_origin(arm), get_args(arm)
        if is_section(arm):
            return self.section(arm, value, key) if isinstance(value, (Mapping, arm)) else _NO
        if origin is Literal:
            return next((choice for choice in args if type(choice) is type(value) and choice == value), _NO)
        if origin in (tuple, list):
            types = item_types(arm, len(value)) if isinstance(value, (tuple, list)) else None
            if types is None:
                return _NO
            return origin(
                self._value(wanted, item, f"{key}[{i}]")
                for i, (wanted, item) in enumerate(zip(types, value, strict=True))
            )
        if origin is dict:
            if not isinstance(value, Mapping):
                return _NO
            return {str(name): self._value(args[1], item, join(key, str(name))) for name, item in value.items()}
        return value if arm is Any else _scalar(arm, value, key)

    def _at(self, key: str) -> str:
        """Return the place of ``key``, or of the nearest enclosing table whose line is known."""
        while key and key not in self.lines:
            key = key[: max(key.rfind("."), key.rfind("["), 0)]
        return f"{self.where}:{self.lines[key]}" if key else self.where

    def _mismatch(self, wanted: Any, value: Any, key: str) -> ConfigError:
        name = f"{key} = {shown(value)}" if key else shown(value)
        return ConfigError(
            f"{self._at(key)}: {name} is {kind_words(value)}; expected {type_words(wanted)}.{_hint(wanted, value, key)}"
        )

    def _unknown(self, cls: type, name: str, prefix: str) -> ConfigError:
        title = f"Keys of [{prefix}]" if prefix else "Keys here"
        keys = ", ".join(field_types(cls))
        repair = _right_place(self.root, cls, name, prefix)
        return ConfigError(
            f"{self._at(join(prefix, name))}: unknown key '{join(prefix, name)}'.{repair} {title}: {keys}."
        )


def _scalar(arm: Any, value: Any, key: str) -> Any:
    if arm is float:
        return _as_float(value) if type(value) in (int, float) else _NO
    if arm in (bool, int, type(None)):
        return value if type(value) is arm else _NO
    if arm in (str, Path):
        return arm(value) if isinstance(value, str) else _NO
    if isinstance(arm, type) and issubclass(arm, enum.Enum):
        return next((member for member in arm if value is member or value == member.value), _NO)
    raise TypeError(f"{key}: a config field cannot have the type {arm}")


def _as_float(value: int | float) -> Any:
    try:
        return float(value)
    except OverflowError:
        return _NO


def _hint(wanted: Any, value: Any, key: str) -> str:
    leaf = key.rpartition(".")[2]
    members = union_arms(wanted)
    if isinstance(value, str):
        if any(_reads_as(arm, value) for arm in members):
            return f" Write it without quotes: {leaf} = {value.strip().lower()}"
        return nearest(value, [choice for arm in members for choice in _choices(arm)])
    if type(None) in members and value is None:
        return ""
    if any(row_of(arm) for arm in members):
        return f" Write each as a table: [[{key}]]"
    return ""


def _reads_as(arm: Any, text: str) -> bool:
    if arm is bool:
        return text.strip().lower() in ("true", "false")
    if arm in (int, float):
        try:
            arm(text)
        except ValueError:
            return False
        return True
    return False


def _choices(arm: Any) -> list[str]:
    if get_origin(arm) is Literal:
        return [choice for choice in get_args(arm) if isinstance(choice, str)]
    return [str(member.value) for member in arm] if isinstance(arm, type) and issubclass(arm, enum.Enum) else []


def _right_place(root: type, cls: type, name: str, prefix: str) -> str:
    """Suggest an unknown key's place: its name in another section, else the closest spelling, this section first."""
    prefix = re.sub(r"\[\d+\]", "[]", prefix)
    tree = list(sections(root))
    known = {join(path, key) for path, section in tree for key in field_types(section)}
    homes = [join(path, name) for path, section in tree if section is not cls and name in field_types(section)]
    homes = [f"{home}.kind" if f"{home}.kind" in known else home for home in homes]
    if homes:
        return f" It belongs elsewhere: {' or '.join(homes)}."
    scored = []
    for path, section in tree:
        for choice, annotation in field_types(section).items():
            ratio = difflib.SequenceMatcher(None, name.lower(), choice).ratio()
            here = path == prefix
            is_table = section_of(annotation) is not None
            scored.append((ratio + 0.1 * here - 0.05 * is_table, here, join(path, choice)))
    score, here, best = max(scored, key=lambda entry: entry[:2])
    return f" Did you mean '{best}'?" if score >= (0.6 if here else 0.75) else ""
