"""Count and read records of each file format, a few at a time."""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from meshwright.core.errors import ConfigError, MissingExtraError
from meshwright.core.files import inside
from meshwright.data.options import FARMYARD

from .farmyard import Farmyard
from .json_files import UNPACKED, JsonLines, JsonList, opened
from .records import MEDIA_COLUMNS, BadRow, Record, RecordFormat

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


class Parquet:
    """A Parquet file, read in batches of rows (needs pyarrow, which the extra hf installs)."""

    def count(self, path: Path) -> int:
        return self._open(path).metadata.num_rows

    def records(self, path: Path) -> Iterator[tuple[int, Record | BadRow]]:
        number = 0
        for batch in self._open(path).iter_batches(batch_size=1024):
            for record in batch.to_pylist():
                number += 1
                yield number, ArrowRecord(record)

    def _open(self, path: Path):
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


class Table:
    """A CSV file (RFC 4180) or, by its suffix, one of tab-separated values; its first row names the columns.

    All values are text, empty ones too; a row's number is its place below the first row.
    """

    def count(self, path: Path) -> int:
        return sum(1 for _ in self.records(path))

    def records(self, path: Path) -> Iterator[tuple[int, Record | BadRow]]:
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
                    else:
                        yield (
                            number,
                            BadRow(
                                f"{path}, row {number} (up to line {rows.line_num}) has {len(row)} values, and the"
                                f" first row names {len(names)} columns"
                            ),
                        )
            except (csv.Error, UnicodeDecodeError) as error:
                raise ConfigError(
                    f"data.source: {path} is no table of UTF-8 text behind line {rows.line_num} ({error})."
                    f" Repair it, write the rows as JSON lines, or set data.format = 'text' to train on its characters"
                ) from None


class SavedDataset:
    """A folder written by ``Dataset.save_to_disk`` of Hugging Face datasets."""

    def count(self, path: Path) -> int:
        return len(self._open(path))

    def records(self, path: Path) -> Iterator[tuple[int, Record | BadRow]]:
        dataset = self._open(path)
        for begin in range(0, len(dataset), 1024):
            columns = dict(dataset[begin : begin + 1024])
            columns |= {name: [_INSIDE] * 1024 for name in self._images(path)}
            for i in range(min(1024, len(dataset) - begin)):
                yield begin + i + 1, ArrowRecord({name: values[i] for name, values in columns.items()})

    def _images(self, path: Path) -> tuple[str, ...]:
        """Return the columns that name images in records, and hold them here, where they are not read."""
        kept = set(self._open(path).features)
        names = json.loads((path / "dataset_info.json").read_text(encoding="utf-8")).get("features") or {}
        return tuple(name for name in MEDIA_COLUMNS if name in names and name not in kept)

    def _open(self, path: Path) -> Any:
        try:
            import datasets
        except ImportError as error:
            raise MissingExtraError(f"the dataset {path}", "datasets", "hf") from error
        try:
            for row in json.loads((path / "state.json").read_text(encoding="utf-8"))["_data_files"]:
                inside(path, row["filename"], "state.json")
            found: Any = datasets.load_from_disk(str(path))
            return found.remove_columns(
                [
                    name
                    for name, feature in found.features.items()
                    if _opens_files(feature, getattr(datasets, "Json", ()))
                ]
            )
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
    "jsonl": JsonLines(),
    "json": JsonList(),
    "parquet": Parquet(),
    "csv": Table(),
    "dataset": SavedDataset(),
    FARMYARD: Farmyard(),
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
        raise ConfigError(
            f"data.source: {path} holds a dataset for each of {', '.join(names)}: name the one to train on, like"
            f" {path / (names or ['train'])[0]}"
        )
    return path.is_dir() and (path / "state.json").is_file() and (path / "dataset_info.json").is_file()


def first_record(paths: Sequence[Path], format: str) -> Record:
    """Return the first usable row of several files. Raises ConfigError if there is none."""
    problem: BadRow | None = None
    for path in paths:
        for _, record in RECORD_FORMATS[format].records(path):
            if not isinstance(record, BadRow):
                return record
            problem = problem or record
    raise problem or ConfigError(f"data.source: {', '.join(map(str, paths[:3]))} holds no records")


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
