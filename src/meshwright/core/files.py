"""Write files so that a crash leaves the old or the new, never a half; read none outside the given folder."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from .errors import ConfigError, IntegrityError

_POINTER = b"version https://git-lfs.github.com/spec/"
_REPOSITORY = re.compile(r"(models|datasets|spaces)--.+")
_BLOB = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


def sync_folder(folder: Path) -> None:
    """Flush the names in ``folder`` to disk (fsync of a file does not)."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_text(path: Path, text: str) -> None:
    """Write a small text file that is whole on disk before it has its name."""
    with replacing(path) as unnamed:
        unnamed.write_text(text, encoding="utf-8")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path beside ``path`` to write to; rename the file to ``path`` on success, remove it on failure."""
    temporary = path.with_name(f"{path.name}.new-{os.getpid()}")
    try:
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    finally:
        with suppress(FileNotFoundError):
            temporary.unlink()


def inside(folder: Path, name: str, by: str = "") -> Path:
    """Locate a file by a name that was read, or found, in ``folder``.

    A name that leaves the folder is refused, and so is a link to a place outside the folder, except the links of
    Hugging Face's cache from a snapshot to a blob of the same repository.

    Args:
        by: the file in ``folder`` that holds the name, for the error.

    Raises:
        ConfigError: the name or a link leads out of the folder.
    """
    path = folder / name
    if not name or not name.isprintable() or os.path.isabs(name) or ".." in Path(name).parts:
        raise ConfigError(
            f"{folder / by} names {name!r}, which is no file in {folder} and is not read: put the file there, and"
            f" name it so"
        )
    try:
        home, real = folder.resolve(), path.resolve()
    except (OSError, RuntimeError) as error:  # a circle of links
        raise ConfigError(f"{path} cannot be found: {error}") from None
    if real.is_relative_to(home) or _is_blob(home, real):
        return path
    raise ConfigError(
        f"{path} is a link to {real}, which is outside {folder} and is not read: copy the file to its place"
    )


def _is_blob(home: Path, real: Path) -> bool:
    """Return whether a file is a blob of the Hugging Face cache repository in one of whose snapshots ``home`` lies."""
    for place in (home, *home.parents):
        if place.parent.name == "snapshots":
            repository = place.parent.parent
            return (
                bool(_REPOSITORY.fullmatch(repository.name) and _BLOB.fullmatch(real.name))
                and real.parent == repository / "blobs"
            )
    return False


def refuse_links_out(folder: Path, but: Collection[str] = ()) -> None:
    """Raise ConfigError where a link leads out of the folder; folders named in ``but`` are not searched."""
    for place, folders, files in os.walk(folder):
        for name in (*folders, *files):
            if os.path.islink(path := os.path.join(place, name)):
                inside(folder, os.path.relpath(path, folder))
        folders[:] = [name for name in folders if name not in but]


def refuse_pointer(path: Path) -> None:
    """Raise ConfigError for a pointer of Git LFS, which stands in a clone in place of a file's contents."""
    with open(path, "rb") as file:
        if file.read(len(_POINTER)) == _POINTER:
            raise ConfigError(
                f"{path} is a pointer of Git LFS, and not the file itself: fetch the contents (in its repository: git"
                f" lfs install && git lfs pull)"
            )


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object that other programs wrote; raise ConfigError for a pointer of Git LFS or no whole object."""
    refuse_pointer(path)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is no JSON, or cut short ({error}): copy it again") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path} holds a {type(found).__name__}, and an object with keys was expected")
    return found


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object that meshwright wrote; IntegrityError where the file holds none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise IntegrityError(f"{path} is damaged: it is no JSON ({error})") from None
    if not isinstance(found, dict):
        raise IntegrityError(f"{path} is damaged: it holds a {type(found).__name__}, and an object was written")
    return found
