"""Allow one job at a time in a run's folder: two would overwrite each other's files."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from meshwright.checkpoint.folder import checkpoints_of
from meshwright.checkpoint.store import place_of
from meshwright.core.errors import ConfigError, IntegrityError

NAME = "running.lock"
_PATIENCE_SEC = 5.0
"""A job that was just killed may need a moment to release its lock."""


@contextlib.contextmanager
def occupied(folder: Path) -> Iterator[None]:
    """Lock ``folder`` for the time of the block. The system releases the lock when this process dies, however it dies.

    If files cannot be locked (some network file systems), there is no lock.

    Raises:
        ConfigError: another job holds the lock; the message names its process and host.
    """
    held = _take(folder / NAME)
    try:
        yield
    finally:
        if held is not None:
            (folder / NAME).unlink(missing_ok=True)  # before the lock is released: who waits sees that it is gone
            os.close(held)


def is_occupied(folder: Path) -> bool:
    """Return whether a job holds ``folder`` now. Changes nothing.

    If files cannot be locked (some network file systems), the folder counts as held as long as the file is there.
    """
    try:
        file = os.open(folder / NAME, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(file)
    return False


def held_by(folder: Path) -> str:
    """Return the job that holds ``folder`` now, in words; "" where none does."""
    if is_occupied(folder):
        with contextlib.suppress(OSError):
            return _holder((folder / NAME).read_bytes()[:1000])
    return ""


def _take(path: Path) -> int | None:
    end = time.monotonic() + _PATIENCE_SEC
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            who = _holder(os.pread(file, 1000, 0))
            os.close(file)
            if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                return None
            if time.monotonic() < end:
                time.sleep(0.05)
                continue
            raise ConfigError(
                f"run = {path.parent} is being trained by {who}: two jobs would overwrite each other's checkpoints."
                f" Wait for it or stop it, or leave run empty for a new folder"
            ) from None
        with contextlib.suppress(FileNotFoundError):  # the file that was locked may no longer be the one of that name
            if os.path.samestat(os.fstat(file), path.stat()):
                me = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.ctime()}
                os.truncate(file, 0)
                os.pwrite(file, json.dumps(me).encode(), 0)
                return file
        os.close(file)


def _holder(lock: bytes) -> str:
    try:
        holder = json.loads(lock)
        return f"another job (process {holder['pid']} on {holder['host']}, since {holder['since']})"
    except (ValueError, KeyError, TypeError):
        return "another job"


def latest_checkpoint(folder: Path) -> str:
    """Return the name of the checkpoint that a run would continue from, "" without one that is whole."""
    try:
        latest = checkpoints_of(folder).latest()
    except IntegrityError:
        return ""
    return "" if latest is None else place_of(latest)[1]
