"""Read and write named files of a folder on disk, or of one that fsspec reaches (s3://, gs://, memory://). Torch-free.

A name is a path below the store's root, with slashes. A put is atomic: a reader finds the old content, the new, or
none. Nothing here is collective.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from meshwright.core.errors import ConfigError, MeshwrightError, MissingExtraError
from meshwright.core.files import inside, replacing, sync_folder

log = logging.getLogger("meshwright")
Result = TypeVar("Result")
Buffer = Any
"""Whatever shares its memory as bytes: bytes, memoryview, a contiguous array of uint8."""
ReadInto = Callable[[int, Buffer], None]
"""(place in a file, buffer to fill from there on)."""


@dataclass(frozen=True)
class LocalStore:
    """The files below a folder on disk.

    A name that leaves the folder, or a link that does, is refused.
    """

    root: Path
    portion: ClassVar[int] = 1 << 20
    """Bytes that are best read at once."""

    def __str__(self) -> str:
        return str(self.root)

    def _inside(self, name: str) -> Path:
        folder, _, file = name.rpartition("/")
        return inside(self.root / folder, file)

    def location(self, folder: str) -> Path:
        """Return the path of a folder."""
        return self.root / folder

    def where(self, name: str) -> str:
        """Return the path or address of a file, for people."""
        return str(self.root / name)

    def files(self, folder: str = "") -> dict[str, int]:
        """Map the names of the files in a folder, not in its folders, to their sizes; of no folder: {}."""
        try:
            with os.scandir(self.root / folder) as found:
                rows = [(entry.name, entry.stat()) for entry in found if entry.is_file()]
        except (FileNotFoundError, NotADirectoryError):
            return {}
        return {f"{folder}/{name}" if folder else name: about.st_size for name, about in rows}

    def size(self, name: str) -> int | None:
        """Return the bytes of a file, by asking for it alone; None: it is not there."""
        place = self.root / name
        return place.stat().st_size if place.is_file() else None

    def folders(self) -> list[str]:
        """List the names of the folders at the root."""
        return sorted(entry.name for entry in self.root.iterdir() if entry.is_dir()) if self.root.is_dir() else []

    def strangers(self, folder: str, known: re.Pattern[str]) -> str:
        """Return the name of something in a folder that has no known name, or of the folder if it is a file; or ""."""
        place = self.root / folder
        if not place.is_dir():
            return place.name if place.exists() else ""
        return next((name for name in sorted(os.listdir(place)) if not known.fullmatch(name)), "")

    def read(self, name: str, begin: int = 0, size: int = -1) -> bytes:
        """Return the bytes of a file, or a range of them. Raises FileNotFoundError, OSError."""
        with open(self._inside(name), "rb") as file:
            file.seek(begin)
            return file.read(size)

    @contextmanager
    def opened(self, name: str) -> Iterator[ReadInto]:
        """Yield a function that fills a buffer with a file's bytes from a place on; threads may share it.

        Raises:
            OSError: the file ends before the buffer is full.
        """
        descriptor = os.open(self._inside(name), os.O_RDONLY)

        def read_into(begin: int, buffer: Buffer) -> None:
            view, done = memoryview(buffer), 0
            while done < len(view):
                got = os.preadv(descriptor, [view[done:]], begin + done)
                if not got:
                    raise OSError(f"{self.where(name)} ends after {begin + done:,} bytes")
                done += got

        try:
            yield read_into
        finally:
            os.close(descriptor)

    def _in_folder(self, name: str) -> Path:
        """Return a file's path once its folder is there; a run's folder that was moved is not made again."""
        path = self.root / name
        path.parent.mkdir(parents="/" not in name or self.root.parent.is_dir(), exist_ok=True)
        return path

    def write(self, name: str, parts: Iterable[Buffer]) -> None:
        """Write a new file, one part after the other, and flush it to disk; its name may show before it is whole.

        The bytes pass the page cache by where the file system allows it: filling that takes processor time from
        training, and memory (FastPersist, https://arxiv.org/abs/2406.13768).
        """
        path = self._in_folder(name)
        sent, filling, filled = mmap.mmap(-1, ROOM), mmap.mmap(-1, ROOM), 0
        with open(path, "wb", buffering=0, opener=_past_page_cache) as opened, ThreadPoolExecutor(1) as pool:
            file, writing = opened.fileno(), Future[None]()
            writing.set_result(None)
            for part in parts:
                view = memoryview(part)
                while len(view):
                    taken = view[: ROOM - filled]
                    filling[filled : filled + len(taken)] = taken
                    view, filled = view[len(taken) :], filled + len(taken)
                    if filled == ROOM:
                        writing.result()
                        sent, filling, filled = filling, sent, 0
                        try:
                            writing = pool.submit(_write_all, file, sent, ROOM)
                        except RuntimeError:  # this process ends, and begins no threads
                            _write_all(file, sent, ROOM)
            writing.result()
            _through_page_cache(file)  # the rest is no whole number of the disk's blocks
            _write_all(file, filling, filled)
            os.fsync(file)
        sync_folder(path.parent)

    def put(self, name: str, content: bytes, *, new: bool = False) -> None:
        """Write a small file that is whole on disk before it has its name."""
        with replacing(self._in_folder(name)) as unnamed:
            unnamed.write_bytes(content)

    def remove(self, names: Iterable[str]) -> None:
        """Remove files, and the folders that they leave empty; those that are gone already are passed over."""
        places = [self.root / name for name in names]
        for place in places:
            place.unlink(missing_ok=True)
        for folder in {place.parent for place in places} - {self.root}:
            with suppress(OSError):
                folder.rmdir()


ROOM = 1 << 23
"""Bytes that are written to disk at once."""
O_DIRECT = getattr(os, "O_DIRECT", 0)
"""Flag of files whose bytes pass the page cache by; 0: the system has none."""


def _past_page_cache(path: str, flags: int) -> int:
    with suppress(OSError):  # EINVAL of a file system that cannot; any other is raised again below
        return os.open(path, flags | O_DIRECT, 0o666)
    return os.open(path, flags, 0o666)


def _through_page_cache(descriptor: int) -> None:
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~O_DIRECT)


def _write_all(descriptor: int, room: mmap.mmap, size: int) -> None:
    """Write the first bytes of memory that begins at a page."""
    with memoryview(room) as view:
        done = 0
        while done < size:
            try:
                done += os.write(descriptor, view[done:size])
            except OSError as error:
                is_past = fcntl.fcntl(descriptor, fcntl.F_GETFL) & O_DIRECT
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP) or not is_past:
                    raise
                _through_page_cache(descriptor)  # its blocks are larger than pages, or it said yes too early


TRIES = 4
"""Tries of a request to a remote store, half a second, one and two apart."""
PART = 1 << 26
"""Bytes of a part of an upload."""


@dataclass(frozen=True)
class RemoteStore:
    """The objects below an address that fsspec reaches; credentials are those of the environment.

    A name shows when its object is whole. A put of a new name fails where another job was first.
    """

    root: str
    portion: ClassVar[int] = PART

    @cached_property
    def _at(self) -> tuple[Any, str]:
        try:
            import fsspec

            files, path = fsspec.core.url_to_fs(self.root, use_listings_cache=False, skip_instance_cache=False)
        except ImportError as error:
            lacking = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs"}.get(self.root.partition(":")[0], "fsspec")
            raise MissingExtraError(self.root, lacking, "remote") from error
        except ValueError as error:
            raise ConfigError(f"{self.root} is no address that can be reached: {error}") from None
        return files, path.rstrip("/")

    def __str__(self) -> str:
        return self.root

    def location(self, folder: str) -> str:
        """Return the address of a folder."""
        return f"{self.root}/{folder}"

    def where(self, name: str) -> str:
        """Return the address of an object."""
        return f"{self.root}/{name}"

    def _try(self, name: str, action: Callable[[Any, str], Result]) -> Result:
        """Act on an object, again where the store fails in another way than that it is not there or not allowed."""
        files, path = self._at
        for attempt in range(1, TRIES + 1):
            try:
                return action(files, f"{path}/{name}" if name else path)
            except (FileNotFoundError, FileExistsError, PermissionError, NotImplementedError):
                raise
            except Exception as error:  # the back ends raise their own
                if attempt == TRIES:
                    raise OSError(
                        f"{self.where(name)} failed {TRIES} times: {type(error).__name__}: {error}"
                    ) from error
                log.warning("%s: %s; trying again (%d of %d)", self.where(name), error, attempt + 1, TRIES)
                time.sleep(0.25 * 2**attempt)
        raise AssertionError("a try returns or raises")

    def _rows(self, folder: str) -> list[dict[str, Any]]:
        try:
            return self._try(folder, lambda files, path: files.ls(path, detail=True))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise ConfigError(
                f"{self.where(folder)} cannot be listed ({type(error).__name__}: {error}): give an address that the"
                f" environment's credentials may list and read"
            ) from error

    def files(self, folder: str = "") -> dict[str, int]:
        """Map the names of the objects in a folder to their sizes; of no folder: {}."""
        found = {row["name"].rpartition("/")[2]: row["size"] for row in self._rows(folder) if row["type"] == "file"}
        return {f"{folder}/{name}" if folder else name: size for name, size in found.items()}

    def size(self, name: str) -> int | None:
        """Return the bytes of an object, by asking for it alone (a listing may be late); None: it is not there."""
        try:
            return self._try(name, lambda files, path: files.size(path))
        except FileNotFoundError:
            return None

    def folders(self) -> list[str]:
        """List the names of the folders at the root."""
        rows = self._rows("")
        return sorted(row["name"].rstrip("/").rpartition("/")[2] for row in rows if row["type"] == "directory")

    def strangers(self, folder: str, known: re.Pattern[str]) -> str:
        """Return the name of something in a folder that has no known name; or ""."""
        names = sorted(row["name"].rstrip("/").rpartition("/")[2] for row in self._rows(folder))
        return next((name for name in names if not known.fullmatch(name)), "")

    def read(self, name: str, begin: int = 0, size: int = -1) -> bytes:
        """Return the bytes of an object, or a range of them. Raises FileNotFoundError, OSError."""
        end = None if size < 0 else begin + size
        return self._try(name, lambda files, path: files.cat_file(path, start=begin, end=end))

    @contextmanager
    def opened(self, name: str) -> Iterator[ReadInto]:
        """Yield a function that fills a buffer with a range of an object; threads may share it.

        A file system that has ``fill_from(path, begin, buffer)`` spares the copies.
        """
        is_filling = hasattr(self._at[0], "fill_from")

        def read_into(begin: int, buffer: Buffer) -> None:
            if is_filling:
                return self._try(name, lambda files, path: files.fill_from(path, begin, buffer))
            view = memoryview(buffer)
            found = self.read(name, begin, len(view))
            if len(found) != len(view):
                raise OSError(f"{self.where(name)} ends after {begin + len(found):,} bytes")
            view[:] = found

        yield read_into

    def write(self, name: str, parts: Iterable[Buffer]) -> None:
        """Write a new object, one part after the other; it shows when it is whole."""
        files, path = self._at
        try:
            with files.open(f"{path}/{name}", "wb", block_size=PART) as file:
                for part in parts:
                    file.write(bytes(part))
        except OSError:
            raise
        except Exception as error:  # the back ends raise their own
            if isinstance(error, MeshwrightError):
                raise
            raise OSError(f"{self.where(name)}: {type(error).__name__}: {error}") from error

    def put(self, name: str, content: bytes, *, new: bool = False) -> None:
        """Write a small object at once; FileExistsError where it is to be ``new`` and is there."""
        try:
            self._try(name, lambda files, path: files.pipe_file(path, content, **({"mode": "create"} if new else {})))
        except NotImplementedError:  # a store without conditions
            self._try(name, lambda files, path: files.pipe_file(path, content))

    def remove(self, names: Iterable[str]) -> None:
        """Remove objects; those that are gone already are passed over."""
        for name in names:
            with suppress(FileNotFoundError):
                self._try(name, lambda files, path: files.rm_file(path))


Store = LocalStore | RemoteStore
OWN_MEMORY = "memory://"
"""Addresses in the memory of one process, where no other process can write."""
ON_DISK = ("file://", "local://")
Location = Path | str
"""A folder on disk, or an address like s3://bucket/run/step-00000100."""


def probe(store: Store, ranks: int = 1) -> None:
    """Write and remove a small file. Raises ConfigError where that cannot be, or not by every rank."""
    if ranks > 1 and str(store).startswith(OWN_MEMORY):
        raise ConfigError(
            f"{store} is in the memory of one process, and {ranks} would save there: give a folder or a bucket, or"
            f" --process.count=1"
        )
    name = f".probe-{os.getpid()}"
    try:
        store.put(name, b"meshwright")
        store.remove([name])
    except OSError as error:
        raise ConfigError(
            f"{store} cannot be written ({type(error).__name__}: {error}): create it, or give one that this user or the"
            f" environment's credentials may write to"
        ) from None


def is_remote(location: object) -> bool:
    """Return whether a location is an address, like s3://bucket/folder; one of a folder on disk is a path."""
    return isinstance(location, str) and "://" in location and not location.startswith(ON_DISK)


def path_of(location: Location) -> Path:
    """Return the path of a folder on disk, which may be written as file://PATH or local://PATH."""
    text = str(location)
    return Path(next((text.removeprefix(scheme) for scheme in ON_DISK if text.startswith(scheme)), text)).expanduser()


def absolute(location: Location) -> str:
    """Return a location as an address or an absolute path; "" stays."""
    return str(location) if not str(location) or is_remote(location) else os.path.abspath(path_of(location))


def store_of(root: Location) -> Store:
    """Return the store of everything below a folder."""
    if is_remote(root) and not str(root).partition("://")[2].strip("/"):
        raise ConfigError(f"{root} names no bucket and no folder: give an address like s3://bucket/run")
    return RemoteStore(str(root).rstrip("/")) if is_remote(root) else LocalStore(path_of(root))


def place_of(location: Location) -> tuple[Store, str]:
    """Return the store that holds a checkpoint's folder, and the folder's name in it."""
    if not is_remote(location):
        above, name = os.path.split(os.path.abspath(path_of(location)))
        return LocalStore(Path(above)), name
    above, slash, name = str(location).rstrip("/").rpartition("/")
    if not slash or above.endswith("/"):
        raise ConfigError(f"{location}: give a folder in it, such as {location}/run")
    return RemoteStore(above), name
