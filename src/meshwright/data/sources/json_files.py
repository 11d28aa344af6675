"""Read records from JSON: one object per line, or a list of objects, a piece of the file at a time."""

from __future__ import annotations

import bz2
import codecs
import gzip
import json
import lzma
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from meshwright.core.errors import ConfigError

from .records import BadRow, Record

_PIECE = 1 << 20
"""Bytes of a list that are read at a time."""
_WORD = 16
"""Characters of the longest sign of JSON, such as an escaped character, that the end of a piece may cut."""
_SPACE = re.compile(r"[ \t\n\r]*")
_decode = json.JSONDecoder().raw_decode


UNPACKED = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
"""Suffixes of packed files that are unpacked while they are read."""


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """Open a file, and decompress a packed file while it is read.

    Raises ConfigError for a packed file that is not complete.
    """
    packed = path.suffix.lower()
    try:
        with UNPACKED.get(packed, open)(path, "rb") as file:
            yield file  # pyright: ignore[reportReturnType]
    except (EOFError, zlib.error, lzma.LZMAError, OSError) as error:
        if packed not in UNPACKED or getattr(error, "errno", None) is not None:
            raise
        kind = {".gz": "gzip"}.get(packed, packed[1:])
        raise ConfigError(
            f"data.source: {path} is no whole {kind} file ({error}): get it again, or unpack what there is"
        ) from error


class JsonLines:
    """One JSON object per line; packed files are decompressed while they are read."""

    def count(self, path: Path) -> int:
        return sum(1 for _ in _lines(path))

    def records(self, path: Path) -> Iterator[tuple[int, Record | BadRow]]:
        for number, line in _lines(path):
            yield number, _parse(path, number, line)


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield every line that is not blank, with its number."""
    with opened(path) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, line


def _parse(path: Path, number: int, line: bytes) -> Record | BadRow:
    shown = line[:60].decode("utf-8", errors="replace").strip()
    try:
        record = json.loads(line.rstrip(b"\r\n"))
    except UnicodeDecodeError as error:
        return BadRow(f"{path}, line {number} is not UTF-8 ({error.reason} at byte {error.start} of the line)")
    except (ValueError, RecursionError) as error:
        return BadRow(
            f"{path}, line {number} is no JSON ({error}): {shown!r}. In JSON lines each line is one object, like"
            f" {_LIKE}"
        )
    if not isinstance(record, dict):
        return BadRow(
            f"{path}, line {number} is a JSON {type(record).__name__}, not an object: {shown!r}. It must be like"
            f" {_LIKE}"
        )
    return record


_LIKE = '{"text": "..."}'


class JsonList:
    """One JSON document that is a list of objects; JSON lines in a file with the suffix ``.json`` are read too.

    A row's number is its place in the list. Memory holds about the largest record, not the file.
    """

    def count(self, path: Path) -> int:
        return sum(1 for _ in self.records(path))

    def records(self, path: Path) -> Iterator[tuple[int, Record | BadRow]]:
        with opened(path) as file:
            text = _ListText(path, file)
            is_list = text.next_sign() == "["
            if is_list:
                yield from _items(text)
        if not is_list:
            _check_first_line(path)
            yield from JsonLines().records(path)


def _items(text: _ListText) -> Iterator[tuple[int, Record | BadRow]]:
    """Yield the records of a list that begins where the text is.

    Raises ConfigError where the text is no JSON: where the next record begins is unknown then.
    """
    text.at += 1
    number = 0
    while (sign := text.next_sign()) != "]" or number:
        number += 1
        begins = text.line_of(text.at)
        record = text.value(number)
        if isinstance(record, dict):
            yield number, record
        else:
            kind, where = type(record).__name__, f"{text.path}, record {number} (line {begins})"
            yield number, BadRow(f"{where} is a JSON {kind}, not an object. It must be like {_LIKE}")
        sign = text.next_sign()
        if sign != ",":
            break
        text.at += 1
    if sign != "]":
        raise text.broken(number, f"expected ',' or ']' after it, and found {sign!r}" if sign else "the file ends")
    text.at += 1
    if sign := text.next_sign():
        raise text.broken(number, f"the list ends, and {sign!r} follows")


def _check_first_line(path: Path) -> None:
    """Raise ConfigError for a document that is neither a list nor lines of objects."""
    number, line = next(_lines(path), (0, b"{}"))
    if not isinstance(_parse(path, number, line), dict):
        raise ConfigError(
            f"data.source: {path} is one JSON document that is no list of records ([{_LIKE}, ...]), nor an object per"
            f" line: write out the list that it holds (jq .KEY {path.name} > records.json), or set data.format = 'text'"
            f" to train on its characters"
        )


class _ListText:
    """The text of a file from a place on, of which a piece is in memory."""

    def __init__(self, path: Path, file: IO[bytes]):
        self.path, self._file = path, file
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self.text, self.at = "", 0
        self._lines_before, self._is_whole = 0, False

    def next_sign(self) -> str:
        """Pass over white space, and return the character behind it; "" at the end of the file."""
        while True:
            self.at = _SPACE.match(self.text, self.at).end()  # pyright: ignore[reportOptionalMemberAccess]
            if self.at < len(self.text) or self._is_whole:
                return self.text[self.at : self.at + 1]
            self._read(_PIECE)

    def value(self, number: int) -> Any:
        """Return the JSON value that begins here, and go behind it.

        Raises ConfigError if there is none.
        """
        size = _PIECE
        while True:
            try:
                found, end = _decode(self.text, self.at)
            except json.JSONDecodeError as error:
                is_cut = error.msg.startswith("Unterminated string") or error.pos + _WORD >= len(self.text)
                if self._is_whole or not is_cut:
                    raise self.broken(number, error.msg, error.pos) from None
            except (ValueError, RecursionError) as error:
                raise self.broken(number, str(error)) from None
            else:
                if end < len(self.text) or self._is_whole:
                    self.at = end
                    return found
            self._read(size)
            size *= 2  # so that all attempts at a large record take no longer than twice the last

    def line_of(self, place: int) -> int:
        return 1 + self._lines_before + self.text.count("\n", 0, place)

    def broken(self, number: int, why: str, place: int | None = None) -> ConfigError:
        place = self.at if place is None else place
        shown = self.text[max(place - 30, 0) : place + 30]
        return ConfigError(
            f"data.source: {self.path}, line {self.line_of(place)}, at record {number} of the list, is no JSON ({why}):"
            f" {shown!r}. Mend the file: where the next record begins cannot be known"
        )

    def _read(self, size: int) -> None:
        data = self._file.read(size)
        try:
            piece = self._decoder.decode(data, final=not data)
        except UnicodeDecodeError as error:
            line = self.line_of(len(self.text)) + data.count(b"\n", 0, error.start)
            raise ConfigError(f"data.source: {self.path}, line {line} is not UTF-8 ({error.reason})") from None
        self._lines_before += self.text.count("\n", 0, self.at)
        self.text, self.at, self._is_whole = self.text[self.at :] + piece, 0, not data
