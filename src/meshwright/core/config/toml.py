"""Read TOML with line numbers for errors; write it so that reading gives the same value."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from meshwright.core.errors import ConfigError

from .read import from_dict, plain, toml_value
from .schema import default_of, is_section, is_unset, join

T = TypeVar("T")

_PART = r"""(?:[A-Za-z0-9_-]+|"[^"\n]*"|'[^'\n]*')"""
_KEY = rf"{_PART}(?:[ \t]*\.[ \t]*{_PART})*"
_HEADER = re.compile(rf"\s*\[[ \t]*({_KEY})[ \t]*\]\s*(?:#.*)?$")
_ROW = re.compile(rf"\s*\[\[[ \t]*({_KEY})[ \t]*\]\]\s*(?:#.*)?$")
_ASSIGNMENT = re.compile(rf"\s*({_KEY})[ \t]*=")
_QUOTED_OR_COMMENT = re.compile(r'"""|\'\'\'|"(?:[^"\\]|\\.)*"|\'[^\']*\'|#')


def load_toml(cls: type[T], path: str | Path) -> T:
    """Read a TOML file into a dataclass; see ``from_dict`` for what is accepted.

    Raises:
        ConfigError: no such file, not UTF-8, not TOML, an unknown key, or a value of the wrong type; the message
            gives file and line.
    """
    import tomllib

    text = _read(Path(path))
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        found = re.search(r"\(at line (\d+), column (\d+)\)", str(error))
        line = found.group(1) if found else max(1, len(text.rstrip().split("\n")))
        raise ConfigError(f"{path}:{line}: not valid TOML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{path}: its lists or tables lie too deep in each other") from None
    return from_dict(cls, data, where=str(path), lines=line_index(text))


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: byte {error.start} is not UTF-8, and TOML is; save the file as UTF-8") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None


def line_index(text: str) -> dict[str, int]:
    """Map each dotted key, tables included, to the line (from 1) that sets it; array-of-tables rows as ``key[0]``.

    A key inside an inline table has no line of its own; the table's line stands for the key.
    """
    lines: dict[str, int] = {}
    rows: dict[str, int] = {}
    section, quote = "", ""
    for number, line in enumerate(text.split("\n"), start=1):
        was_inside, quote = quote, _open_quote(line, quote)
        if was_inside:
            continue
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
            lines.setdefault(join(section, _dotted(found.group(1), {})), number)
    return lines


def _open_quote(line: str, quote: str) -> str:
    """Return the multi-line quote (three quote marks) that is open after ``line``; "" for none."""
    at = 0
    while at < len(line):
        if quote:
            end = line.find(quote, at)
            if end < 0:
                return quote
            at, quote = end + len(quote), ""
        else:
            token = _QUOTED_OR_COMMENT.search(line, at)
            if token is None or token.group() == "#":
                return ""
            at, quote = token.end(), token.group() if token.group() in ('"""', "'''") else ""
    return quote


def _dotted(key: str, rows: dict[str, int], last: bool = False) -> str:
    """Return the key unquoted and dotted; a part that is an array of tables means its newest row."""
    parts = [part.strip("\"'") for part in re.findall(_PART, key)]
    path = ""
    for i, part in enumerate(parts):
        path = join(path, part)
        if path in rows and (last or i < len(parts) - 1):
            path = f"{path}[{rows[path]}]"
    return path


def to_toml(instance: Any) -> str:
    """Write a dataclass as TOML text; ``from_dict(cls, tomllib.loads(text))`` equals the dataclass.

    None has no spelling in TOML: its keys are left out, so a field that may be None must have None as its default.
    Values that nobody chose are left out too, so that they are still to be chosen when the text is read.

    Raises:
        ConfigError: a value that TOML cannot hold.
    """
    return "\n".join(_table(instance, "")).strip("\n") + "\n"


def _table(instance: Any, prefix: str) -> Iterator[str]:
    """Yield a table's lines, scalars first: in TOML, a key below a [header] belongs to that header."""
    tables = []
    for field in dataclasses.fields(instance):
        if not field.init:
            continue
        value, key = getattr(instance, field.name), join(prefix, field.name)
        is_rows = isinstance(value, (tuple, list)) and len(value) > 0 and all(is_section(type(row)) for row in value)
        if is_section(type(value)) or is_rows:
            tables.append((key, value))
        elif is_unset(value):
            continue
        elif value is not None:
            yield f"{field.name} = {_spelt(value, key)}"
        elif default_of(field) is not None:
            raise ConfigError(
                f"{key} = None cannot be written to TOML: a key left out means its default, {default_of(field)!r}"
            )
    for key, value in tables:
        for row in value if isinstance(value, (tuple, list)) else (value,):
            yield ""
            yield f"[{key}]" if row is value else f"[[{key}]]"
            yield from _table(row, key)


def _spelt(value: Any, key: str) -> str:
    try:
        text = toml_value(plain(value))
        text.encode()
    except (TypeError, UnicodeEncodeError) as error:
        raise ConfigError(f"{key}: {value!r} cannot be written to TOML: {error}") from None
    return text
