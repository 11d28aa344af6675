"""Read a dict or TOML into a dataclass strictly: an error states place and repair; write what reads as the same."""

from __future__ import annotations

import dataclasses
import difflib
import enum
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

from meshwright.core.errors import ConfigError, MeshwrightError, nearest
from meshwright.core.names import under

from .schema import (
    default_of,
    field_types,
    is_fixed,
    is_section,
    is_unset,
    item_types,
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


def toml_value(value: Any) -> str:
    """Format a value in TOML's spelling, on one line; raise TypeError where TOML has none (for None among others)."""
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            # ASCII controls, as TOML requires, and the characters that some editors take for an end of line
            special = re.sub(
                r"[\x00-\x1f\x7f-\x9f\u2028\u2029\\\"]",
                lambda found: _ESCAPES.get(found.group(), f"\\u{ord(found.group()):04x}"),
                str(value),
            )
            return f'"{special}"'
        case int():
            return str(int(value))
        case float():
            return repr(float(value))
        case list() | tuple():
            return "[" + ", ".join(toml_value(item) for item in value) + "]"
        case Mapping():
            keys = [key if key and set(key) <= _BARE else toml_value(key) for key in value]
            pairs = zip(keys, map(toml_value, value.values()), strict=True)
            return "{" + ", ".join(f"{key} = {item}" for key, item in pairs) + "}"
    raise TypeError(f"TOML has no spelling for {value!r}")


# --- read a dict into a dataclass strictly

T = TypeVar("T")
_NO = object()


def from_dict(
    cls: type[T], data: Mapping[str, Any] | T, *, where: str = "config", lines: Mapping[str, int] | None = None
) -> T:
    """Build a dataclass from nested dicts and lists, or check one that code has built: Python checks no types.

    A whole number serves where a number is wanted; true and false are not numbers, and numbers are not true or false.

    Args:
        cls: a dataclass; its fields may be bool, int, float, str, Literal, an Enum, a dataclass, ``tuple[T, ...]``,
            ``tuple[A, B]``, ``list[T]``, ``dict[str, T]``, or unions of these.
        data: its values; keys left out take their defaults. An instance of the class, or of a section's, is read as
            its fields are.
        where: name of the data in errors: a file name, or "layout".
        lines: dotted key -> line number in the file ``where`` (rows as ``overrides[0].pattern``).

    Raises:
        ConfigError: an unknown or missing key, a value of the wrong type, or a ValueError of the dataclass itself.
    """
    return _ConfigReader(cls, where, lines or {}).section(cls, data, "")


def read_value(cls: type, annotation: Any, value: Any, key: str, *, where: str) -> Any:
    """Return the value of one key of a dataclass, as ``from_dict`` reads it; ConfigError for one of the wrong type."""
    section, (*places, name) = cls, key.split(".")
    for place in places:
        section = section_of(field_types(section)[place]) or section
    reader = _ConfigReader(cls, where, {})
    return reader._auto(section, name, ".".join(places)) if value == "auto" else reader._value(annotation, value, key)


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
        if made_already := isinstance(data, cls):  # defaults that nobody changed need no reading
            cls = type(data)
            data = {
                name: value
                for name, value in vars(data).items()
                if name in field_types(cls) and value is not getattr(cls, name, _NO)
            }
        if not isinstance(data, Mapping):
            raise self._mismatch(cls, data, key)
        types = field_types(cls)
        for name in data:
            if name not in types:
                title, keys = f"Keys of [{key}]" if key else "Keys here", ", ".join(types)
                place, repair = under(key, str(name)), _right_place(self.root, cls, str(name), key)
                raise ConfigError(f"{self._at(place)}: unknown key '{place}'.{repair} {title}: {keys}.")
        for field in () if made_already else dataclasses.fields(cls):
            if field.init and field.name not in data and field.default is field.default_factory:  # both are missing
                wanted = type_words(types[field.name])
                raise ConfigError(
                    f"{self._at(key)}: '{under(key, field.name)}' is missing; it is {wanted} and has no default."
                )
        made = {
            name: self._value(types[name], value, under(key, name)) if value != "auto" else self._auto(cls, name, key)
            for name, value in data.items()
        }
        try:
            return cls(**made)
        except MeshwrightError:
            raise
        except ValueError as error:  # a rule of the class itself
            raise ConfigError(f"{self._at(key)}: {error}") from error

    def _auto(self, cls: type, name: str, key: str) -> Any:
        """Return the default of a number that is chosen later where nobody does; "auto" is read as text elsewhere."""
        default = default_of(next(field for field in dataclasses.fields(cls) if field.name == name))
        is_open = is_unset(default) and not isinstance(default, str)
        return default if is_open else self._value(field_types(cls)[name], "auto", under(key, name))

    def _value(self, wanted: Any, value: Any, key: str) -> Any:
        if is_unset(value):
            return value
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
            return {str(name): self._value(args[1], item, under(key, str(name))) for name, item in value.items()}
        if arm is float and type(value) in (int, float):
            try:
                return float(value)
            except OverflowError:
                return _NO
        if arm in (bool, int, float, type(None)):
            return value if type(value) is arm else _NO
        if arm in (str, Path):
            return arm(value) if isinstance(value, str) else _NO
        if isinstance(arm, type) and issubclass(arm, enum.Enum):
            return next((member for member in arm if value is member or value == member.value), _NO)
        if arm is not Any:
            raise TypeError(f"{key}: a config field cannot have the type {arm}")
        return value

    def _at(self, key: str) -> str:
        """Return the place of ``key``, or of the nearest enclosing table whose line is known."""
        while key and key not in self.lines:
            key = key[: max(key.rfind("."), key.rfind("["), 0)]
        return f"{self.where}:{self.lines[key]}" if key else self.where

    def _mismatch(self, wanted: Any, value: Any, key: str) -> ConfigError:
        name, members, hint = f"{key} = {shown(value)}" if key else shown(value), union_arms(wanted), ""
        if isinstance(value, str):
            bare, choices = value.strip().lower(), []
            for arm in members:
                if arm is bool and bare in ("true", "false"):
                    hint = f" Write it without quotes: {key.rpartition('.')[2]} = {bare}"
                elif arm in (int, float):
                    with suppress(ValueError):
                        arm(value)
                        hint = f" Write it without quotes: {key.rpartition('.')[2]} = {bare}"
                elif get_origin(arm) is Literal:
                    choices += [choice for choice in get_args(arm) if isinstance(choice, str)]
                elif isinstance(arm, type) and issubclass(arm, enum.Enum):
                    choices += [str(member.value) for member in arm]
            hint = hint or nearest(value, choices)
        elif str(value).startswith("torch."):
            hint = f' Write its name: {key.rpartition(".")[2]} = "{str(value).removeprefix("torch.")}"'
        elif any(map(row_of, members)) and not (type(None) in members and value is None):
            hint = f" Write each as a table: [[{key}]]"
        elif isinstance(value, Mapping) and key:
            hint = f" {key} has no keys of its own: write {key} = …"
        return ConfigError(f"{self._at(key)}: {name} is {kind_words(value)}; expected {type_words(wanted)}.{hint}")


def _right_place(root: type, cls: type, name: str, prefix: str) -> str:
    """Suggest an unknown key's place: its name in another section, else the closest spelling, this section first."""
    prefix = re.sub(r"\[\d+\]", "[]", prefix)
    tree = list(sections(root))
    known = {under(path, key) for path, section in tree for key in field_types(section)}
    homes = [under(path, name) for path, section in tree if section is not cls and name in field_types(section)]
    homes = [f"{home}.kind" if f"{home}.kind" in known else home for home in homes]
    if homes:
        return f" It belongs elsewhere: {' or '.join(homes)}."
    scored = []
    for path, section in tree:
        for choice, annotation in field_types(section).items():
            ratio = difflib.SequenceMatcher(None, name.lower(), choice).ratio()
            here = path == prefix
            is_table = section_of(annotation) is not None
            scored.append((ratio + 0.1 * here - 0.05 * is_table, here, under(path, choice)))
    score, here, best = max(scored, key=lambda entry: entry[:2])
    return f" Did you mean '{best}'?" if score >= (0.6 if here else 0.75) else ""


_PART = r"""(?:[A-Za-z0-9_-]+|"[^"\n]*"|'[^'\n]*')"""
_KEY = rf"{_PART}(?:[ \t]*\.[ \t]*{_PART})*"
_HEADER = re.compile(rf"\s*\[[ \t]*({_KEY})[ \t]*\]\s*(?:#.*)?$")
_ROW = re.compile(rf"\s*\[\[[ \t]*({_KEY})[ \t]*\]\]\s*(?:#.*)?$")
_ASSIGNMENT = re.compile(rf"\s*({_KEY})[ \t]*=")
_TEXT_OR_COMMENT = re.compile(
    r"""\"{3}(?:[^\\]|\\.)*?\"{3}|'{3}.*?'{3}|"(?:[^"\\\n]|\\.)*"|'[^'\n]*'|\#[^\n]*""", re.DOTALL
)


def load_toml(cls: type[T], path: str | Path) -> T:
    """Read a TOML file into a dataclass, as ``from_dict`` does; a ConfigError names file and line."""
    import tomllib

    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: byte {error.start} is not UTF-8, and TOML is; save the file as UTF-8") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        found = re.search(r"\(at line (\d+), column (\d+)\)", str(error))
        line = found.group(1) if found else max(1, len(text.rstrip().split("\n")))
        raise ConfigError(f"{path}:{line}: not valid TOML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{path}: its lists or tables lie too deep in each other") from None
    return from_dict(cls, data, where=str(path), lines=line_index(text))


def line_index(text: str) -> dict[str, int]:
    """Map each dotted key, tables included, to the line (from 1) that sets it; array-of-tables rows as ``key[0]``.

    A key inside an inline table has no line of its own; the table's line stands for the key.
    """
    lines: dict[str, int] = {}
    rows: dict[str, int] = {}
    section = ""
    # a text of several lines sets no keys
    plainly = _TEXT_OR_COMMENT.sub(lambda found: "\n" * found.group().count("\n") or found.group(), text)
    for number, line in enumerate(plainly.split("\n"), start=1):
        if found := _ROW.match(line):
            key = _dotted(found.group(1), rows)
            rows[key] = rows.get(key, -1) + 1
            lines.setdefault(key, number)
            section = f"{key}[{rows[key]}]"
            lines.setdefault(section, number)
        elif found := _HEADER.match(line):
            section = _dotted(found.group(1), rows, last=True)
            lines.setdefault(section, number)
        elif found := _ASSIGNMENT.match(line):
            lines.setdefault(under(section, _dotted(found.group(1), {})), number)
    return lines


def _dotted(key: str, rows: dict[str, int], last: bool = False) -> str:
    """Return the key unquoted and dotted; a part that is an array of tables means its newest row."""
    parts = [part.strip("\"'") for part in re.findall(_PART, key)]
    path = ""
    for i, part in enumerate(parts):
        path = under(path, part)
        if path in rows and (last or i < len(parts) - 1):
            path = f"{path}[{rows[path]}]"
    return path


def to_toml(instance: Any) -> str:
    """Write a dataclass as TOML text; ``from_dict(cls, tomllib.loads(text))`` equals the dataclass.

    None has no spelling in TOML: its keys are left out, so a field that may be None must have None as its default.
    Values that nobody chose are left out too, so that they are still to be chosen when the text is read.
    """
    return "\n".join(_table(instance, "")).strip("\n") + "\n"


def _table(instance: Any, prefix: str) -> Iterator[str]:
    """Yield a table's lines, scalars first: in TOML, a key below a [header] belongs to that header."""
    tables = []
    for field in dataclasses.fields(instance):
        if not field.init:
            continue
        value, key = getattr(instance, field.name), under(prefix, field.name)
        is_rows = isinstance(value, (tuple, list)) and len(value) > 0 and all(is_section(type(row)) for row in value)
        if is_section(type(value)) or is_rows:
            tables.append((key, value))
        elif is_unset(value):
            continue
        elif value is not None:
            try:
                text = toml_value(plain(value))
                text.encode()
            except (TypeError, UnicodeEncodeError) as error:
                raise ConfigError(f"{key}: {value!r} cannot be written to TOML: {error}") from None
            yield f"{field.name} = {text}"
        elif default_of(field) is not None:
            raise ConfigError(
                f"{key} = None cannot be written to TOML: a key left out means its default, {default_of(field)!r}"
            )
    for key, value in tables:
        for row in value if isinstance(value, (tuple, list)) else (value,):
            yield ""
            yield f"[{key}]" if row is value else f"[[{key}]]"
            yield from _table(row, key)
