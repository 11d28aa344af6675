"""Writing to disk so that a crash leaves the old or the new, and never a half."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def sync_folder(folder: Path) -> None:
    """Have the disk know the names in ``folder`` (fsync of a file does not)."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_text(path: Path, text: str) -> None:
    """Write a small text file, whole on disk before it has its name."""
    temporary = path.with_name(f"{path.name}.new-{os.getpid()}")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A place beside ``path`` to write a file to; when the block ends well it takes the name ``path``, else it is removed."""
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
