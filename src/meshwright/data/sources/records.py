"""Define records: the rows of files, whatever their format."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from meshwright.core.errors import ConfigError, nearest

Record = dict[str, Any]
"""A row: column names and values."""


MEDIA_COLUMNS = ("images", "image")
"""Columns that name a record's images, by their paths, in the order of their places in the text."""


class BadRow(ConfigError):
    """A record that cannot be used; the text names its file and row."""


class RecordFormat(Protocol):
    """A kind of file that holds records. Rows are counted from 1, as editors do."""

    def count(self, path: Path) -> int:
        """Count the rows that ``records`` yields."""
        ...

    def records(self, path: Path) -> Iterator[tuple[int, Record | BadRow]]:
        """Yield every row that is not blank, with its number; an unusable row is yielded as a BadRow."""
        ...


def column(record: Record, name: str, where: str) -> Any:
    """Return the value of a column. If it has none, raises BadRow, which lists the columns with a value."""
    if record.get(name) is None:
        held = ", ".join(repr(key) for key, value in record.items() if value is not None) or "none"
        lack = "is empty" if name in record else "is missing"
        raise BadRow(f"{where}: the column '{name}' {lack}.{nearest(name, record)} Columns with a value: {held}")
    return record[name]
