"""Count and read records of each file format, a few at a time."""

from __future__ import annotations

import bz2
import codecs
import csv
import gzip
import hashlib
import io
import json
import lzma
import random
import re
import tomllib
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import IO, Any

from meshwright.core.errors import ConfigError, MissingExtraError, nearest
from meshwright.core.files import inside

from .options import FARMYARD

# --- define records

Record = dict[str, Any]
"""A row: column names and values."""


MEDIA_COLUMNS = ("images", "image")
"""Columns that name a record's images, by their paths, in the order of their places in the text."""


class BadRow(ConfigError):
    """A record that cannot be used; the text names its file and row.

    Attributes:
        columns: columns without which it could be used; ``data.ignore`` leaves them out.
    """

    def __init__(self, text: str, columns: Sequence[str] = ()):
        super().__init__(text)
        self.columns = tuple(columns)


def kind_of(bad: str) -> str:
    """Return the text of a bad row without what differs from row to row: quoted words and numbers."""
    return re.sub(r" Did you mean .*\?|'[^']*'|\"[^\"]*\"|\d+", "…", bad).strip(".…")


def kinds_listed(bad: Iterable[tuple[int, str]], most: int) -> list[str]:
    """Say each kind of bad row by the first that has it, with the others: ``most`` kinds, and how many more there are.

    Args:
        bad: numbers and texts of the rows.
    """
    kinds: dict[str, list[tuple[int, str]]] = {}
    for row, text in bad:
        kinds.setdefault(kind_of(text), []).append((row, text))
    listed = []
    for (_, text), *others in [*kinds.values()][:most]:
        also = f" (also row{'s' * (len(others) > 1)} {', '.join(str(row) for row, _ in others[:_ROWS])}"
        also += f" and {len(others) - _ROWS:,} more, {len(others) + 1:,} in all" * (len(others) > _ROWS)
        listed.append(text.rstrip(".") + f"{also})" * bool(others))
    more = len(kinds) - most
    return [*listed, *[f"and {more:,} more kind{'s' * (more > 1)}"] * (more > 0)]


_ROWS = 3
"""Rows of a kind that are named beside its first."""

Rows = Iterator[tuple[int, Record | BadRow]]
"""Numbers of rows, and their records."""


@dataclass(frozen=True)
class RecordFormat:
    """A kind of file that holds records. Rows are counted from 1, as editors do.

    Attributes:
        records: yields every row that is not blank, with its number; an unusable row as a BadRow.
        counted: counts these rows, where that is quicker than to read them.
    """

    records: Callable[[Path], Rows]
    counted: Callable[[Path], int] | None = None

    def count(self, path: Path) -> int:
        """Count the rows that ``records`` yields."""
        return self.counted(path) if self.counted else sum(1 for _ in self.records(path))


def column(record: Record, name: str, where: str) -> Any:
    """Return the value of a column. If it has none, raises BadRow, which lists the columns with a value."""
    if record.get(name) is None:
        held = [key for key, value in record.items() if value is not None]
        lack, listed = "is empty" if name in record else "is missing", ", ".join(map(repr, held)) or "none"
        raise BadRow(f"{where}: the column '{name}' {lack}.{nearest(name, held)} Columns with a value: {listed}")
    return record[name]


# --- read records from JSON

_PIECE = 1 << 20
"""Bytes of a list that are read at a time."""
_WORD = 16
"""Characters of the longest sign of JSON, such as an escaped character, that the end of a piece may cut."""
_SPACE = re.compile(r"[ \t\n\r]*")


def _once(pairs: list[tuple[str, Any]]) -> Record:
    """Make a JSON object's dict, of which no key stands twice: Python would keep the last without a word."""
    made = dict(pairs)
    if len(made) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"an object has the key {max(keys, key=keys.count)!r} more than once")
    return made


_decode = json.JSONDecoder(object_pairs_hook=_once).raw_decode


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


def json_lines(path: Path) -> Rows:
    """Read one JSON object per line; packed files are decompressed while they are read."""
    for number, line in _lines(path):
        yield number, _parse(path, number, line)


def json_list(path: Path) -> Rows:
    """Read one JSON document that is a list of objects; JSON lines in a file with the suffix ``.json`` are read too.

    A row's number is its place in the list. Memory holds about the largest record, not the file.

    Raises ConfigError where the text is no JSON, or an object has a key twice: nothing behind it is read.
    """
    with opened(path) as file:
        text = _ListText(path, file)
        is_list = text.next_sign() == "["
        if is_list:
            text.at += 1
            number = 0
            while (sign := text.next_sign()) != "]" or number:
                number += 1
                begins = text.line_of(text.at)
                record = text.value(number)
                if isinstance(record, dict):
                    yield number, record
                else:
                    kind, where = type(record).__name__, f"{path}, row {number} (line {begins})"
                    yield number, BadRow(f"{where} is a JSON {kind}, not an object. It must be like {_LIKE}")
                sign = text.next_sign()
                if sign != ",":
                    break
                text.at += 1
            if sign != "]":
                why = f"expected ',' or ']' after it, and found {sign!r}" if sign else "the file ends"
                raise text.broken(number, why)
            text.at += 1
            if sign := text.next_sign():
                raise text.broken(number, f"the list ends, and {sign!r} follows")
    if not is_list:
        number, line = next(_lines(path), (0, b"{}"))
        if not isinstance(_parse(path, number, line), dict):
            raise ConfigError(
                f"data.source: {path} is one JSON document that is no list of records ([{_LIKE}, ...]), nor an object"
                f" per line: write out the list that it holds (jq .KEY {quote(str(path))} > records.json), or set"
                f" data.format = 'text' to train on its characters"
            )
        yield from json_lines(path)


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield every line that is not blank, with its number."""
    with opened(path) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, line


def _parse(path: Path, number: int, line: bytes) -> Record | BadRow:
    shown = line[:60].decode("utf-8", errors="replace").strip()
    try:
        record = json.loads(line.rstrip(b"\r\n"), object_pairs_hook=_once)
    except UnicodeDecodeError as error:
        return BadRow(f"{path}, row {number} is not UTF-8 ({error.reason} at its byte {error.start})")
    except (ValueError, RecursionError) as error:
        return BadRow(
            f"{path}, row {number} is no JSON ({error}): {shown!r}. In JSON lines each line is one object, like {_LIKE}"
        )
    if not isinstance(record, dict):
        return BadRow(
            f"{path}, row {number} is a JSON {type(record).__name__}, not an object: {shown!r}. It must be like {_LIKE}"
        )
    return record


_LIKE = '{"text": "..."}'


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
            f" {shown!r}. Mend the file: what follows is not read"
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


# --- draw the demo's text

FARMYARD_FILE = Path(__file__).with_name("farmyard.toml")


def farmyard(path: Path) -> Rows:
    """Yield the records of the demo, drawn from a file's words; they are the same on every machine."""
    words, draw = tomllib.loads(path.read_text(encoding="utf-8")), random.Random(0)

    def sentence() -> str:  # true of its animal: food and sound follow from the animal alone
        adjective, animal = draw.choice(words["adjectives"]), draw.choice(list(words["animals"]))
        food, sound = words["animals"][animal]
        return draw.choice(words["patterns"]).format(adjective=adjective, animal=animal, food=food, sound=sound)

    for number in range(1, words["documents"] + 1):
        yield number, {"text": "\n".join(sentence() for _ in range(words["sentences"]))}


# --- count and read records of each file format, a few at a time

_INSIDE = {"bytes": b"in the data set"}
"""The value of a column whose images lie in a data set, not in files; they are not decoded."""


def without_filled_in(value: Any) -> Any:
    """Return a nested value without the null keys that Parquet and Arrow add because other rows have them.

    The key ``content`` stays even if it is null, since templates recognise a tool call by it.
    """
    if isinstance(value, list):
        return [without_filled_in(item) for item in value]
    if isinstance(value, dict):
        return {key: without_filled_in(item) for key, item in value.items() if item is not None or key == "content"}
    return value


class ArrowRecord(dict[str, Any]):
    """A row of Parquet or Arrow without the null keys that other rows have.

    Attributes:
        nulls: those in arguments of calls of tools, which the row may have had itself.
    """

    def __init__(self, row: dict[str, Any]):
        super().__init__((name, without_filled_in(value)) for name, value in row.items())
        self.nulls = sum(map(_nulls, row.values()))


def _nulls(value: Any, is_argument: bool = False) -> int:
    """Count the keys with null in arguments of calls."""
    if isinstance(value, list):
        return sum(_nulls(item, is_argument) for item in value)
    if not isinstance(value, dict):
        return 0
    own = sum(item is None for item in value.values()) if is_argument else 0
    return own + sum(_nulls(item, is_argument or key == "arguments") for key, item in value.items())


def parquet_rows(path: Path) -> Rows:
    """Read a Parquet file in batches of rows (needs pyarrow, which the extra hf installs)."""
    batches = _open_parquet(path).iter_batches(batch_size=1024)
    yield from enumerate((ArrowRecord(row) for batch in batches for row in batch.to_pylist()), 1)


def _open_parquet(path: Path) -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise MissingExtraError(f"the Parquet file {path}", "pyarrow", "hf") from error
    try:
        return pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(
            f"data.source: {path} is no Parquet file that pyarrow {pyarrow.__version__} reads: {error}"
        ) from error


def table_rows(path: Path) -> Rows:
    """Read a CSV file (RFC 4180) or, by its suffix, one of tab-separated values; its first row names the columns.

    All values are text, empty ones too; a row's number is its place below the first row.
    """
    csv.field_size_limit(1 << 30)
    with opened(path) as file, io.TextIOWrapper(file, "utf-8-sig", newline="") as text:
        rows = csv.reader(text, delimiter="\t" if ".tsv" in suffix_of(path) else ",", strict=True)
        try:
            names = next(rows, [])
            if "" in names or len(set(names)) != len(names):
                raise ConfigError(
                    f"data.source: the first row of {path} must name the columns, each by a name of its own, and is"
                    f" {str(names)[:60]}"
                )
            for number, row in enumerate((row for row in rows if row), 1):
                if len(row) == len(names):
                    yield number, dict(zip(names, row, strict=True))
                    continue
                where = f"{path}, row {number} (up to line {rows.line_num})"
                yield number, BadRow(f"{where} has {len(row)} values, and the first row names {len(names)} columns")
        except (csv.Error, UnicodeDecodeError) as error:
            raise ConfigError(
                f"data.source: {path} is no table of UTF-8 text behind line {rows.line_num} ({error})."
                f" Repair it, write the rows as JSON lines, or set data.format = 'text' to train on its characters"
            ) from None


def saved_rows(path: Path) -> Rows:
    """Read a folder written by ``Dataset.save_to_disk`` of Hugging Face datasets; images inside it are not read."""
    dataset = _open_saved(path)
    named = json.loads((path / "dataset_info.json").read_text(encoding="utf-8")).get("features") or {}
    unread = [name for name in MEDIA_COLUMNS if name in named and name not in dataset.features]
    for begin in range(0, len(dataset), 1024):
        columns = dict(dataset[begin : begin + 1024]) | {name: [_INSIDE] * 1024 for name in unread}
        for i in range(min(1024, len(dataset) - begin)):
            yield begin + i + 1, ArrowRecord({name: values[i] for name, values in columns.items()})


def _open_saved(path: Path) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise MissingExtraError(f"the dataset {path}", "datasets", "hf") from error
    try:
        for row in json.loads((path / "state.json").read_text(encoding="utf-8"))["_data_files"]:
            inside(path, row["filename"], "state.json")
        found: Any = datasets.load_from_disk(str(path))
        json_kind = getattr(datasets, "Json", ())
        return found.remove_columns([name for name, kind in found.features.items() if _opens_files(kind, json_kind)])
    except ConfigError:
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise ConfigError(f"data.source: datasets {datasets.__version__} cannot read {path}: {why}") from error


def _opens_files(feature: Any, harmless: Any) -> bool:
    """Return whether a column is or contains media, such as images: decoding opens any file that a row names."""
    if isinstance(feature, dict):
        feature = tuple(feature.values())
    if isinstance(feature, list | tuple):
        return any(_opens_files(part, harmless) for part in feature)
    if isinstance(feature, harmless):
        return False
    return bool(getattr(feature, "decode", False)) or _opens_files(getattr(feature, "feature", ()), harmless)


RECORD_FORMATS: dict[str, RecordFormat] = {
    "jsonl": RecordFormat(json_lines, lambda path: sum(1 for _ in _lines(path))),
    "json": RecordFormat(json_list),
    "parquet": RecordFormat(parquet_rows, lambda path: _open_parquet(path).metadata.num_rows),
    "csv": RecordFormat(table_rows),
    "dataset": RecordFormat(saved_rows, lambda path: len(_open_saved(path))),
    FARMYARD: RecordFormat(farmyard, lambda path: tomllib.loads(path.read_text(encoding="utf-8"))["documents"]),
}


def _also_packed(*suffixes: str) -> frozenset[str]:
    return frozenset(suffix + packed for suffix in suffixes for packed in ("", *UNPACKED, ".zst"))


SUFFIXES = {
    "jsonl": _also_packed(".jsonl", ".ndjson"),
    "json": _also_packed(".json"),
    "csv": _also_packed(".csv", ".tsv"),
    "parquet": frozenset({".parquet", ".pq"}),
    "npy": frozenset({".npy"}),
    "bin": frozenset({".bin"}),
    "megatron": frozenset({".idx"}),
}
"""File suffixes of each format; text has its own list (``listing.TEXT_SUFFIXES``), and a saved dataset is a folder."""


def suffix_of(path: Path) -> str:
    """Return the suffix in lower case; for that of a packed file, together with the suffix before it."""
    suffixes = [suffix.lower() for suffix in path.suffixes[-2:]]
    return "".join(suffixes) if suffixes[-1:] and suffixes[-1] in (*UNPACKED, ".zst") else "".join(suffixes[-1:])


def is_saved_dataset(path: Path) -> bool:
    """Return whether ``path`` is the folder of one saved dataset.

    Raises:
        ConfigError: the folder holds a dataset for each of several splits.
    """
    splits = path / "dataset_dict.json"
    if splits.is_file():
        try:
            names = [str(name) for name in json.loads(inside(path, splits.name).read_text(encoding="utf-8"))["splits"]]
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise ConfigError(
                f"data.source: {splits} does not list the splits of a dataset ({type(error).__name__}: {error})"
            ) from None
        like = path / (names or ["train"])[0]
        raise ConfigError(
            f"data.source: {path} holds a dataset for each of {', '.join(names)}: name the one to train on, like {like}"
        )
    return path.is_dir() and (path / "state.json").is_file() and (path / "dataset_info.json").is_file()


def first_record(paths: Sequence[Path], format: str) -> Record:
    """Return the first usable row of several files; a column that is null there, as the next rows have it.

    Raises:
        ConfigError: there is none.
    """
    problem: BadRow | None = None
    found: Record | None = None
    rows = (record for path in paths for _, record in RECORD_FORMATS[format].records(path))
    for number, record in enumerate(rows):
        if isinstance(record, BadRow):
            problem = problem or record
        elif found is None:
            found = dict(record)
        else:
            found |= {name: record.get(name) for name, value in found.items() if value is None}
        if found is not None and (number >= _SAMPLED or all(value is not None for value in found.values())):
            break
    if found is None:
        raise problem or ConfigError(f"data.source: {', '.join(map(str, paths[:3]))} holds no records")
    return found


_SAMPLED = 1000
"""Rows that are looked at for the values of columns that are null in the first."""


def digest_of_bytes(data: bytes) -> str:
    """Return a blake2b digest, 32 hex digits."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def digest_of(path: Path) -> str:
    """Return the blake2b digest of a file, or of all files of a folder with their names; 32 hex digits."""
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        if path.is_dir():
            digest.update(file.relative_to(path).as_posix().encode() + b"\0")
        with open(file, "rb") as opened:
            while block := opened.read(1 << 22):
                digest.update(block)
    return digest.hexdigest()
