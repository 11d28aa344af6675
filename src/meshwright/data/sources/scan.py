"""Turn the files and folders that a user names into a sorted list of files, each read once and checked."""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from meshwright.core.errors import ConfigError, IntegrityError
from meshwright.core.files import replace_text
from meshwright.data.options import FARMYARD, STDLIB

from .formats import RECORD_FORMATS, digest_of
from .listing import TOKEN_FORMATS, list_files, unreadable

_SETTLED_SEC = 2.0
"""A file changed more recently than this may change again within the resolution of its time stamp."""


@dataclass(frozen=True)
class SourceFile:
    """One file of a source (for a saved dataset, its folder).

    ``name`` is its path relative to its source (with ``/``), which does not change when the source is moved.
    ``digest`` is the blake2b digest of its bytes, 32 hex digits. ``n_records`` is its number of rows; a text file is
    one record.
    """

    name: str
    path: Path
    n_bytes: int
    digest: str
    n_records: int = 1

    def read(self) -> str:
        """Return the text of a text file, without translating line ends.

        Raises:
            IntegrityError: the file is gone, or changed since the scan.
        """
        try:
            data = self.path.read_bytes()
        except OSError as error:
            raise IntegrityError(
                f"{self.path} could be read a moment ago, and cannot be now ({error.strerror}): start again"
            ) from error
        if _digest(data) != self.digest:
            raise self.changed(len(data))
        return data.decode("utf-8")

    def text(self) -> str:
        """Return the present text of a text file, even if it changed since the scan.

        Raises:
            ConfigError: the file is not UTF-8.
        """
        data = self.path.read_bytes()
        if problem := _utf8_problem(data):
            raise ConfigError(_undecodable(self.path, problem))
        return data.decode("utf-8")

    def changed(self, n_bytes: int) -> IntegrityError:
        """Return the error for a file that changed since the scan."""
        return IntegrityError(
            f"{self.path} changed while the corpus was being made ({self.n_bytes} bytes before, {n_bytes} now): start"
            f" again"
        )


@dataclass(frozen=True)
class Scan:
    """The files of the sources, and the numbers of files passed over."""

    files: tuple[SourceFile, ...]
    """At least one; sources in the given order, files of one source sorted by name."""
    format: str = "text"
    """Format of all files; see SourceOptions."""
    n_empty: int = 0
    """Number of files of 0 bytes."""
    n_other: int = 0
    """Number of files in folders that have another format."""
    n_repeated: int = 0
    """Number of files that an earlier source or another link already includes."""
    n_undecodable: int = 0
    """Number of files of the standard library that are not UTF-8 (elsewhere such a file is an error)."""

    @property
    def n_bytes(self) -> int:
        return sum(file.n_bytes for file in self.files)

    def __str__(self) -> str:
        if self.format == FARMYARD:
            return f"{sum(file.n_records for file in self.files)} documents about animals"
        notes = (
            (self.n_empty, "empty"),
            (self.n_other, "not text"),
            (self.n_repeated, "named twice"),
            (self.n_undecodable, "not UTF-8"),
        )
        if self.format != "text":
            notes = ((self.n_empty, "empty"), (self.n_other, f"not {self.format}"), (self.n_repeated, "named twice"))
        passed_over = ", ".join(f"{count} {why}" for count, why in notes if count)
        what = f"{len(self.files)} documents"
        if self.format in RECORD_FORMATS:
            what = f"{sum(file.n_records for file in self.files)} rows in {len(self.files)} {self.format} files"
        elif self.format in TOKEN_FORMATS:
            what = f"{len(self.files)} {self.format} files of token ids"
        return f"{what}, {self.n_bytes} bytes" + (f" (passed over: {passed_over})" if passed_over else "")


def list_sources(sources: str | Sequence[str], format: str = "auto") -> Scan:
    """List the files that ``scan_sources`` would read, without digests and row counts.

    Raises:
        ConfigError: a problem listed under ``scan_sources`` that names and sizes show.
    """
    listed, found, n_other = list_files((sources,) if isinstance(sources, str) else tuple(sources), format)
    files = tuple(file for _, name, path in listed if (file := SourceFile(name, path, _size(path), "", 0)).n_bytes)
    if not files:
        raise _nothing(listed)
    return Scan(files, found, n_other=n_other)


def scan_sources(sources: str | Sequence[str], format: str = "auto", memory: Path | None = None) -> Scan:
    """Read every file of ``sources`` once, for its size, digest and row count; check that text is UTF-8.

    Each source is a file, a folder (searched recursively for files of the format, following links inside it, without
    names that begin with a dot), or the word ``stdlib``: the ``*.py`` files of the running Python's standard library,
    without its tests and installed packages; or ``farmyard``, the demo's text (name a folder of that name as
    ``./stdlib``).

    Args:
        format: see SourceOptions; "auto" decides by suffix, and treats a file of unknown suffix, if named itself, as
            text.
        memory: folder that caches scans; files whose sizes and time stamps have not changed are not read again.

    Raises:
        ConfigError: no source; a path that does not exist or cannot be read; a folder without a file of the format,
            or with several formats; sources of different formats; text that is not UTF-8; only empty files.
    """
    listed, found, n_other = list_files((sources,) if isinstance(sources, str) else tuple(sources), format)
    known = memory and _memory_of(listed, found, memory)
    if known and known.is_file() and (remembered := _recall(known)):
        return remembered
    scan = _read_all(listed, found, n_other)
    if known:
        # only a cache: if its folder cannot be written, the code that needs the folder reports it
        with contextlib.suppress(OSError):
            known.parent.mkdir(parents=True, exist_ok=True)
            replace_text(known, json.dumps(asdict(scan), default=str))
    return scan


def _read_all(listed: list[tuple[str, str, Path]], format: str, n_other: int) -> Scan:
    files: list[SourceFile] = []
    seen: set[Path] = set()
    counts = {"n_empty": 0, "n_repeated": 0, "n_undecodable": 0}
    for source, name, path in listed:
        real = path.resolve()
        if real in seen:
            counts["n_repeated"] += 1
            continue
        seen.add(real)
        try:
            file, trouble = (
                _read_text(name, path, source) if format == "text" else (_read_other(name, path, format), "")
            )
        except OSError as error:
            raise unreadable(source, error) from error
        if trouble or not file.n_bytes:
            counts[trouble or "n_empty"] += 1
        else:
            files.append(file)
    if not files:
        raise _nothing(listed)
    return Scan(tuple(files), format, n_other=n_other, **counts)


def _nothing(listed: list[tuple[str, str, Path]]) -> ConfigError:
    sources = list(dict.fromkeys(source for source, _, _ in listed))
    return ConfigError(f"data.source = {sources}: {len(listed)} files, all of 0 bytes. Name files that hold text")


def _read_text(name: str, path: Path, source: str) -> tuple[SourceFile, str]:
    """Return the file, and the name of the count to raise if it is passed over, else an empty string."""
    data = path.read_bytes()
    problem = _utf8_problem(data)
    if problem and source != STDLIB:
        raise ConfigError(_undecodable(path, problem))
    return SourceFile(name, path, len(data), _digest(data)), "n_undecodable" if problem else ""


def _read_other(name: str, path: Path, format: str) -> SourceFile:
    size = _size(path)
    if not size or format in TOKEN_FORMATS:  # ids are read and checked once, when they are indexed
        return SourceFile(name, path, size, "")
    return SourceFile(name, path, size, digest_of(path), RECORD_FORMATS[format].count(path))


def _size(path: Path) -> int:
    return sum(p.stat().st_size for p in path.rglob("*") if p.is_file()) if path.is_dir() else path.stat().st_size


def _memory_of(listed: list[tuple[str, str, Path]], format: str, folder: Path) -> Path | None:
    """Return the path of the cached scan of these files in their present state; None if one changed just now."""
    facts: list[object] = [format, "scan 2"]
    for source, name, path in listed:
        for each in sorted(path.rglob("*")) if path.is_dir() else [path]:
            try:
                status = each.stat()
            except OSError as error:
                raise unreadable(source, error) from error
            if abs(time.time() - status.st_mtime) < _SETTLED_SEC:
                return None
            facts.append(
                [source == STDLIB, name, str(each.absolute()), status.st_size, status.st_mtime_ns, status.st_ino]
            )
    return folder / f"scan-{_digest(json.dumps(facts).encode('utf-8', 'surrogateescape'))}.json"


def _recall(path: Path) -> Scan | None:
    try:
        values = json.loads(path.read_text())
        files = tuple(SourceFile(**{**file, "path": Path(file["path"])}) for file in values.pop("files"))
        return Scan(files, **values)
    except (OSError, ValueError, TypeError, KeyError):
        return None  # the scan is repeated


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _utf8_problem(data: bytes) -> UnicodeDecodeError | None:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        return error
    return None


def _undecodable(path: Path, problem: UnicodeDecodeError) -> str:
    return (
        f"data.source: {path} is not UTF-8: byte {problem.object[problem.start]:#04x} at offset {problem.start}"
        f" ({problem.reason}). Convert the file (for example: iconv -f latin1 -t utf-8 {path.name}), or leave it out"
        f" of the sources"
    )
