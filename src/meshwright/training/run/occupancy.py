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
from typing import Literal

from meshwright.checkpoint.folder import CheckpointFolder, checkpoints_of
from meshwright.checkpoint.store import LocalStore, RemoteStore, Store, absolute, place_of, probe
from meshwright.core.errors import ConfigError, IntegrityError

NAME = "running.lock"
_PATIENCE_SEC = 5.0
"""A job that was just killed may need a moment to release its lock."""


@contextlib.contextmanager
def occupied(folder: Path, key: str = "run") -> Iterator[None]:
    """Lock ``folder`` for the time of the block. The system releases the lock when this process dies, however it dies.

    If files cannot be locked (some network file systems), there is no lock.

    Args:
        key: the key of the config that names the folder.

    Raises:
        ConfigError: another job holds the lock; the message names its process and host.
    """
    held = _take(folder / NAME, key)
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


# --- one run for checkpoints that lie outside its folder

OWNER = "run.json"
"""File beside checkpoints outside a run's folder, with the path of the run whose they are."""


def other_owner(checkpoints: CheckpointFolder, run: Path | Literal[""]) -> Path | None:
    """Return the run, another than ``run``, whose checkpoints are here; None: they are its own, or nobody's so far.

    A run whose folder is gone, with its machine, goes on as one of the same name. A folder that is moved takes its
    checkpoints with it; of one that is copied the first keeps them.

    Args:
        run: its folder; "": one that is still to be made.
    """
    store = checkpoints.store
    named = _owner(store)
    owner = named or Path(str(store)).parent
    is_there = _saves_to(owner, checkpoints)
    if not named and not is_there:
        return None
    goes_on = run and (run.name == owner.name or _saves_to(run, checkpoints)) and not is_there
    if goes_on or (run and run.resolve() == owner.resolve()):
        return None
    # on disk a lock tells of one that has no checkpoint yet
    return owner if isinstance(store, RemoteStore) or checkpoints.steps() else None


def _owner(store: Store) -> Path | None:
    try:
        return Path(json.loads(store.read(OWNER))["run"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _saves_to(run: Path, checkpoints: CheckpointFolder) -> bool:
    return (run / "config.toml").is_file() and absolute(checkpoints_of(run).path) == absolute(checkpoints.path)


@contextlib.contextmanager
def checkpoints_of_one_run(checkpoints: CheckpointFolder, run: Path | Literal[""], identity: object) -> Iterator[None]:
    """Keep other runs from a ``checkpoint.folder``, and on disk other jobs too, for the time of the block.

    Raises:
        ConfigError: it is another run's, or cannot be written.
    """
    probe(store := checkpoints.store)
    with occupied(store.root, "checkpoint.folder") if isinstance(store, LocalStore) else contextlib.nullcontext():
        if owner := other_owner(checkpoints, run):
            raise ConfigError(
                f"checkpoint.folder = {checkpoints.path} has the checkpoints of the run {owner}, and two runs would"
                f" take each other's: give this one a folder of its own, or continue that one with --run={owner}"
            )
        checkpoints.refuse_others(identity)
        yield


def _take(path: Path, key: str) -> int | None:
    end = time.monotonic() + _PATIENCE_SEC
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            who = _holder(os.pread(file, 1000, 0))
            if key != "run" and (owner := _owner(LocalStore(path.parent))):
                who += f", for the run {owner}"
            os.close(file)
            if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                return None
            if time.monotonic() < end:
                time.sleep(0.05)
                continue
            raise ConfigError(
                f"{key} = {path.parent} is {'being trained' if key == 'run' else 'in use'} by {who}: two jobs would"
                f" overwrite each other's checkpoints. Wait for it or stop it, or leave {key} empty for a new folder"
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
