"""A disk that fails once, at a chosen change."""

from __future__ import annotations

import builtins
import errno
import os
import pathlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager

CHANGES = "write fsync rename replace mkdir"


@contextmanager
def failing_disk(fail_at: int, error: Callable[[], BaseException], kinds: str = CHANGES) -> Iterator[list[str]]:
    """In here the ``fail_at``-th change to the disk by this process, on any of its threads, raises ``error()``.

    0: none does.

    What is yielded lists the changes so far: writes to files that were opened for writing or appending, and calls of
        os.
    """
    seen: list[str] = []

    def count(name: str) -> None:
        if name in kinds.split():
            seen.append(name)
        if len(seen) == fail_at and name in kinds.split():
            raise error()

    def counted(name, function):
        def call(*args, **kwargs):
            count(name)
            return function(*args, **kwargs)

        return call

    class File:
        def __init__(self, file):
            self._file = file

        def write(self, data):
            count("write")
            return self._file.write(data)

        def __getattr__(self, name):
            return getattr(self._file, name)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self._file.close()

    def opened(function):
        def call(place, mode="r", *args, **kwargs):
            file = function(place, mode, *args, **kwargs)
            return File(file) if "w" in mode or "a" in mode else file

        return call

    places = [(os, name) for name in ("write", "fsync", "rename", "replace", "mkdir", "unlink")] + [
        (pathlib.Path, "open"),
        (builtins, "open"),
    ]
    kept = [(place, name, getattr(place, name)) for place, name in places]
    for place, name, function in kept:
        setattr(place, name, opened(function) if name == "open" else counted(name, function))
    try:
        yield seen
    finally:
        for place, name, function in kept:
            setattr(place, name, function)


def full() -> OSError:
    return OSError(errno.ENOSPC, "No space left on device")


def broken() -> OSError:
    return OSError(errno.EIO, "Input/output error")
