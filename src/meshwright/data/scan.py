"""Turn the files and folders that a user names into a sorted list of files, each read once and checked."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sysconfig
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from shlex import quote

from meshwright.core.errors import ConfigError, IntegrityError, nearest
from meshwright.core.files import inside, refuse_links_out, refuse_pointer, replace_text

from .formats import (
    FARMYARD_FILE,
    RECORD_FORMATS,
    SUFFIXES,
    UNPACKED,
    digest_of,
    digest_of_bytes,
    is_saved_dataset,
    suffix_of,
)
from .options import BUILT_IN, FARMYARD, STDLIB

CARD = "README.md"
_ABOUT = re.compile(r"(readme|licen[cs]e|citation|notice|changelog|contributing)\b.*", re.IGNORECASE)
_DESCRIPTIONS = frozenset({"dataset_info.json", "dataset_infos.json", "dataset_dict.json"})
_SPLITS = {
    "train": "train",
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "test": "test",
    "testing": "test",
    "eval": "test",
    "evaluation": "test",
}
"""The words in names of files and folders that stand for a split, as the hub reads them."""
_SUBSET = re.compile(r"^\s*-?\s*config_name:\s*(.+?)\s*$", re.MULTILINE)


_NAME = re.compile(r"(?P<owner>\w[\w.-]*)/(?P<name>\w[\w.-]*)(?:/(?P<rest>[^/].*?))?/?")
"""A name on the hub, and what is named behind it."""
_ENDINGS = (".txt", ".md", ".py", ".jsonl", ".json", ".ndjson", ".gz", ".parquet", ".npy", ".bin", ".toml", ".csv")
"""Endings of files: whoever names one that is missing did not mean the hub."""


def is_about(name: str) -> bool:
    """Return whether a file describes the records beside it, by its name."""
    return _ABOUT.fullmatch(name) is not None or name in _DESCRIPTIONS


def split_of(name: str) -> str:
    """Return the split that a file belongs to, by the last word of its path that stands for one; "" without one."""
    words = re.split(r"[^a-z]+", name.lower())
    return next((_SPLITS[word] for word in reversed(words) if word in _SPLITS), "")


def is_split(name: str) -> bool:
    return name.lower() in _SPLITS


def of_split(files: list[tuple[str, Path]], split: str, root: Path) -> list[tuple[str, Path]]:
    """Return the files of a split. With "" all of them, if they are of one.

    Raises:
        ConfigError: the folder has no such split, or its files are of several splits or subsets, and none is named.
    """
    splits = Counter(split_of(name) for name, _ in files)
    named = ", ".join(f"{name} ({count} files)" for name, count in sorted(splits.items()) if name)
    if split:
        if chosen := [(name, path) for name, path in files if split_of(name) == _SPLITS[split.lower()]]:
            return chosen
        raise ConfigError(
            f"data.source: {root / split} does not exist, and the folder {root} has no split of this name. By the names"
            f" of its files it has: {named or 'none'}"
        )
    if len(set(splits) - {""}) > 1:
        first = "train" if splits["train"] else min(set(splits) - {""})
        raise ConfigError(
            f"data.source: the folder {root} holds the splits {named}: name the one to train on, like {root / first}"
        )
    try:
        card = (root / CARD).read_text(encoding="utf-8", errors="replace")
    except OSError:
        card = ""
    front = card[3:].partition("\n---")[0] if card.startswith("---") else ""
    subsets = list(dict.fromkeys(_SUBSET.findall(front)))
    if len(subsets) > 1:
        raise ConfigError(
            f"data.source: {root / CARD} lists the subsets {', '.join(subsets)}, which may differ in their columns:"
            f" name the folder or the files of one in data.source"
        )
    return files


def cache() -> Path:
    """Return the folder in which the hub's client keeps what it downloaded, as its environment variables say."""
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache/huggingface").expanduser()
    return Path(os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or home / "hub").expanduser()


def in_cache(source: str) -> Path | None:
    """Return the place of ``owner/name``, or of a folder, file or split behind it, in the hub's cache, if it is there.

    The snapshot is that of the branch ``main``, or where the cache does not say which that is, the newest.
    """
    if (found := _NAME.fullmatch(source)) is None:
        return None
    place = _folder_of(found["owner"], found["name"])
    snapshots = sorted((place / "snapshots").glob("*/"), key=lambda path: path.stat().st_mtime)
    if not snapshots:
        return None
    snapshot = snapshots[-1]
    try:
        named = place / "snapshots" / (place / "refs/main").read_text(encoding="utf-8").strip()
        snapshot = named if named in snapshots else snapshot
    except (OSError, ValueError):
        pass
    return inside(snapshot, found["rest"]) if found["rest"] else snapshot


def absence(source: str) -> str:
    """Say where a name of the hub was looked for, and how to get it; "" for a source that is no such name."""
    if (found := _NAME.fullmatch(source)) is None or source.endswith(_ENDINGS):
        return ""
    name = f"{found['owner']}/{found['name']}"
    held = [path.name.removeprefix("datasets--").replace("--", "/", 1) for path in cache().glob("datasets--*--*")]
    return (
        f" As a data set of the hub it was looked for in {_folder_of(found['owner'], found['name'])}, and is not"
        f" there.{nearest(name, held)} Nothing is downloaded: fetch it with 'hf download --repo-type dataset {name}',"
        f" and name it so again."
    )


def _folder_of(owner: str, name: str) -> Path:
    return cache() / f"datasets--{owner}--{name}"


# --- list the files that a user names, with their formats

_WORDS = " or ".join(f"'{word}'" for word in BUILT_IN)

_PROSE = frozenset({".txt", ".text", ".md", ".rst", ".org", ".tex"})
_CODE = frozenset(".py .pyi .c .h .cc .cpp .hpp .cu .cuh .java .js .ts .go .rs .jl .r .sh .sql".split())
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
        place, split, path = source, "", Path(source).expanduser()
        if source not in BUILT_IN:
            if not _is_here(path) and (cached := in_cache(source)) is not None:
                place, path = str(cached), cached
            if is_split(path.name) and not path.exists() and path.parent.is_dir():
                place, split = str(path.parent), path.name  # a split named behind its folder
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


def is_source(source: str) -> bool:
    """Return whether a source is there: a word, a file, a folder, its split, or a data set in the hub's cache."""
    return source in BUILT_IN or _is_here(Path(source).expanduser()) or in_cache(source) is not None


def absent(source: str, words: Iterable[str] = BUILT_IN) -> str:
    """Say that a source does not exist, with the nearest of ``words`` and of the names beside it."""
    path = Path(source).expanduser()
    beside = [one.name for one in path.parent.iterdir()] if path.parent.is_dir() else []
    near = nearest(path.name, [*words, *beside])
    return f"{source!r} does not exist (looked at {path.absolute()}).{near}{absence(source)}"


def _is_here(path: Path) -> bool:
    """Return whether a path is a file or folder, or names a split behind a folder."""
    return path.exists() or (is_split(path.name) and path.parent.is_dir())


_PACKED = {
    b"\x1f\x8b": ("a gzip file", "gunzip -k"),
    b"BZh": ("a bzip2 file", "bunzip2 -k"),
    b"\xfd7zXZ\x00": ("an xz file", "unxz -k"),
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
                f"data.source: {path} is {encoding.upper()} text, and UTF-8 is read: {_in_utf8(path, encoding)}"
            )
        kind, unpack = next((what for begin, what in _PACKED.items() if head.startswith(begin)), ("", ""))
        if kind and (format == "text" or path.suffix.lower() not in UNPACKED):
            raise ConfigError(
                f"data.source: {path} is {kind}, and is read unpacked: {unpack} {quote(str(path))} (JSON lines, lists"
                f" and tables are also read as {' '.join(UNPACKED)})"
            )


def _format_of(source: str, wanted: str) -> str:
    """Return the format of one source."""
    if source in BUILT_IN:
        if wanted not in ("auto", "text"):
            raise ConfigError(f"data.format = '{wanted}': '{source}' is text")
        return "text" if source == STDLIB else source
    path = Path(source).expanduser()
    if not source.strip() or not path.exists():
        raise ConfigError(
            f"data.source: {absent(source)} Name a file, a folder, or {_WORDS}; patterns such as *.txt are not expanded"
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
        return [(source, FARMYARD_FILE)], 0
    root = Path(source).expanduser().absolute()  # cached scans must be valid in every working folder
    if format == "dataset":
        refuse_links_out(root)
    if not root.is_dir() or format == "dataset":
        return [(root.name, root.with_suffix(".idx") if format == "megatron" else root)], 0
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


# --- turn the files and folders that a user names into a sorted list of files, each read once and checked

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
        if digest_of_bytes(data) != self.digest:
            raise self.changed(len(data))
        return data.decode("utf-8-sig")

    def text(self) -> str:
        """Return the present text of a text file, even if it changed since the scan.

        Raises:
            ConfigError: the file is not UTF-8.
        """
        data = self.path.read_bytes()
        if refusal := _undecodable(self.path, data):
            raise refusal
        return data.decode("utf-8-sig")

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
            (self.n_other, f"not {self.format}"),
            (self.n_repeated, "named twice"),
            (self.n_undecodable, "not UTF-8"),
        )
        passed_over = ", ".join(f"{count} {why}" for count, why in notes if count)
        what = f"{len(self.files)} documents"
        if self.format in RECORD_FORMATS:
            what = f"{sum(file.n_records for file in self.files)} rows in {self._n_files}"
        elif self.format in TOKEN_FORMATS:
            what = f"{self._n_files} of token ids"
        return f"{what}, {self.n_bytes} bytes" + (f" (passed over: {passed_over})" if passed_over else "")

    @property
    def _n_files(self) -> str:
        return f"{len(self.files)} {self.format} file{'s'[: len(self.files) - 1]}"


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
    if known and known.is_file():
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):  # else the scan is repeated
            values = json.loads(known.read_text())
            remembered = tuple(SourceFile(**{**file, "path": Path(file["path"])}) for file in values.pop("files"))
            return Scan(remembered, **values)
    files: list[SourceFile] = []
    seen: set[Path] = set()
    counts = {"n_empty": 0, "n_repeated": 0, "n_undecodable": 0}
    for source, name, path in listed:
        real, refusal = path.resolve(), None
        if real in seen:
            counts["n_repeated"] += 1
            continue
        seen.add(real)
        try:
            if found == "text":
                data = path.read_bytes()
                file, refusal = SourceFile(name, path, len(data), digest_of_bytes(data)), _undecodable(path, data)
            elif (size := _size(path)) and found not in TOKEN_FORMATS:
                file = SourceFile(name, path, size, digest_of(path), RECORD_FORMATS[found].count(path))
            else:  # ids are read and checked once, when they are indexed
                file = SourceFile(name, path, size, "")
        except OSError as error:
            raise unreadable(source, error) from error
        if refusal and source != STDLIB:
            raise refusal
        if refusal or not file.n_bytes:
            counts["n_undecodable" if refusal else "n_empty"] += 1
        else:
            files.append(file)
    if not files:
        raise _nothing(listed)
    scan = Scan(tuple(files), found, n_other=n_other, **counts)
    if known:
        # only a cache: if its folder cannot be written, the code that needs the folder reports it
        with contextlib.suppress(OSError):
            known.parent.mkdir(parents=True, exist_ok=True)
            replace_text(known, json.dumps(asdict(scan), default=str))
    return scan


def _nothing(listed: list[tuple[str, str, Path]]) -> ConfigError:
    sources = list(dict.fromkeys(source for source, _, _ in listed))
    return ConfigError(f"data.source = {sources}: {len(listed)} files, all of 0 bytes. Name files that hold text")


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
    return folder / f"scan-{digest_of_bytes(json.dumps(facts).encode('utf-8', 'surrogateescape'))}.json"


def _undecodable(path: Path, data: bytes) -> ConfigError | None:
    """Return the refusal of a file that is not UTF-8."""
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as problem:
        return ConfigError(
            f"data.source: {path} is not UTF-8: byte {data[problem.start]:#04x} at offset {problem.start}"
            f" ({problem.reason}). If it is latin1, {_in_utf8(path, 'latin1')}, or leave it out of the sources. Text"
            f" has no rows, so data.on_bad_row says nothing of it"
        )
    return None


def _in_utf8(path: Path, encoding: str) -> str:
    """Return how to write a text in UTF-8 beside it."""
    old, new = (quote(str(one)) for one in (path, path.with_name(f"utf8-{path.name}")))
    return f"write it into a new file (iconv -f {encoding} -t utf-8 {old} > {new}) and name that one"
