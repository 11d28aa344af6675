"""List the files that a user names, with their formats; of each, the first bytes alone are read."""

from __future__ import annotations

import os
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from meshwright.core.errors import ConfigError, nearest
from meshwright.core.files import inside, refuse_links_out, refuse_pointer
from meshwright.data.options import BUILT_IN, FARMYARD, STDLIB

from .farmyard import MODULE
from .formats import RECORD_FORMATS, SUFFIXES, is_saved_dataset, suffix_of
from .hub import absence, in_cache, is_about, is_split, of_split
from .json_files import UNPACKED

_WORDS = " or ".join(f"'{word}'" for word in BUILT_IN)

_PROSE = frozenset({".txt", ".text", ".md", ".rst", ".org", ".tex"})
_CODE = frozenset(
    {
        ".py",
        ".pyi",
        ".c",
        ".h",
        ".cc",
        ".cpp",
        ".hpp",
        ".cu",
        ".cuh",
        ".java",
        ".js",
        ".ts",
        ".go",
        ".rs",
        ".jl",
        ".r",
        ".sh",
        ".sql",
    }
)
TEXT_SUFFIXES = _PROSE | _CODE
"""Suffixes of files that count as text in a folder, in upper or lower case."""

TOKEN_FORMATS = ("npy", "bin", "megatron")
"""Formats that hold token ids."""

_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


def list_files(sources: tuple[str, ...], format: str) -> tuple[list[tuple[str, str, Path]], str, int]:
    """Return (source, name, path) of every file, their format, and the number of files of other formats."""
    if not sources:
        raise ConfigError(f"data.source is empty: name at least one file or folder, or {_WORDS}")
    listed, n_other = [], 0
    formats: dict[str, str] = {}
    for source in sources:
        place, split = _place_of(source)
        formats[source] = _format_of(place, format)
        names, others = _files_of(place, formats[source], split)
        if source not in BUILT_IN:
            _refuse_foreign(source, [path for _, path in names], formats[source])
        listed += [(source, name, path) for name, path in names]
        n_other += others
    if len(set(formats.values())) > 1:
        described = ", ".join(f"{source} is {found}" for source, found in formats.items())
        raise ConfigError(
            f"data.source: {described}. Sources that are read as one have one format; make each a part of data.mixture"
        )
    return listed, formats[sources[0]], n_other


def kind_of(path: Path) -> str | None:
    """Return the format that a file's suffix stands for, or None if it stands for none."""
    suffix = suffix_of(path)
    if suffix in TEXT_SUFFIXES:
        return "text"
    if suffix == ".bin" and path.with_suffix(".idx").exists():
        return "megatron"
    return next((format for format, suffixes in SUFFIXES.items() if suffix in suffixes), None)


def resolved(source: str) -> str:
    """Return a source that does not depend on the working folder, nor on what the hub's cache holds later."""
    path = Path(source).expanduser()
    if not source or source in BUILT_IN:
        return source
    found = None if _is_here(path) else in_cache(source)
    return str((found or path).absolute())


def _is_here(path: Path) -> bool:
    """Return whether a path is a file or folder, or names a split behind a folder."""
    return path.exists() or (is_split(path.name) and path.parent.is_dir())


_PACKED = {
    b"\x1f\x8b": ("a gzip file", "gunzip"),
    b"BZh": ("a bzip2 file", "bunzip2"),
    b"\xfd7zXZ\x00": ("an xz file", "unxz"),
    b"\x28\xb5\x2f\xfd": ("a zstd file", "zstd -d"),
    b"PK\x03\x04": ("a zip archive (as .xlsx and .docx are)", "unzip"),
}
"""How packed files begin, with their name and the command that unpacks them."""
_WIDE = {b"\xff\xfe\x00\x00": "utf-32", b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}
"""How texts of wider characters begin."""


def _refuse_foreign(source: str, paths: list[Path], format: str) -> None:
    """Raise ConfigError for a file that is something else than text or records, by its first bytes."""
    for path in paths:
        try:
            for file in path.rglob("*.arrow") if path.is_dir() else [path]:
                refuse_pointer(file)
            if format not in ("text", "jsonl", "json", "csv"):
                continue
            with open(path, "rb") as opened:
                head = opened.read(8)
        except OSError as error:
            raise unreadable(source, error) from error
        if encoding := next((name for begin, name in _WIDE.items() if head.startswith(begin)), ""):
            raise ConfigError(
                f"data.source: {path} is {encoding.upper()} text, and UTF-8 is read: iconv -f {encoding} -t utf-8"
                f" {path.name} > utf8-{path.name}"
            )
        kind, unpack = next((what for begin, what in _PACKED.items() if head.startswith(begin)), ("", ""))
        if kind and (format == "text" or path.suffix.lower() not in UNPACKED):
            raise ConfigError(
                f"data.source: {path} is {kind}, and is read unpacked: {unpack} {path.name} (JSON lines, lists and"
                f" tables are also read as {' '.join(UNPACKED)})"
            )


def _place_of(source: str) -> tuple[str, str]:
    """Return the file or folder of a source and, where it is the name of a split behind a folder's, the split."""
    path = Path(source).expanduser()
    if source in BUILT_IN:
        return source, ""
    if not _is_here(path) and (found := in_cache(source)) is not None:
        path, source = found, str(found)
    if is_split(path.name) and not path.exists() and path.parent.is_dir():
        return str(path.parent), path.name
    return source, ""


def _format_of(source: str, wanted: str) -> str:
    """Return the format of one source."""
    if source in BUILT_IN:
        if wanted not in ("auto", "text"):
            raise ConfigError(f"data.format = '{wanted}': '{source}' is text")
        return "text" if source == STDLIB else source
    path = Path(source).expanduser()
    if not source.strip() or not path.exists():
        raise ConfigError(
            f"data.source: {source!r} does not exist (looked at {path.absolute()}).{nearest(source, BUILT_IN)}"
            f"{absence(source)} Name a file, a folder, or {_WORDS}; patterns such as *.txt are not expanded"
        )
    if wanted != "auto":
        return wanted
    if not path.is_dir():
        return kind_of(path) or "text"
    if is_saved_dataset(path):
        return "dataset"
    files = list(_walk(path, frozenset({"__pycache__"}), source))
    kinds = _kinds(files)
    if RECORD_FORMATS.keys() & kinds.keys():
        kinds = _kinds([file for file in files if not is_about(file.name)])
    if len(kinds) > 1:
        kinds.pop("json", None)  # settings, beside what is meant
    if len(kinds) > 1:
        counts = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
        raise ConfigError(
            f"data.source: the folder {path} holds files of several formats ({counts}): say which with data.format, or"
            f" name files"
        )
    return next(iter(kinds), "text")


def _kinds(files: Iterable[Path]) -> Counter[str]:
    return Counter(kind for file in files if (kind := kind_of(file)))


def _files_of(source: str, format: str, split: str) -> tuple[list[tuple[str, Path]], int]:
    """Return (name, path) of the files of one source, sorted by name, and the number of files passed over."""
    if source == STDLIB:
        root = Path(sysconfig.get_path("stdlib"))
        files = [
            (path.relative_to(root).as_posix(), path)
            for path in _walk(root, _NOT_LIBRARY, source)
            if path.suffix == ".py"
        ]
        return sorted(files), 0
    if source == FARMYARD:
        return [(source, MODULE)], 0
    root = Path(source).expanduser().absolute()  # cached scans must be valid in every working folder
    if format == "dataset":
        refuse_links_out(root)
    if not root.is_dir() or format == "dataset":
        return [(root.name, _index_of(root) if format == "megatron" else root)], 0
    every = [(path.relative_to(root).as_posix(), path) for path in _walk(root, frozenset({"__pycache__"}), source)]
    suffixes = TEXT_SUFFIXES if format == "text" else SUFFIXES[format]
    chosen = sorted((name, path) for name, path in every if suffix_of(path) in suffixes)
    if format == "json":
        chosen = [(name, path) for name, path in chosen if not is_about(path.name)]
    if not chosen:
        raise ConfigError(
            f"data.source: the folder {root} holds no {format} file ({len(every)} files of other kinds). From a folder,"
            f" files with these suffixes are read: {' '.join(sorted(suffixes))}; name a file of another kind itself"
        )
    if format in RECORD_FORMATS or split:
        chosen = of_split(chosen, split, root)
    return chosen, len(every) - len(chosen) - (len(chosen) if format == "megatron" else 0)


def _index_of(path: Path) -> Path:
    """Return the path of Megatron's index of a .bin file."""
    return path.with_suffix(".idx")


def _walk(root: Path, left_out: Iterable[str], source: str) -> Iterator[Path]:
    """Yield every file below ``root``; follow links to folders, but visit each folder once (links can form cycles).

    Raises:
        ConfigError: a link leads out of ``root``, or a folder cannot be read.
    """

    def fail(error: OSError):
        raise unreadable(source, error) from error

    visited: set[tuple[int, int]] = set()
    for folder, subfolders, files in os.walk(root, followlinks=True, onerror=fail):
        status = os.stat(folder)
        if (status.st_dev, status.st_ino) in visited:
            subfolders.clear()
            continue
        visited.add((status.st_dev, status.st_ino))
        subfolders[:] = sorted(name for name in subfolders if name not in left_out and not name.startswith("."))
        files = [name for name in files if not name.startswith(".")]
        for path in (Path(folder, name) for name in (*subfolders, *files)):
            if path.is_symlink() and source != STDLIB:
                _inside_source(root, path, source)
        yield from (Path(folder, name) for name in files)


def _inside_source(root: Path, path: Path, source: str) -> None:
    try:
        inside(root, path.relative_to(root).as_posix())
    except ConfigError as error:
        raise ConfigError(f"data.source: {source!r}: {error}, or name it in data.source itself") from None


def unreadable(source: str, error: OSError) -> ConfigError:
    return ConfigError(
        f"data.source: {source!r}: cannot read {error.filename}: {error.strerror}. Make it readable, or leave it out"
        f" of the sources"
    )
