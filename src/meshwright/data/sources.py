"""Sources: the files and folders that a user names become a sorted list of documents, read once and checked."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshwright.core.errors import ConfigError, IntegrityError, nearest

STDLIB = "stdlib"
"""The word that stands for the source code of the running Python's own standard library."""

_PROSE = frozenset({".txt", ".text", ".md", ".rst", ".org", ".tex"})
_CODE = frozenset(
    {".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".cuh", ".java", ".js", ".ts", ".go", ".rs", ".jl", ".r", ".sh", ".sql"}
)
TEXT_SUFFIXES = _PROSE | _CODE
"""What a folder is searched for (upper and lower case alike). JSON lines and Parquet hold records, not text, and are not among them."""

_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


@dataclass(frozen=True)
class Document:
    """One text file.

    ``name`` is its path below the source that it came from (with ``/``), which does not change when the source is moved.
    ``digest`` is the blake2b of its bytes, 32 hex digits.
    """

    name: str
    path: Path
    n_bytes: int
    digest: str

    def read(self) -> str:
        """The text, without any translation of line ends.

        Raises:
            IntegrityError: the file is gone, or not what it was when it was scanned.
        """
        try:
            data = self.path.read_bytes()
        except OSError as error:
            raise IntegrityError(f"{self.path} could be read a moment ago, and cannot be now ({error.strerror}): start again") from error
        if _digest(data) != self.digest:
            raise IntegrityError(
                f"{self.path} changed while the corpus was being made ({self.n_bytes} bytes before, {len(data)} now): start again"
            )
        return data.decode("utf-8")


@dataclass(frozen=True)
class Scan:
    """What the sources hold, and what was passed over."""

    documents: tuple[Document, ...]
    """Not empty; sources in the order given, files of one source sorted by name."""
    n_empty: int = 0
    """Files of 0 bytes."""
    n_other: int = 0
    """Files in folders whose suffix is not one of text."""
    n_repeated: int = 0
    """Files that an earlier source, or another link, had already brought in; each counts once."""
    n_undecodable: int = 0
    """Files of the standard library that are not UTF-8 (elsewhere such a file is an error)."""

    @property
    def n_bytes(self) -> int:
        return sum(document.n_bytes for document in self.documents)

    def __str__(self) -> str:
        notes = ((self.n_empty, "empty"), (self.n_other, "not text"), (self.n_repeated, "named twice"), (self.n_undecodable, "not UTF-8"))
        passed_over = ", ".join(f"{count} {why}" for count, why in notes if count)
        return f"{len(self.documents)} documents, {self.n_bytes} bytes" + (f" (passed over: {passed_over})" if passed_over else "")


def scan_sources(sources: str | Sequence[str]) -> Scan:
    """Read every file of ``sources`` once: its size, its digest, and whether it is UTF-8.

    Each source is a file (taken whatever its suffix), a folder (searched recursively for TEXT_SUFFIXES, links followed; names
    that begin with a dot are left out), or the word ``stdlib``: the ``*.py`` of the running Python's standard library without
    its tests and without installed packages (a folder of that name is ``./stdlib``). A file is one document, read whole.

    Raises:
        ConfigError: no source; a path that does not exist or cannot be read; a folder without text; bytes that are not UTF-8;
            nothing but empty files.
    """
    sources = (sources,) if isinstance(sources, str) else tuple(sources)
    if not sources:
        raise ConfigError(f"data.source is empty: name at least one text file or folder, or '{STDLIB}'")
    documents: list[Document] = []
    seen: set[Path] = set()
    counts = {"n_empty": 0, "n_other": 0, "n_repeated": 0, "n_undecodable": 0}
    for source in sources:
        names, n_other = _list_files(source)
        counts["n_other"] += n_other
        for name, path in names:
            real = path.resolve()
            if real in seen:
                counts["n_repeated"] += 1
                continue
            seen.add(real)
            data = _read(path, source)
            problem = _utf8_problem(data)
            if problem and source != STDLIB:
                raise ConfigError(_undecodable(path, problem))
            if problem or not data:
                counts["n_undecodable" if problem else "n_empty"] += 1
                continue
            documents.append(Document(name, path, len(data), _digest(data)))
    if not documents:
        raise ConfigError(f"data.source = {list(sources)}: {len(seen)} files, all of 0 bytes. Name files that hold text")
    return Scan(tuple(documents), **counts)


def _list_files(source: str) -> tuple[list[tuple[str, Path]], int]:
    """(name, path) of the files of one source, sorted by name, and how many files of other suffixes there were."""
    if source == STDLIB:
        root, suffixes, left_out = Path(sysconfig.get_path("stdlib")), frozenset({".py"}), _NOT_LIBRARY
    else:
        root, suffixes, left_out = Path(source).expanduser(), TEXT_SUFFIXES, frozenset({"__pycache__"})
        if not source.strip() or not root.exists():
            raise ConfigError(
                f"data.source: {source!r} does not exist (looked at {root.absolute()}).{nearest(source, [STDLIB])}"
                f" Name a text file, a folder, or '{STDLIB}'; patterns such as *.txt are not expanded"
            )
        if not root.is_dir():
            return [(root.name, root)], 0
    every = [(path.relative_to(root).as_posix(), path) for path in _walk(root, left_out, source)]
    chosen = sorted((name, path) for name, path in every if path.suffix.lower() in suffixes)
    if not chosen:
        raise ConfigError(
            f"data.source: the folder {root} holds no text file ({len(every)} files of other kinds)."
            f" In a folder these are taken: {' '.join(sorted(suffixes))}; a file of another kind is taken when you name it itself"
        )
    return chosen, 0 if source == STDLIB else len(every) - len(chosen)


def _walk(root: Path, left_out: Iterable[str], source: str) -> Iterator[Path]:
    """Every file below ``root``; links to folders are followed, each real folder once (links can form a circle)."""

    def fail(error: OSError):
        raise _unreadable(source, error) from error

    visited: set[tuple[int, int]] = set()
    for folder, subfolders, files in os.walk(root, followlinks=True, onerror=fail):
        status = os.stat(folder)
        if (status.st_dev, status.st_ino) in visited:
            subfolders.clear()
            continue
        visited.add((status.st_dev, status.st_ino))
        subfolders[:] = sorted(name for name in subfolders if name not in left_out and not name.startswith("."))
        yield from (Path(folder, name) for name in files if not name.startswith("."))


def _read(path: Path, source: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise _unreadable(source, error) from error


def _unreadable(source: str, error: OSError) -> ConfigError:
    return ConfigError(
        f"data.source: {source!r}: cannot read {error.filename}: {error.strerror}. Make it readable, or leave it out of the sources"
    )


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
        f"data.source: {path} is not UTF-8: byte {problem.object[problem.start]:#04x} at offset {problem.start} ({problem.reason})."
        f" Convert the file (for example: iconv -f latin1 -t utf-8 {path.name}), or leave it out of the sources"
    )
